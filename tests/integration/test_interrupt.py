"""One training run that is interrupted in every way there is, resumed each time, and ends as if nothing had happened.

The tests share the run, in this order: each goes on where the one before stopped it.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from digenrl.loop import train
from digenrl.policy import adapter_hash
from flows.services import ServicesHandle, ensure, release
from flows.services.burial import bury
from flows.services.state import ServicesDirectory
from program import Home, Program, flow_runs, gone, post, task_runs, until
from storage import checkpoints
from storage.runs import RunDirectory

# MLflow's own models use what SQLAlchemy 2.1 deprecates; it shows where the database is opened in this process.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

NAME = "interrupted"
ITERATIONS = 46
OVERRIDES = [
    f"iterations={ITERATIONS}",
    "evaluation.every=0",
    "checkpoint.every=2",
    "algorithm.prompts_per_iteration=2",
    "algorithm.samples_per_prompt=3",
    "algorithm.num_steps=6",
    # One of two groups: each checkpoint must hold the weights of two versions.
    "schedule.layout=digenrl",
    "schedule.stale_fraction=0.5",
    "schedule.advantage=group",
]

#: From the request to the end of the program.
STOPS_WITHIN_S = 10.0
#: From the end of the program to the end of everything it started.
GONE_WITHIN_S = 5.0


class Interrupted:
    """The run of this module: started the first time, resumed afterwards."""

    def __init__(self, home: Home, services: ServicesHandle) -> None:
        self.home = home
        self.services = services
        self.directory = RunDirectory(home.path / NAME)
        self.earlier_s = 0.0

    def go_on(self) -> Program:
        """Train until two more checkpoints are there."""
        before = self.newest_step()
        if self.directory.path.exists():
            program = self.home.start("resume", NAME)
        else:
            program = self.home.start("train", "tiny-smoke", *OVERRIDES, "--name", NAME)
        until(
            lambda: program.process.poll() is not None or self.newest_step() >= before + 4, 90, "two more checkpoints"
        )
        assert program.process.poll() is None, program.stdout + program.stderr
        return program

    def newest_step(self) -> int:
        """Iterations of the newest checkpoint, 0 without any."""
        manifests = self.directory.checkpoints.glob("step-*/manifest.json")
        return max((int(path.parent.name.split("-")[1]) for path in manifests), default=0)

    def state(self) -> tuple[str, str]:
        """Type and message of the newest flow run's state."""
        state = flow_runs(self.services.prefect_api, NAME)[-1]["state"]
        return state["type"], state["message"]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Interrupted]:
    path = tmp_path_factory.mktemp("interrupted") / "home"
    with Home(path) as home, ensure(owner="pytest", home=path) as services:
        yield Interrupted(home, services)


def control_c(program: Program, services: ServicesHandle) -> None:
    program.interrupt()


def terminate(program: Program, services: ServicesHandle) -> None:
    """As `timeout` does: the process, and at once its whole group."""
    program.process.send_signal(signal.SIGTERM)
    os.killpg(program.process.pid, signal.SIGTERM)


def close_the_terminal(program: Program, services: ServicesHandle) -> None:
    """The kernel tells the group, and so does the shell."""
    os.killpg(program.process.pid, signal.SIGHUP)
    os.killpg(program.process.pid, signal.SIGHUP)


def cancel(program: Program, services: ServicesHandle) -> None:
    run = flow_runs(services.prefect_api, NAME)[-1]
    answer = post(services.prefect_api, f"/flow_runs/{run['id']}/set_state", {"state": {"type": "CANCELLING"}})
    assert answer["status"] == "ACCEPT"


@pytest.mark.parametrize("stop", [control_c, terminate, close_the_terminal, cancel])
def test_a_stopped_run_is_cancelled_and_leaves_a_whole_checkpoint(
    interrupted: Interrupted, stop: Callable[[Program, ServicesHandle], None]
) -> None:
    program = interrupted.go_on()
    family = program.family()
    assert len(family) > 2, "workers are processes of their own"
    # Python's resource tracker is in it, and ignores what it is sent.
    assert sum(os.getpgid(process.pid) == program.process.pid for process in family) <= 2, "and in no group of ours"
    stop(program, interrupted.services)
    program.ends(130, STOPS_WITHIN_S)
    until(lambda: gone(family), GONE_WITHIN_S, "every child to end")

    state, message = interrupted.state()
    summary = interrupted.directory.read_summary()
    assert summary is not None
    assert summary["status"] == "cancelled"
    assert (state, message) == (
        "CANCELLED",
        f"stopped after {summary['iterations']} iterations; continue with: digenrl resume {NAME}",
    )
    saved = checkpoints.latest(interrupted.directory.checkpoints)
    assert saved is not None
    assert (saved.iteration, saved.url) == (summary["iterations"], summary["checkpoint"])
    assert 0 < saved.iteration < ITERATIONS

    runs = task_runs(interrupted.services.prefect_api, summary["prefect_flow_run_id"])
    assert {run["state"]["type"] for run in runs} <= {"COMPLETED", "CANCELLED"}, "nothing shows as running"
    assert f"digenrl resume {NAME}" in program.stdout
    assert program.stdout.count("stopping: running units are finished, then a checkpoint is saved") == 1
    assert interrupted.earlier_s < summary["seconds"], "of all attempts"
    assert summary["samples"] == 6 * summary["iterations"]
    interrupted.earlier_s = summary["seconds"] + 1
    assert program.stderr == "the servers go on running for pytest\n"


def test_a_run_interrupted_before_it_has_begun_leaves_nothing(interrupted: Interrupted) -> None:
    program = interrupted.home.start("train", "tiny-smoke", "--name", "early")
    until((interrupted.home.path / "early" / "log.txt").exists, 60, "the run's directory")
    family = program.family()
    program.interrupt()
    program.ends(130, STOPS_WITHIN_S)
    until(lambda: gone(family), GONE_WITHIN_S, "every child to end")
    assert "Traceback" not in program.stdout + program.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_whose_workers_start_is_stopped_with_them(interrupted: Interrupted, number: signal.Signals) -> None:
    program = interrupted.home.start("train", "tiny-smoke", "cluster.workers=12", "--name", f"starting-{number.name}")
    until(lambda: "starting workers" in program.stdout, 60, "the workers' start")
    family = program.family()
    os.killpg(program.process.pid, number)
    program.ends(130, 3 * STOPS_WITHIN_S)  # twelve processes that start share the machine with this test
    until(lambda: gone(family), GONE_WITHIN_S, "every child to end")
    summary = RunDirectory(interrupted.home.path / f"starting-{number.name}").read_summary()
    assert summary is not None
    assert (summary["status"], summary["iterations"]) == ("cancelled", 0)
    assert "Traceback" not in program.stdout + program.stderr


def test_a_run_outlives_its_servers_and_starts_them_again(interrupted: Interrupted) -> None:
    overrides = ["iterations=1000", "checkpoint.every=1000", "--name", "orphaned"]
    program = interrupted.home.start("train", "tiny-smoke", *overrides)
    until(lambda: "held-out reward after 0" in program.stdout, 90, "the first evaluation")
    supervisor = ServicesDirectory(interrupted.home.path).read_state().supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGKILL)
    until(lambda: "Prefect answers again" in program.stderr, 90, "the servers")
    interrupted.services.wait()
    client = MlflowClient(interrupted.services.mlflow_uri)

    def degraded() -> list[float]:
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        runs = client.search_runs(experiments, "tags.`digenrl.run` = 'orphaned'")
        found = [run.data.metrics.get("degraded_seconds/prefect") for run in runs]
        return [seconds for seconds in found if seconds is not None]

    until(lambda: bool(degraded()), 60, "MLflow to take what it missed")
    program.interrupt()
    program.ends(130, 3 * STOPS_WITHIN_S)  # the servers are still taking what they missed
    assert "the Prefect server is gone and is started again" in program.stderr
    assert "Traceback" not in program.stderr
    (run,) = flow_runs(interrupted.services.prefect_api, "orphaned")
    assert run["state"]["type"] == "CANCELLED"
    (seconds,) = degraded()
    assert 1.0 < seconds < 90


def test_a_run_is_trained_by_one_process(interrupted: Interrupted) -> None:
    with interrupted.directory.held():
        program = interrupted.home.run("resume", NAME, code=2)
    assert f"is being trained by process {os.getpid()}" in program.stderr


def test_after_kill_9_nothing_is_left(interrupted: Interrupted) -> None:
    program = interrupted.go_on()
    supervisor = ServicesDirectory(interrupted.home.path).read_state().supervisor
    assert supervisor is not None
    family = [*program.family(), psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children(True)]
    assert release(interrupted.services) == [f"train {NAME}"]
    os.kill(program.process.pid, signal.SIGKILL)
    program.wait()
    until(lambda: gone(family), GONE_WITHIN_S, "workers, supervisor and servers to end")
    assert (interrupted.directory.read_summary() or {})["status"] == "running"


def test_a_run_is_not_resumed_as_another_one(interrupted: Interrupted) -> None:
    as_it_was = interrupted.directory.config_path.read_bytes()
    interrupted.directory.write_config(interrupted.directory.read_config().model_copy(update={"seed": 7}))
    try:
        program = interrupted.home.run("resume", NAME, code=2)
    finally:
        interrupted.directory.config_path.write_bytes(as_it_was)
    assert "seed was 0 when the checkpoint was saved and is 7 now" in program.stderr
    assert not Path(interrupted.home.path / ".services" / "services.json").exists(), "no server was started for that"


def test_the_resumed_run_ends_like_an_uninterrupted_one(interrupted: Interrupted) -> None:
    damaged = checkpoints.latest(interrupted.directory.checkpoints)
    assert damaged is not None
    file = interrupted.directory.checkpoints / damaged.folder / "adapter.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    with ensure(owner="pytest", home=interrupted.home.path) as services:
        interrupted.services = services
        killed = flow_runs(services.prefect_api, NAME)[-1]
        assert killed["state"]["type"] == "RUNNING"
        assert bury(services.prefect_api, interrupted.home.path) == [NAME]
        assert interrupted.state() == ("CRASHED", f"its process ended; continue with: digenrl resume {NAME}")
        assert bury(services.prefect_api, interrupted.home.path) == []
        unfinished = {"RUNNING", "PENDING"}
        assert not [run for run in task_runs(services.prefect_api, killed["id"]) if run["state"]["type"] in unfinished]
        program = interrupted.home.run("resume", NAME)
        assert len(re.findall("^note: checkpoint ", program.stderr, re.MULTILINE)) == 1
        assert f"{damaged.folder}: adapter.safetensors has" in program.stderr
        assert "using the checkpoint before it" in program.stderr
        assert interrupted.state() == ("COMPLETED", f"{ITERATIONS} iterations")
        states = [run["state"]["type"] for run in flow_runs(services.prefect_api, NAME)]
        assert states[:-1] == ["CANCELLED"] * (len(states) - 2) + ["CRASHED"], "the killed one, too, has ended"
        summary = interrupted.directory.read_summary()
        assert summary is not None
        _check_tracking(services.mlflow_uri, summary["mlflow_run_id"])

    assert (summary["status"], summary["iterations"]) == ("completed", ITERATIONS)
    last = checkpoints.latest(interrupted.directory.checkpoints)
    assert last is not None
    assert last.iteration == ITERATIONS
    # As the run has it: `auto` is settled by what is measured once, and written down.
    result = train(interrupted.directory.read_config())
    found = checkpoints.load(last)
    assert result.previous is not None
    assert adapter_hash(found.tensors["previous_adapter"]) == adapter_hash(result.previous.weights)
    assert found.state["previous_theta"] == result.previous.theta
    assert found.state["adapter_hash"] == adapter_hash(found.tensors["adapter"]) == adapter_hash(result.adapter.weights)


def _check_tracking(uri: str, run_id: str) -> None:
    client = MlflowClient(uri)
    experiment = client.get_run(run_id).info.experiment_id
    (run,) = client.search_runs([experiment], f"attributes.run_name = '{NAME}'")
    assert (run.info.run_id, run.info.run_name, run.info.status) == (run_id, NAME, "FINISHED")
    for metric in ("reward/mean", "iteration/seconds", "train/grad_norm"):
        assert [m.step for m in client.get_metric_history(run_id, metric)] == list(range(ITERATIONS)), metric


def test_a_completed_run_is_not_resumed(interrupted: Interrupted) -> None:
    program = interrupted.home.run("resume", NAME, code=2)
    assert f"the run {NAME!r} is complete" in program.stderr
    assert not Path(interrupted.home.path / ".services" / "services.json").exists(), "no server was started for that"
