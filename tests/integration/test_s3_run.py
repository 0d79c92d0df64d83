"""A run with checkpoints on S3 is killed, and goes on on a machine that knows only where they are.

The first machine has its key in a Prefect block, the second one in the environment. The tests share the run, in order.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from digenrl.loop import train
from digenrl.policy import adapter_hash
from flows.services import ServicesHandle, ensure
from program import Home, gone, until
from s3_server import BUCKET, KEY, SECRET, S3Server
from storage import checkpoints
from storage.runs import RunDirectory

# MLflow's own models use what SQLAlchemy 2.1 deprecates; it shows where the database is opened in this process.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")

NAME = "moved"
PLACE = f"s3://{BUCKET}/trained/{NAME}"
ITERATIONS = 10
OVERRIDES = [
    f"iterations={ITERATIONS}",
    "evaluation.every=0",
    "schedule.observe.detail=iteration",
    "checkpoint.every=1",
    "checkpoint.keep.every=4",
    f"checkpoint.url=s3://{BUCKET}/trained",
    "checkpoint.credentials_block=s3-key",
    "algorithm.prompts_per_iteration=2",
    "algorithm.samples_per_prompt=3",
    "algorithm.num_steps=6",
]
BLOCK = "import os; from prefect.blocks.system import Secret; Secret(value={value!r}).save('s3-key')"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("first") / "home") as home:
        yield home


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    with Home(tmp_path_factory.mktemp("second") / "home") as home:
        yield home


def test_a_key_in_a_prefect_block_opens_the_storage(server: S3Server, first: Home) -> None:
    with ensure(owner="pytest", home=first.path) as services:
        keep_in_block(server, services)
        program = first.start("train", "tiny-smoke", *OVERRIDES, "--name", NAME)
        store = server.store(f"trained/{NAME}")
        until(
            lambda: (
                program.process.poll() is not None or any(info.iteration >= 3 for info in checkpoints.committed(store))
            ),
            120,
            "three iterations on S3",
        )
        assert program.process.poll() is None, program.stdout + program.stderr
        family = program.family()
        os.kill(program.process.pid, signal.SIGKILL)
        program.wait()
        until(lambda: gone(family), 10, "the workers to end")
    assert not RunDirectory(first.path / NAME).checkpoints.exists()
    saved = checkpoints.latest(store)
    assert saved is not None and 3 <= saved.iteration < ITERATIONS
    assert "note:" not in program.stderr


def keep_in_block(server: S3Server, services: ServicesHandle) -> None:
    value = {"key": KEY, "secret": SECRET, "endpoint": server.endpoint}
    environment = {**os.environ, **services.client_env()}
    subprocess.run([sys.executable, "-c", BLOCK.format(value=value)], env=environment, timeout=120, check=True)


def test_it_goes_on_where_only_the_place_is_known_and_through_an_outage(server: S3Server, second: Home) -> None:
    program = second.start("resume", PLACE, environment=server.environment)
    directory = RunDirectory(second.path / NAME)
    store = server.store(f"trained/{NAME}")
    began = checkpoints.committed(store)[0].iteration
    until(
        lambda: program.process.poll() is not None or checkpoints.committed(store)[0].iteration >= began + 2,
        120,
        "two more",
    )
    assert program.process.poll() is None, program.stdout + program.stderr
    server.kill()
    until(lambda: "cannot be saved" in program.stderr, 60, "a line about the outage")
    time.sleep(1.0)
    server.start()
    program.ends(0)

    notes = re.findall("^note: (.*)", program.stderr, re.MULTILINE)
    assert len(notes) == 3, program.stderr
    assert "does not have the run" in notes[0] and "a new one takes the metrics so far" in notes[0]
    assert notes[1].startswith(f"checkpoints cannot be saved in {PLACE} (")
    assert notes[2].startswith(f"checkpoints are saved in {PLACE} again after ")
    summary = directory.read_summary()
    assert summary is not None
    assert (summary["status"], summary["iterations"]) == ("completed", ITERATIONS)
    with ensure(("mlflow",), owner="pytest", home=second.path) as services:
        client = MlflowClient(services.mlflow_uri)
        degraded = client.get_metric_history(summary["mlflow_run_id"], "degraded_seconds/storage")
        assert degraded[-1].value > 1.0
        rewards = client.get_metric_history(summary["mlflow_run_id"], "reward/mean")
        assert [metric.step for metric in rewards] == list(range(ITERATIONS)), "those of the first machine too"


def test_it_ends_like_a_run_that_was_never_moved(server: S3Server, second: Home) -> None:
    config = RunDirectory(second.path / NAME).read_config()
    assert (config.checkpoint.url, config.checkpoint.endpoint) == (f"s3://{BUCKET}/trained", server.endpoint)
    last = checkpoints.newest(server.store(f"trained/{NAME}"))
    assert last is not None and last.info.iteration == ITERATIONS
    result = train(config)
    assert last.state["adapter_hash"] == adapter_hash(last.tensors["adapter"]) == adapter_hash(result.adapter.weights)
    assert adapter_hash(last.tensors["optimizer"]) == adapter_hash(result.optimizer.to_tensors())
    assert last.state["theta"] == result.adapter.theta


def test_its_checkpoints_are_listed_verified_and_pruned(server: S3Server, second: Home) -> None:
    with_key = server.environment
    kept = {info.iteration: info for info in checkpoints.committed(server.store(f"trained/{NAME}"))}
    assert {4, ITERATIONS} <= set(kept), "which others depends on what fell into the outage"
    assert len(kept) <= 5

    def run(*argv: str, code: int = 0) -> str:
        program = second.start("checkpoints", *argv, environment=with_key)
        program.ends(code)
        return program.stdout + program.stderr

    listed = run("list", NAME)
    assert [line.split()[0] for line in listed.splitlines()] == ["iterations", *map(str, sorted(kept))]
    assert all(info.url in listed for info in kept.values())

    assert run("verify", PLACE).count("whole  s3://") == len(kept)
    files = server.files()
    files.pipe_file(f"{BUCKET}/trained/{NAME}/{kept[4].folder}/adapter.safetensors", b"cut")
    damaged = run("verify", NAME, code=1)
    assert "adapter.safetensors has 3 bytes" in damaged and f"1 of {len(kept)} checkpoints are damaged" in damaged

    files.pipe_file(f"{BUCKET}/trained/{NAME}/step-000099-0123abcd/adapter.safetensors", b"never committed")
    assert "1 saves were interrupted or go on: step-000099-0123abcd" in run("list", PLACE)
    assert f"2 removed  {kept[4].folder}  step-000099-0123abcd" in run("prune", NAME)
    left = [info.iteration for info in checkpoints.committed(server.store(f"trained/{NAME}"))]
    assert sorted(left) == sorted(set(kept) - {4})


def test_its_name_is_taken_elsewhere_too(server: S3Server, tmp_path: Path) -> None:
    with Home(tmp_path / "third") as third:
        argv = ["train", "tiny-smoke", f"checkpoint.url=s3://{BUCKET}/trained", "--name", NAME]
        program = third.start(*argv, environment=server.environment)
        program.ends(2)
        assert f"{PLACE} holds checkpoints of another run" in program.stderr
        assert not (third.path / NAME).exists() and not (third.path / ".services").exists()


def test_the_key_is_written_down_nowhere(first: Home, second: Home) -> None:
    seen = 0
    for home in (first, second):
        for path in (path for top in (home.path, home.user) for path in top.rglob("*") if path.is_file()):
            seen += 1
            assert SECRET.encode() not in path.read_bytes(), path
    assert seen > 20
    assert not [process for process in psutil.process_iter() if SECRET in " ".join(_command(process))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
