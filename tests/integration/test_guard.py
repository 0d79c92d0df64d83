"""The guard against a reward that is really gamed: JPEG compressibility alone makes pictures blank.

Runs are told to minimise the size of the pictures' JPEG files; two OCR engines, which nothing is trained on, judge.
High learning rates and small groups let a few iterations do what takes a hundred elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow import MlflowClient
from PIL import Image

from digenrl.config.load import load_config
from digenrl.loop import LoopResult, train
from digenrl.scoring import mean_reward
from flows.services import ServicesHandle, ensure
from program import Home, Program, flow_runs
from storage import checkpoints
from storage.runs import RunDirectory

#: What is gamed, and by what it is judged.
GAMED = (
    'rewards=[{"name": "jpeg_compressibility"}]',
    'guard.gold=["ocr", "ocr_ddddocr"]',
    "algorithm.samples_per_prompt=8",
    "optimizer.warmup_iterations=1",
    "evaluation.prompts=48",
)
FAST = ("iterations=16", "optimizer.learning_rate=3e-3", "evaluation.every=2")
SLOW = ("iterations=12", "optimizer.learning_rate=2e-3", "evaluation.every=4")
NAME = "gamed"


@dataclass(frozen=True)
class Stopped:
    """What `digenrl train` leaves of a run that is stopped."""

    home: Home
    program: Program
    services: ServicesHandle

    @property
    def path(self) -> Path:
        """Its directory."""
        return self.home.path / NAME

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        found: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return found


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    path = tmp_path_factory.mktemp("guard") / "home"
    with Home(path) as home, ensure(owner="pytest", home=path) as services:
        # Checkpoints are those that the guard asks for.
        program = home.run("train", "tiny-ocr", *GAMED, *FAST, "checkpoint.every=0", "--name", NAME, code=3)
        yield Stopped(home, program, services)


def test_compressibility_alone_is_stopped_while_ocr_falls(stopped: Stopped) -> None:
    summary, found = stopped.summary, stopped.summary["guard"]
    assert (summary["status"], found["state"]) == ("guarded", "stop")
    assert found["good_iterations"] < summary["iterations"] < 16
    curve = list(summary["eval_curve"].values())
    assert curve == sorted(curve), "the trained reward rises all the way"
    for values in found["gold"].values():
        assert values[str(summary["iterations"])] < values["0"] - 0.2
    assert "guard.divergence" in found["reason"]


def test_it_ends_with_the_last_good_weights(stopped: Stopped) -> None:
    summary = stopped.summary
    good = summary["guard"]["good_iterations"]
    assert good > 0 and summary["guard"]["states"][str(good)] == "ok"
    (folder,) = (stopped.path / "checkpoints").iterdir()
    info = checkpoints.latest(stopped.path / "checkpoints")
    assert info is not None and (info.iteration, info.folder) == (good, folder.name)
    assert info.url == summary["checkpoint"] and summary["eval_iterations"] == good
    program = stopped.home.run("evaluate", NAME)
    assert f"{summary['eval_after']:.3f}" in program.stdout, "the adapter that is left is that of the checkpoint"


def test_it_says_why_everywhere(stopped: Stopped) -> None:
    reason = stopped.summary["guard"]["reason"]
    assert reason.startswith("the guard stopped the run (guard.divergence): after ")
    assert reason in stopped.program.stdout
    (flow_run,) = flow_runs(stopped.services.prefect_api, NAME)
    state = flow_run["state"]
    assert (state["type"], state["name"], state["message"]) == ("CANCELLED", "Stopped by guard", reason)
    client = MlflowClient(stopped.services.urls["mlflow"])
    run = client.get_run(stopped.summary["mlflow_run_id"])
    assert (run.info.status, run.data.tags["digenrl.guard"]) == ("KILLED", reason)
    logged = {m.step: m.value for m in client.get_metric_history(run.info.run_id, "guard/state")}
    wanted = {"ok": 0.0, "warn": 1.0, "stop": 2.0}
    assert logged == {int(v): wanted[level] for v, level in stopped.summary["guard"]["states"].items()}
    assert {"guard/divergence", "guard/edges_state", "eval/gold_ocr_ddddocr", "train/diversity"} <= set(
        run.data.metrics
    )


def test_a_picture_shows_before_and_after(stopped: Stopped) -> None:
    with Image.open(stopped.path / "pictures" / "guard-stop.png") as picture:
        grey = np.asarray(picture.convert("L"), dtype=float)
    middle = grey.shape[1] // 2
    assert grey[:, :middle].std() > grey[:, middle:].std(), "there is less to see"


def test_it_goes_on_if_it_is_told_to(stopped: Stopped) -> None:
    """From the weights it went back to, and with what the guard had seen until then."""
    directory, before = RunDirectory(stopped.path), stopped.summary["guard"]
    config, good = directory.read_config(), before["good_iterations"]
    guard = config.guard.model_copy(update={"mode": "warn"})
    directory.write_config(config.model_copy(update={"guard": guard, "iterations": good + 2}))
    stopped.home.run("resume", NAME)
    found = stopped.summary["guard"]
    assert (stopped.summary["status"], stopped.summary["iterations"]) == ("completed", good + 2)
    assert set(found["states"]) == {str(v) for v in range(0, good + 3, 2)}
    for name, values in found["gold"].items():
        assert [values[str(v)] for v in range(0, good + 1, 2)] == [
            before["gold"][name][str(v)] for v in range(0, good + 1, 2)
        ]


def rewards(result: LoopResult) -> list[float]:
    return [mean_reward(scores) for _, scores in sorted(result.evaluations.items())]


def gold(result: LoopResult, name: str) -> list[float]:
    return [verdict.gold[name] for _, verdict in sorted(result.verdicts.items())]


def test_with_a_kl_to_the_base_model_it_goes_on_and_still_gains() -> None:
    free = train(load_config("tiny-ocr", [*GAMED, *SLOW, "guard.mode=warn"]))
    kept = train(load_config("tiny-ocr", [*GAMED, *SLOW, "algorithm.kl_beta=2.5"]))
    assert max(kept.evaluations) == 12 and "stop" not in {verdict.level for verdict in kept.verdicts.values()}
    assert rewards(kept)[-1] - rewards(kept)[0] >= 0.2 * (rewards(free)[-1] - rewards(free)[0]) > 0
    for name in ("ocr", "ocr_ddddocr"):
        assert gold(kept, name)[-1] > 0.7 * gold(kept, name)[0], "it can still be read"
        assert gold(free, name)[-1] < 0.7 * gold(free, name)[0], "without, it cannot"


def test_what_learns_to_write_is_not_stopped() -> None:
    """A short piece of the demo; benchmarks/learn.py watches all of it."""
    short = ("iterations=6", "algorithm.samples_per_prompt=8", "optimizer.warmup_iterations=1", "evaluation.every=2")
    result = train(load_config("tiny-ocr", [*short, "evaluation.prompts=48"]))
    assert [verdict.level for verdict in result.verdicts.values()] == ["ok"] * 4
    assert min(gold(result, "ocr_ddddocr")) > 0.7 * gold(result, "ocr_ddddocr")[0]
