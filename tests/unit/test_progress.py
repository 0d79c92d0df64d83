"""The live display: what a resumed run shows, what is predicted, and that it fits a narrow terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from digenrl.identity import EVAL_ITERATION, MicroBatchId, SampleId
from digenrl.rewards.base import Scored
from digenrl.scheduling.messages import Run
from digenrl.scheduling.units import RolloutUnit
from flows.history import History, IterationRow
from flows.progress import Progress
from workers.listener import Dispatched, Evaluation, IterationReport


def progress(width: int = 120) -> Progress:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, soft_wrap=True)
    return Progress("tiny-ocr-1", 60, console)


def report(iteration: int, seconds: float) -> IterationReport:
    busy = {"worker 0": 0.49, "worker 1": 0.5}
    scores = {SampleId(0, iteration, 0, i): Scored(reward) for i, reward in enumerate((0.7, 0.8))}
    return IterationReport(iteration, seconds, [0.7, 0.8], scores, 6, {}, 0, {}, busy)


def evaluation(version: int, reward: float) -> Evaluation:
    return Evaluation(version, {SampleId(0, EVAL_ITERATION, 0, 0): Scored(reward)}, {})


def shown(display: Progress) -> list[str]:
    """The lines of the live display, without colours."""
    console = Console(file=io.StringIO(), width=display._console.width)
    console.print(display._render())
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def dispatched(worker: str, role: str) -> Dispatched:
    outcome: Any = None  # nobody waits for it here
    return Dispatched(Run(RolloutUnit(MicroBatchId("train", 0, 0), 0, 1), "w", 0, 0), worker, role, outcome)


def test_a_resumed_run_goes_on_where_it_ended() -> None:
    history = History([IterationRow(i, 0.6, 0.1, 2, 1.0, {}) for i in range(20)], {0: {0: 0.588}, 20: {0: 0.74}})
    display = progress()
    display.resumed(history)
    assert "20/60" in shown(display)[0]
    display.evaluated(evaluation(20, 0.74))
    display.iteration_closed(report(20, 1.0))
    head, *rows = shown(display)
    assert "21/60" in head
    assert any("0.740" in row and "after 20 iterations (start 0.588)" in row for row in rows)


def test_the_first_iteration_does_not_count_in_the_prediction() -> None:
    display = progress()
    display.iteration_closed(report(0, 100.0))
    assert "ETA about 1:38:20" in shown(display)[0], "there is nothing better yet"
    display.iteration_closed(report(1, 1.0))
    assert "ETA about 0:58" in shown(display)[0]
    for iteration in range(2, 6):
        display.iteration_closed(report(iteration, 1.0))
    assert "ETA 0:54" in shown(display)[0]


def test_workers_are_shown_with_what_they_did() -> None:
    display = progress()
    for worker, role in (
        ("worker 0", "rollout"),
        ("worker 0", "evaluate"),
        ("worker 1", "train"),
        ("worker 1", "rollout"),
    ):
        display.dispatched(dispatched(worker, role))
    display.iteration_closed(report(0, 1.0))
    *_, first, second = shown(display)
    assert first.startswith("worker 0 rollout ") and " 49% busy" in first
    assert second.startswith("worker 1 rollout + train ") and " 50% busy" in second


@pytest.mark.parametrize("width", [40, 70, 80, 200])
def test_a_value_stays_on_its_line(width: int) -> None:
    display = progress(width)
    for worker in ("worker 0", "worker 1"):
        for role in ("rollout", "train"):
            display.dispatched(dispatched(worker, role))
    display.evaluated(evaluation(0, 0.588))
    display.iteration_closed(report(0, 60.0))
    lines = shown(display)
    assert len(lines) == 6, "head, reward, held-out, samples/s and two workers"
    assert "1/60" in lines[0] and "ETA about 59:00" in lines[0]
    assert "0.750 ± 0.050" in lines[1]
    assert "100% busy" not in lines[4] and "49% busy" in lines[4]
    assert ("tiny-ocr-1" in lines[0]) == (width >= 80)
