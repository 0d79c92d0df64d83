"""`digenrl train` as a user runs it: what a small run leaves on disk, in Prefect and in MLflow, and what it prints."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import numpy as np
import pytest
import torch
from mlflow import MlflowClient
from PIL import Image

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.data.evaluate_tiny_sd3 import load
from digenrl.identity import SampleId, normal
from digenrl.models.checkpoint import locate
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import ScoreUnit, UpdateUnit
from flows.inference import Inference
from flows.services import ServicesHandle, ensure
from flows.services.state import ServicesDirectory
from flows.weights import newest_weights
from program import Home, Program, flow_runs, pages, post, task_runs, until
from storage import checkpoints
from storage.runs import RunDirectory

NAME = "tiny-smoke-1"
#: What every ended run says about servers that the tests hold.
SERVERS_NOTE = "the servers go on running for pytest\n"


@dataclass(frozen=True)
class Finished:
    """A home with one complete run, its servers still up."""

    home: Home
    services: ServicesHandle
    program: Program
    directory: RunDirectory
    config: RunConfig
    shape: RunShape

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        summary = self.directory.read_summary()
        assert summary is not None
        return summary

    def task_runs(self) -> dict[str, dict[str, Any]]:
        """Prefect's task runs by name."""
        runs = task_runs(self.services.prefect_api, self.summary["prefect_flow_run_id"])
        named = {run["name"]: run for run in runs}
        assert len(named) == len(runs), "each name once"
        return named


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    path = tmp_path_factory.mktemp("train") / "home"
    with Home(path) as home, ensure(owner="pytest", home=path) as services:
        # In a run of seconds, its detailed iteration leaves `auto` nothing to show micro-batches with.
        observed = "schedule.observe.detail=microbatch"
        program = home.run("train", "tiny-smoke", observed)
        config = load_config("tiny-smoke", [observed])
        shape = runspec.shape(config, config.evaluation.prompts)
        yield Finished(home, services, program, RunDirectory(path / NAME), config, shape)


# --- what is on disk ---


def test_the_summary_says_how_it_went(finished: Finished) -> None:
    summary = finished.summary
    assert (summary["run"], summary["status"]) == (NAME, "completed")
    assert (summary["iterations"], summary["samples"], summary["seed"]) == (2, 32, 0)
    low, high = summary["eval_ci95"]
    assert 0 <= low <= summary["eval_after"] <= high <= 1
    assert 0 <= summary["eval_before"] <= 1
    assert summary["eval_rise"] == pytest.approx(summary["eval_after"] - summary["eval_before"], abs=1e-5)
    assert summary["eval_curve"] == {"0": summary["eval_before"], "2": summary["eval_after"]}
    assert 0 < summary["seconds"] < 120
    assert 32 / summary["seconds"] < summary["samples_per_second"] < 1000, "the start does not count"
    assert set(summary["utilisation"]) == {"worker 0", "worker 1"}
    assert all(0 < share <= 1 for share in summary["utilisation"].values())
    assert 0 < summary["observing_share"] < 0.2


def test_the_configuration_is_kept_as_resolved(finished: Finished) -> None:
    kept = finished.directory.read_config()
    schedule = finished.config.schedule.model_copy(update={"advantage": "group"})
    assert kept == finished.config.model_copy(update={"schedule": schedule})


def test_the_checkpoint_is_whole_and_named(finished: Finished) -> None:
    info = checkpoints.latest(finished.directory.checkpoints)
    assert info is not None
    assert (info.iteration, info.url) == (2, finished.summary["checkpoint"])
    state = checkpoints.load(info).state
    assert state["mlflow_run_id"] == finished.summary["mlflow_run_id"]
    assert state["theta"] == 2 * finished.config.algorithm.updates_per_iteration


def test_pictures_are_there(finished: Finished) -> None:
    pictures = finished.directory.path / "pictures"
    names = {"before-after.png", "held-out-000000.png", "held-out-000002.png", "learning-curve.png"}
    assert {path.name for path in pictures.iterdir()} == names
    for path in pictures.iterdir():
        with Image.open(path) as picture:
            picture.verify()


def test_the_timeline_has_every_unit_once_and_says_what_devices_waited_for(finished: Finished) -> None:
    events = json.loads(finished.directory.timeline_path.read_bytes())["traceEvents"]
    shape = runspec.shape(finished.directory.read_config(), finished.config.evaluation.prompts)
    batches = [batch for iteration in (0, 1) for batch in shape.micro_batches(iteration)]
    units = [UpdateUnit(theta + 1) for theta in range(2 * shape.updates)]
    units += [unit for batch in batches for unit in shape.train_units(batch)]
    batches += [batch for version in (0, 2) for batch in shape.eval_micro_batches(version)]
    units += [unit for batch in batches for unit in (*shape.rollout_units(batch), ScoreUnit(batch))]
    ran = [event["name"] for event in events if event["ph"] == "X" and event["cat"] != "bubble"]
    assert sorted(ran) == sorted(unit.label for unit in units)
    with Image.open(finished.directory.path / "timeline.png") as picture:
        assert picture.width > 1000

    bubbles = finished.summary["bubbles"]
    assert 0 < sum(bubbles.values()) < 1
    assert bubbles["weights"] > 0, "on policy, rollouts wait for the optimiser's last step"
    assert "devices waited for " in finished.program.stdout
    assert f"timeline    {finished.directory.path / 'timeline.png'}" in finished.program.stdout


def test_what_the_run_measured_plans_the_next_one(finished: Finished, tmp_path: Path) -> None:
    plan = finished.home.run("plan", "tiny-smoke", "iterations=50", "--gantt", str(tmp_path)).stdout
    assert f"costs: measured by the run {NAME}" in plan
    assert {path.name for path in tmp_path.iterdir()} == {"plan-tiny-smoke.png", "plan-tiny-smoke.html"}


def test_diffusers_draws_with_the_lora_what_the_run_draws(finished: Finished) -> None:
    inference = Inference(finished.config)
    samples = [SampleId(0, 0, group, 0) for group in range(3)]
    prompts = ["042", "137", "905"]
    trained = newest_weights(finished.directory, finished.directory.read_config()).adapter
    _, ours = inference.generate("trained", trained, samples, prompts)
    _, base = inference.generate("base", inference.base, samples, prompts)

    pipeline: Any = load(locate(finished.config.model.path))
    pipeline.load_lora_weights(finished.directory.path / "lora")
    shape = inference.policy.model.latent_shape(runspec.geometry(finished.config))
    drawn = pipeline(
        prompts,
        latents=torch.stack([normal(sample, "init", 0, shape) for sample in samples]),
        height=finished.config.model.height,
        width=finished.config.model.width,
        num_inference_steps=finished.config.evaluation.num_steps,
        guidance_scale=1.0,
        max_sequence_length=0,
    ).images
    theirs = np.stack([np.asarray(picture) for picture in drawn]).astype(int)
    assert np.abs(theirs - ours[:, 0]).max() <= 1
    assert np.abs(theirs - base[:, 0]).max() > 1, "the adapter makes a difference"


def test_the_log_has_what_the_terminal_has_not(finished: Finished) -> None:
    log = finished.directory.log_path.read_text()
    for part in ("flows.logbook: iteration 1: ", "saved file://", "prefect.flow_runs: Finished in state Completed"):
        assert part in log
    assert "prefect.task_runs" not in log
    # Dask's own lines may say that a worker's heartbeat met a scheduler that was closing.
    assert not re.search(r" ERROR +(flows|tasks|workers|storage|digenrl)\.", log)


# --- what Prefect shows ---


def test_prefect_shows_every_unit_of_the_first_iteration(finished: Finished) -> None:
    (flow_run,) = flow_runs(finished.services.prefect_api, NAME)
    assert flow_run["id"] == finished.summary["prefect_flow_run_id"]
    assert (flow_run["state"]["type"], flow_run["state"]["message"]) == ("COMPLETED", "2 iterations")

    runs = finished.task_runs()
    assert {run["state"]["type"] for run in runs.values()} == {"COMPLETED"}
    units = [
        unit
        for batch in finished.shape.micro_batches(0)
        for unit in (*finished.shape.rollout_units(batch), ScoreUnit(batch), *finished.shape.train_units(batch))
    ]
    units += [UpdateUnit(theta + 1) for theta in range(finished.shape.updates)]
    assert "rollout i0 m3 t4" in runs
    for unit in units:
        role, worker, *rest = _in_order(runs[unit.label]["tags"])
        assert role == unit.label.partition(" ")[0]
        assert worker in ("worker 0", "worker 1")
        assert rest == ["version 0", "iteration 0"]
    (page,) = pages(finished.services.prefect_api, flow_run["id"])
    assert (page["name"], page["state"]["type"]) == ("iteration 0", "COMPLETED")
    assert {run["name"] for run in runs.values() if run["flow_run_id"] == page["id"]} == {u.label for u in units}
    rest = {name for name, run in runs.items() if run["flow_run_id"] == flow_run["id"]}
    later = {batch.label for batch in finished.shape.micro_batches(1)}
    (node,) = (name for name in rest if runs[name]["state"]["state_details"]["child_flow_run_id"] == page["id"])
    assert rest == {node, "evaluate v0", "evaluate v2", *later}, "coarser after the first"


def test_prefect_has_the_runs_own_log_lines(finished: Finished) -> None:
    body = {"logs": {"flow_run_id": {"any_": [finished.summary["prefect_flow_run_id"]]}}, "sort": "TIMESTAMP_ASC"}
    lines = [line["message"] for line in post(finished.services.prefect_api, "/logs/filter", body)]
    wanted = (
        "worker 0 joined",
        "version 0 evaluated: ",
        "iteration 0: ",
        "iteration 1: ",
        "finishing",
        "saved file://",
    )
    places = [next(i for i, line in enumerate(lines) if line.startswith(part)) for part in wanted]
    assert places == sorted(places), "in the order in which it happened"
    assert len(lines) < 30


def _in_order(tags: list[str]) -> list[str]:
    """role, worker, version, iteration"""
    words = ("worker", "version", "iteration")
    (role,) = (tag for tag in tags if not tag.startswith(words))
    return [role, *(tag for word in words for tag in tags if tag.startswith(word))]


def test_prefect_shows_what_waits_for_what(finished: Finished) -> None:
    runs, shape = finished.task_runs(), finished.shape
    names = {run["id"]: name for name, run in runs.items()}

    def upstream(name: str) -> set[str]:
        return {names[given["id"]] for given in runs[name]["task_inputs"].get("wait_for", [])}

    for batch in shape.micro_batches(0):
        rollouts = [unit.label for unit in shape.rollout_units(batch)]
        assert upstream(rollouts[0]) == set()
        for earlier, later in itertools.pairwise(rollouts):
            assert upstream(later) == {earlier}
        assert upstream(ScoreUnit(batch).label) == {rollouts[-1]}
        group = [m for m in shape.micro_batches(0) if shape.group_of(m) == shape.group_of(batch)]
        for unit in shape.train_units(batch):
            assert upstream(unit.label) == {ScoreUnit(m).label for m in group}
    for theta in range(1, shape.updates + 1):
        _, groups = shape.groups_of_update(theta)
        members = [m for m in shape.micro_batches(0) if shape.group_of(m) in groups]
        assert upstream(UpdateUnit(theta).label) == {unit.label for m in members for unit in shape.train_units(m)}


def test_prefect_has_recorded_all_that_was_emitted(finished: Finished) -> None:
    (emitted,) = re.findall(
        r"waiting until Prefect has recorded (\d+) task runs", finished.directory.log_path.read_text()
    )
    assert int(emitted) == len(finished.task_runs())
    assert "of {emitted} task runs" not in finished.program.stderr


# --- what MLflow shows ---


def test_mlflow_has_the_run_with_one_value_per_step(finished: Finished, tmp_path: Path) -> None:
    client = MlflowClient(finished.services.mlflow_uri)
    run_id = finished.summary["mlflow_run_id"]
    run = client.get_run(run_id)
    (only,) = client.search_runs([run.info.experiment_id])
    assert only.info.run_id == run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", NAME)
    assert run.data.params["algorithm.samples_per_prompt"] == "4"
    assert run.data.tags["digenrl.run"] == NAME
    note = run.data.tags["mlflow.note.content"]
    for part in (
        f"/runs/flow-run/{finished.summary['prefect_flow_run_id']})",
        f"digenrl resume {NAME}",
        "digenrl serve",
    ):
        assert part in note

    for name in run.data.metrics:
        steps = [metric.step for metric in client.get_metric_history(run_id, name)]
        if name.startswith("guard/") and name != "guard/state":
            assert steps == [2], f"{name}: nothing is held against the base model itself"
        elif name == "logp_gap/floor":
            assert steps == [0], "measured once"
        else:
            assert steps == ([0, 2] if name.startswith(("eval/", "guard/")) else [0, 1]), name
    wanted = {"reward/mean", "reward/std", "reward/p50", "eval/reward_mean", "train/grad_norm", "train/ratio"}
    wanted |= {"reward/ocr/mean", "reward/ocr/std", "eval/ocr/mean"}
    wanted |= {"bubble/samples", "bubble/weights", "bubble/std_scope", "bubble/orchestration"}
    wanted |= {"guard/state", "guard/edges", "guard/failed_state", "train/diversity"}
    wanted |= {"samples/per_second", "utilisation/worker_0", "utilisation/worker_1", "iteration/seconds"}
    assert wanted <= run.data.metrics.keys()
    assert run.data.metrics["eval/reward_mean"] == pytest.approx(finished.summary["eval_after"], abs=1e-5)

    files = {file.path for file in client.list_artifacts(run_id)}
    assert {"lora", "images", "summary.json", "config.yaml", "learning-curve.png", "before-after.png"} <= files
    assert {"timeline.json", "timeline.png"} <= files
    grids = [file.path for file in client.list_artifacts(run_id, "images") if file.path.endswith(".png")]
    assert Counter(re.findall(r"held-out-(\d+)", " ".join(grids))) == {"000000": 1, "000002": 1}
    (adapter,) = client.list_artifacts(run_id, "lora")
    copy = Path(client.download_artifacts(run_id, adapter.path, str(tmp_path)))
    assert copy.read_bytes() == (finished.directory.path / "lora" / copy.name).read_bytes()
    uploaded = json.loads(Path(client.download_artifacts(run_id, "summary.json", str(tmp_path))).read_bytes())
    assert uploaded == finished.summary


# --- what the user sees ---


def assert_clean(program: Program, stderr: str = SERVERS_NOTE) -> None:
    """Nothing but our own lines: no colours, no tracebacks, no other program's messages."""
    assert program.stderr == stderr
    assert "\x1b" not in program.stdout
    assert "Traceback" not in program.stdout
    for line in program.stdout.splitlines():
        assert not re.match(r"\d\d:\d\d:\d\d|\d{4}[-/]\d\d|.*(WARNING|ERROR|INFO|Warning:)", line), line


def test_the_output_is_ours_alone(finished: Finished) -> None:
    assert_clean(finished.program)
    lines = finished.program.stdout.splitlines()
    assert any(re.match(r"\[ *\d+\.\d s\] iteration 2/2  reward \d", line) for line in lines)
    summary = finished.summary
    assert f"{summary['eval_before']:.3f} → {summary['eval_after']:.3f}" in finished.program.stdout


def test_the_pages_are_named_before_the_first_iteration_and_by_serve(finished: Finished) -> None:
    lines = finished.program.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if "iteration 1/2" in line)
    prefect = f"{finished.services.urls['prefect']}/runs/flow-run/{finished.summary['prefect_flow_run_id']}"
    mlflow = f"/runs/{finished.summary['mlflow_run_id']}/model-metrics?workflowType=machine_learning"
    assert any(line.endswith(f"Prefect  {prefect}") for line in lines[:first])
    assert any("MLflow   http" in line and line.endswith(mlflow) for line in lines[:first])
    assert finished.program.stdout.count("digenrl serve") == 1

    serving = finished.home.start("serve")
    until(lambda: "Ctrl-C" in serving.stdout, 30, "the addresses")
    _, _, name, *pages_of_it = serving.stdout.splitlines()[:5]
    assert name == NAME
    assert pages_of_it[0] == f"  Prefect  {prefect}"
    assert pages_of_it[1].startswith(f"  MLflow   {finished.services.urls['mlflow']}/#/experiments/")
    assert pages_of_it[1].endswith(mlflow)
    serving.interrupt()
    serving.ends(0)


def test_nothing_is_written_outside_the_home(finished: Finished) -> None:
    assert {path.name for path in finished.home.user.iterdir()} <= {
        f"{i}.{s}" for i in range(20) for s in ("out", "err")
    }


def test_a_home_whose_ports_are_taken_uses_others(finished: Finished, services: ServicesHandle) -> None:
    ports = [urlparse(url).port for handle in (finished.services, services) for url in handle.urls.values()]
    assert len(set(ports)) == 4


def test_two_runs_at_once_share_the_servers(finished: Finished) -> None:
    state = ServicesDirectory(finished.home.path).read_state()
    programs = [finished.home.start("train", "tiny-smoke", "evaluation.every=0") for _ in range(2)]
    for program in programs:
        program.ends(0)
    assert ServicesDirectory(finished.home.path).read_state() == state
    names = {path.parent.name for path in finished.home.path.glob("*/summary.json")}
    assert {"tiny-smoke-2", "tiny-smoke-3"} <= names
    first, second = (RunDirectory(finished.home.path / f"tiny-smoke-{n}").read_summary() or {} for n in (2, 3))
    assert first["status"] == second["status"] == "completed"
    assert first["mlflow_run_id"] != second["mlflow_run_id"]
    hashes = set()
    for name in (NAME, "tiny-smoke-2", "tiny-smoke-3"):
        info = checkpoints.latest(RunDirectory(finished.home.path / name).checkpoints)
        assert info is not None
        hashes.add(checkpoints.load(info).state["adapter_hash"])
    assert len(hashes) == 1, "the same seed gives the same weights, alone or beside another run"
    for program in programs:
        assert_clean(program, program.stderr)
        assert re.fullmatch(r"the servers go on running for [\w, -]+\n", program.stderr)


def test_what_is_refused_names_the_way_out(finished: Finished) -> None:
    taken = finished.home.run("train", "tiny-smoke", "--name", NAME, code=2)
    assert f"digenrl resume {NAME}" in taken.stderr
    complete = finished.home.run("resume", NAME, code=2)
    assert "is complete (2 iterations)" in complete.stderr
    assert taken.stdout == complete.stdout == ""


def test_a_failing_run_says_why_in_one_sentence(finished: Finished) -> None:
    # The first update makes the weights infinite, so that no picture of the second iteration can be scored.
    huge = ["optimizer.learning_rate=1e30", "optimizer.warmup_iterations=0", "evaluation.every=0"]
    program = finished.home.run("train", "tiny-smoke", *huge, "--name", "failing", code=1)
    *_, sentence = program.stderr.removesuffix(SERVERS_NOTE).splitlines()
    assert re.fullmatch(
        r"digenrl: \d+ of 16 samples of iteration 1 failed; gates\.max_failed_share=0.5 allows 8; the first: .+",
        sentence,
    )
    assert "Traceback" not in program.stdout + program.stderr
    (flow_run,) = flow_runs(finished.services.prefect_api, "failing")
    assert flow_run["state"]["type"] == "FAILED"
    assert "Traceback (most recent call last)" in (finished.home.path / "failing" / "log.txt").read_text()
    summary = RunDirectory(finished.home.path / "failing").read_summary()
    assert summary is not None and summary["status"] == "failed"


def test_a_start_that_fails_leaves_the_name(finished: Finished, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(locate(finished.config.model.path), copy)
    (weights,) = (copy / "vae").glob("*.safetensors")
    weights.unlink()
    options = ["iterations=1", "evaluation.every=0", "schedule.timestep_batch=1", "--name", "corrected"]
    program = finished.home.run("train", "tiny-smoke", f"model.path={copy}", *options, code=1)
    assert (program.stdout + program.stderr).count("could not be loaded") == 2, "when it happens, and at the end"
    assert max(map(len, program.stderr.splitlines())) < 500
    corrected = finished.home.run("train", "tiny-smoke", *options)
    assert "1 iterations, 16 samples" in corrected.stdout
    states = [run["state"]["type"] for run in flow_runs(finished.services.prefect_api, "corrected")]
    assert states == ["FAILED", "COMPLETED"]


def test_another_prefect_server_and_no_mlflow(finished: Finished, services: ServicesHandle, tmp_path: Path) -> None:
    options = ["iterations=1", "evaluation.every=0", "tracking.uri=none", "--prefect-api", services.prefect_api]
    with Home(tmp_path / "other") as other:
        program = other.run("train", "tiny-smoke", *options, "--name", "elsewhere")
        assert_clean(program, "")
        assert not (other.path / ".services" / "services.json").exists(), "none of our own servers"
        summary = RunDirectory(other.path / "elsewhere").read_summary()
    assert summary is not None
    assert (summary["status"], summary["mlflow_run_id"]) == ("completed", None)
    (flow_run,) = flow_runs(services.prefect_api, "elsewhere")
    assert (flow_run["id"], flow_run["state"]["type"]) == (summary["prefect_flow_run_id"], "COMPLETED")
    assert post(services.prefect_api, "/task_runs/count", {"flow_runs": {"id": {"any_": [flow_run["id"]]}}}) > 0
