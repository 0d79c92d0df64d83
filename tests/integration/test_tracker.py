"""Tracking survives resume and outages; checked through MLflow's own client, over HTTP and on SQLite."""

from __future__ import annotations

import logging
import math
import os
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from mlflow import MlflowClient
from PIL import Image

from digenrl.config.load import load_config
from flows.history import History, IterationRow
from flows.recording import open_tracker
from flows.services import ServicesHandle
from flows.services.state import ServicesDirectory
from flows.tracking import Tracking
from storage.outbox import Outbox
from storage.processes import is_running
from storage.runs import RunDirectory
from storage.tracker import RunMissing, Tracker

# MLflow's own models use what SQLAlchemy 2.1 deprecates; it shows where the database is opened in this process.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy is deprecated")


@pytest.fixture(scope="module")
def sqlite_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database whose tables exist: creating them takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


def history(client: MlflowClient, run_id: str, name: str) -> list[tuple[int, float]]:
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, name)]


def crash_and_resume(uri: str, artifacts: Path | None) -> None:
    def tracker() -> Tracker:
        return Tracker(uri, "resume", artifact_location=str(artifacts) if artifacts else None)

    crashed = tracker()
    run_id = crashed.start("ocr-1", {"lr": 3e-4, "seed": 1}, {"preset": "ocr"})
    for step in range(6):
        crashed.log_iteration(step, {"reward/mean": step / 10, "grad_norm": math.inf if step == 2 else 1.0})
    crashed.log_image("samples/fixed", np.zeros((8, 8, 3), np.uint8), step=0)
    # Everything is delivered and then the process is gone: FAILED stands for "any status".
    assert crashed.finish("FAILED") == 0

    resumed = tracker()
    resumed.resume(run_id, {"lr": 1e-4, "seed": 1, "layout": "colocated"}, {"mlflow.note.content": "resumed"})
    for step in range(4, 8):
        resumed.log_iteration(step, {"reward/mean": 100.0 + step, "logp_gap/t=3": 0.5})
    resumed.log_image("samples/fixed", np.zeros((8, 8, 3), np.uint8), step=0)
    resumed.log_image("samples/fixed", Image.new("RGB", (8, 8)), step=5)
    resumed.log_text("notes/config.yaml", "seed: 1\n")
    assert resumed.finish() == 0

    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.data.tags["mlflow.note.content"] == "resumed"
    assert client.get_experiment(run.info.experiment_id).tags["mlflow.experimentKind"] == "custom_model_development"
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.0003", "seed": "1", "layout": "colocated"}
    changed = {k: v for k, v in run.data.tags.items() if k.startswith("param_changed.")}
    assert changed == {"param_changed.lr": "0.0001"}
    assert history(client, run_id, "reward/mean") == [(i, i / 10) for i in range(6)] + [(6, 106.0), (7, 107.0)]
    assert [step for step, _ in history(client, run_id, "grad_norm")] == [0, 1, 3, 4, 5]
    assert history(client, run_id, "grad_norm_nonfinite") == [(2, 1.0)]
    assert [step for step, _ in history(client, run_id, "logp_gap/t_3")] == [4, 5, 6, 7]
    pictures = [file.path for file in client.list_artifacts(run_id, "images") if file.path.endswith(".png")]
    assert len(pictures) == 2
    assert [file.path for file in client.list_artifacts(run_id, "notes")] == ["notes/config.yaml"]


def test_resume_over_http(services: ServicesHandle) -> None:
    crash_and_resume(services.mlflow_uri, None)


def test_resume_on_sqlite(sqlite_uri: str, tmp_path: Path) -> None:
    crash_and_resume(sqlite_uri, tmp_path)


def test_outage_is_bridged_and_said_twice(services: ServicesHandle, caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker(services.mlflow_uri, "outage")
    run_id = tracker.start("ocr-1", {})
    assert tracker.page is not None
    assert tracker.page.startswith(f"{services.mlflow_uri}/#/experiments/")
    assert tracker.page.endswith(f"/runs/{run_id}/model-metrics?workflowType=machine_learning"), "its charts"
    tracker.log_iteration(0, {"reward": 0.0})
    kill_mlflow(services)
    with caplog.at_level(logging.WARNING):
        blocked_s = 0.0
        for step in range(1, 50):
            before = time.monotonic()
            tracker.log_iteration(step, {"reward": float(step)})
            blocked_s = max(blocked_s, time.monotonic() - before)
        services.wait()  # the supervisor starts it again on the same port
        assert tracker.finish(timeout_s=30) == 0
    assert blocked_s < 0.1
    assert 1.0 < tracker.degraded_seconds < 60.0
    lines = [record.message for record in caplog.records if record.name == "storage.outbox"]
    assert len(lines) == 2
    assert "is unreachable" in lines[0]
    assert "answers again" in lines[1]
    client = MlflowClient(services.mlflow_uri)
    assert history(client, run_id, "reward") == [(step, float(step)) for step in range(50)]
    assert client.get_run(run_id).info.status == "FINISHED"


def kill_mlflow(services: ServicesHandle) -> None:
    """kill -9 MLflow's guard, and wait until its orphans are swept and a new server is on its way."""
    guard, *rest = ServicesDirectory(services.home).read_state().servers["mlflow"].processes
    orphans = [psutil.Process(process.pid) for process in rest]
    assert orphans
    os.kill(guard.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(is_running(process) for process in orphans) or "mlflow" not in services.pending():
        assert time.monotonic() < deadline, "the supervisor neither swept the orphans nor restarted MLflow"
        time.sleep(0.05)


def test_finish_keeps_its_deadline_when_nobody_answers(caplog: pytest.LogCaptureFixture) -> None:
    def unreachable() -> None:
        raise ConnectionError("refused")

    with caplog.at_level(logging.WARNING):
        outbox = Outbox("service", is_refusal=lambda _: False, answers=lambda: False, max_records=10, max_bytes=100)
        for _ in range(12):
            outbox.put("a record", unreachable)
        outbox.put("a big record", unreachable, size_bytes=101)
        start = time.monotonic()
        assert outbox.close(timeout_s=0.3) == 13
        assert time.monotonic() - start < 1.0
    assert outbox.degraded_seconds > 0.2
    assert "10 records were not delivered in 0 s, 3 found the queue full, 0 were refused" in caplog.messages[-1]


def test_a_refused_record_does_not_hold_up_the_next(sqlite_uri: str, tmp_path: Path) -> None:
    tracker = Tracker(sqlite_uri, "refused", artifact_location=str(tmp_path))
    run_id = tracker.start("ocr-1", {})
    tracker.log_artifact(tmp_path / "does-not-exist")
    tracker.log_image("a bad name?", np.zeros((8, 8, 3), np.uint8), step=0)
    tracker.log_iteration(0, {"reward": 1.0})
    assert tracker.finish() == 2
    assert history(MlflowClient(sqlite_uri), run_id, "reward") == [(0, 1.0)]
    with pytest.raises(RuntimeError, match="closed"):
        tracker.log_iteration(1, {"reward": 1.0})


def test_a_record_that_always_fails_is_dropped_while_the_service_answers() -> None:
    def broken() -> None:
        raise RuntimeError("500")

    delivered: list[int] = []
    outbox = Outbox("service", is_refusal=lambda _: False, answers=lambda: True)
    outbox.put("a record", broken)
    outbox.put("a record", lambda: delivered.append(1))
    assert outbox.close(timeout_s=10) == 1
    assert delivered == [1]


def test_a_run_that_is_not_there_cannot_be_resumed(sqlite_uri: str) -> None:
    tracker = Tracker(sqlite_uri, "refused")
    with pytest.raises(RunMissing, match="refused"):
        tracker.resume("0" * 32, {})
    deleted = tracker.start("ocr-1", {})
    tracker.finish()
    MlflowClient(sqlite_uri).delete_run(deleted)
    with pytest.raises(RunMissing, match="deleted"):
        Tracker(sqlite_uri, "refused").resume(deleted, {})


def test_a_run_that_mlflow_has_lost_is_recorded_anew(
    sqlite_uri: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config("tiny-smoke", [f"tracking.uri={sqlite_uri}", "tracking.experiment=anew"])
    past = History([IterationRow(i, i / 100, 0.1, 16, 2.0, {}) for i in range(70)], {0: {0: 0.25}, 70: {0: 0.75}})
    with caplog.at_level(logging.WARNING):
        tracker = open_tracker(config, "ocr-1", "0" * 32, "")
    assert tracker is not None
    (line,) = [record.message for record in caplog.records if record.name == "flows.recording"]
    assert f"does not have the run {'0' * 32}" in line
    Tracking(tracker, RunDirectory(tmp_path), ()).catch_up(past, whole=True)
    assert tracker.finish() == 0
    client = MlflowClient(sqlite_uri)
    assert client.get_run(tracker.run_id).data.params["seed"] == "0"
    assert history(client, tracker.run_id, "reward/mean") == [(row.iteration, row.reward_mean) for row in past.rows]
    assert history(client, tracker.run_id, "eval/reward_mean") == [(0, 0.25), (70, 0.75)]
