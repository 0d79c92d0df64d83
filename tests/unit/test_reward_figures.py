"""Every reward is shown alone and mixed: terminal, MLflow, log, history."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from digenrl.identity import SampleId
from digenrl.rewards.base import Failed, Score, Scored, values_by_reward
from flows.history import History, IterationRow
from flows.logbook import Logbook
from flows.progress import Progress
from flows.tracking import iteration_metrics, row_metrics
from workers.listener import IterationReport

#: Two groups: one scored by both rewards, one by the second alone, where a sample failed.
SCORES: list[Score] = [
    Scored(3.0, {"ocr": 1.0, "style": 2.0}),
    Scored(1.5, {"ocr": 0.5, "style": 1.0}),
    Scored(6.0, {"style": 6.0}),
    Failed("style: HTTP 500"),
]


def report(scores: list[Score]) -> IterationReport:
    named = {SampleId(0, 0, i // 2, i % 2): score for i, score in enumerate(scores)}
    rewards = [score.value for score in scores if isinstance(score, Scored)]
    return IterationReport(0, 1.0, rewards, named, 6, {}, 0, {}, {})


def test_values_are_those_before_weighting_of_the_samples_a_reward_scores() -> None:
    assert values_by_reward(SCORES) == {"ocr": [1.0, 0.5], "style": [2.0, 1.0, 6.0]}


def test_mlflow_gets_the_sum_and_every_reward() -> None:
    metrics = iteration_metrics(report(SCORES))
    assert metrics["reward/mean"] == 3.5 and metrics["reward/ocr/mean"] == 0.75 and metrics["reward/style/mean"] == 3.0
    assert metrics["reward/ocr/std"] == 0.25 and metrics["reward/style/p50"] == 2.0
    assert metrics["samples/failed"] == 1.0


def test_the_history_keeps_the_means_for_a_resumed_run() -> None:
    history = History([IterationRow.of(report(SCORES))])
    (row,) = History.from_state(history.to_state()).rows
    assert row_metrics(row)["reward/style/mean"] == 3.0
    before = {name: value for name, value in history.to_state()["rows"][0].items() if name != "parts"}
    assert IterationRow(**before).parts == {}, "checkpoints from before there was this figure"


def test_the_terminal_shows_rewards_alone_where_there_are_several() -> None:
    for scores, rows in ((SCORES, 2), ([Scored(1.0, {"ocr": 1.0})], 0)):
        console = Console(file=io.StringIO(), width=100, force_terminal=True)
        display = Progress("run", 9, console)
        display.iteration_closed(report(scores))
        plain = Console(file=io.StringIO(), width=100)
        plain.print(display._render())
        text = plain.file.getvalue()  # type: ignore[attr-defined]
        assert sum(f"  {name} " in text for name in ("ocr", "style")) == rows
        assert ("3.000 ± 2.160" in text) == bool(rows)


def test_a_plain_console_and_the_log_name_them_too(caplog: pytest.LogCaptureFixture) -> None:
    console = Console(file=io.StringIO(), width=200)
    Progress("run", 1, console).iteration_closed(report(SCORES))
    assert "(ocr 0.750, style 3.000)" in console.file.getvalue()  # type: ignore[attr-defined]
    with caplog.at_level(logging.INFO):
        Logbook().iteration_closed(report(SCORES))
    assert "reward 3.5000 ± 1.8708 (ocr 0.7500, style 3.0000), 3 of 4 samples scored" in caplog.text
