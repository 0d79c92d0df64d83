"""Rollout and training must see the same transitions: what a gap between their log-probs may be."""

from __future__ import annotations

from digenrl.config.load import load_config
from digenrl.contributions import UnitMetrics
from digenrl.gates import LogProbGate
from digenrl.identity import MicroBatchId
from digenrl.scheduling.units import TrainUnit

UNIT = TrainUnit(MicroBatchId("train", 3, 1), (2, 3))


def gate(*overrides: str) -> LogProbGate:
    return LogProbGate(load_config("tiny-smoke", overrides))


def judged(gate: LogProbGate, theta: int, gap: float) -> str | None:
    return gate.violation(UNIT, theta, "worker 1", UnitMetrics(pairs=8, logp_gap_max=gap))


def test_the_first_update_shows_what_rounding_is() -> None:
    watch = gate()
    assert judged(watch, 4, 1e-5) is None
    assert judged(watch, 4, 2e-5) is None
    assert judged(watch, 5, 9.9e-5) is None
    sentence = judged(watch, 5, 1.1e-4)
    assert sentence is not None
    assert sentence.startswith("log-probs of train i3 m1 t2,3 on worker 1 differ by up to 0.00011 from those noted at")
    assert "more than 5 times the 2e-05 of the first update" in sentence
    assert "model.dtype=float32, 12 x 24, micro-batches of" in sentence


def test_an_update_that_trains_on_nothing_shows_nothing() -> None:
    watch = gate()
    assert watch.violation(UNIT, 3, "worker 1", UnitMetrics()) is None
    assert judged(watch, 4, 1e-3) is None
    assert judged(watch, 5, 4e-3) is None
    assert judged(watch, 5, 6e-3) is not None


def test_a_millionth_is_rounding_in_any_case() -> None:
    watch = gate()
    assert judged(watch, 4, 0.0) is None
    assert judged(watch, 6, 1e-6) is None
    assert "more than the 1e-06 of rounding" in (judged(watch, 6, 2e-6) or "")


def test_a_limit_that_is_given_counts_from_the_beginning() -> None:
    watch = gate("gates.max_logp_gap=1e-3")
    assert judged(watch, 4, 9e-4) is None
    assert "more than gates.max_logp_gap=0.001" in (judged(watch, 4, 2e-3) or "")
    assert judged(watch, 9, 9e-4) is None


def test_rounding_of_the_size_of_the_clip_range_is_mentioned_once() -> None:
    watch = gate("algorithm.clip_range=1e-4")
    judged(watch, 4, 4e-5)
    assert watch.caution() is None
    judged(watch, 4, 6e-5)
    assert "more than half of algorithm.clip_range=0.0001" in (watch.caution() or "")
    assert watch.caution() is None
