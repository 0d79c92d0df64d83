"""Rollout and training must see the same transitions: what a gap between their log-probs may be."""

from __future__ import annotations

from digenrl.config.load import load_config
from digenrl.contributions import UnitMetrics
from digenrl.gates import LogProbGate, ReferenceGate
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


def probed(gate: LogProbGate, theta: int, gap: float, floor: float) -> str | None:
    metrics = UnitMetrics(pairs=8, logp_gap_max=gap, logp_floor_max=floor, probed=1)
    return gate.violation(UNIT, theta, "worker 1", metrics)


def test_the_first_update_is_judged_by_what_batching_does() -> None:
    watch = gate()
    assert probed(watch, 0, 4e-4, 1e-4) is None
    assert judged(watch, 0, 4.9e-4) is None
    assert "more than 5 times the 0.0001 of batching" in (judged(watch, 0, 6e-4) or "")
    assert probed(watch, 0, 9e-4, 2e-4) is None, "each trainer looks for itself"
    fresh = gate()
    assert "more than the 1e-06 of rounding" in (probed(fresh, 0, 2e-6, 0.0) or "")
    assert probed(gate(), 0, 1e-6, 0.0) is None
    assert probed(gate("gates.max_logp_gap=1e-3"), 0, 9e-4, 0.0) is None


def test_before_anything_is_trained_the_policy_is_its_reference() -> None:
    watch = ReferenceGate(load_config("tiny-smoke", ["algorithm.kl_beta=0.1"]))
    assert watch.violation(UNIT, 0, "worker 1", UnitMetrics(pairs=8)) is None
    assert watch.violation(UNIT, 1, "worker 1", UnitMetrics(pairs=8, kl=1.0)) is None
    sentence = watch.violation(UNIT, 0, "worker 1", UnitMetrics(pairs=8, kl=8e-10))
    assert sentence is not None
    assert sentence.startswith("the KL to the base model is 1e-10 in train i3 m1 t2,3 on worker 1, before anything")


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
