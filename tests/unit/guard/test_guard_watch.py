"""From findings to states: patience, hysteresis, the last good evaluation, and that a guard can be restored."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from sightings import BASE, config, run, sighting

from digenrl.guard.evidence import IterationFacts, Sighting
from digenrl.guard.inspection import Inspection
from digenrl.guard.watch import Guard
from digenrl.identity import EVAL_ITERATION, SampleId
from digenrl.rewards.base import Failed, Scored


def dark(*shares: float) -> list[Sighting]:
    """An evaluation every 4 iterations; the first is of the base model."""
    return [sighting(4 * i, pictures=replace(BASE, dark=share)) for i, share in enumerate(shares)]


def levels(guard: Guard) -> list[str]:
    return [verdict.level for verdict in guard.verdicts.values()]


def test_one_bad_evaluation_stops_no_run() -> None:
    guard = Guard(config())
    run(guard, *dark(0.1, 0.9, 0.1, 0.9, 0.1, 0.9, 0.9))
    assert levels(guard) == ["ok", "warn", "ok", "warn", "ok", "warn", "stop"]
    assert guard.verdicts[24].good == 16


@pytest.mark.parametrize(("patience", "stopped_at"), [(1, 4), (3, 12)])
def test_patience(patience: int, stopped_at: int) -> None:
    guard = Guard(config(f"guard.patience={patience}"))
    verdicts = run(guard, *dark(0.1, 0.9, 0.9, 0.9))
    assert next(v.version for v in verdicts if v.stops) == stopped_at


def test_a_warning_ends_well_below_its_limit() -> None:
    """The limit is a change of 0.25, the release 0.8 of it."""
    guard = Guard(config())
    run(guard, *dark(0.1, 0.34, 0.36, 0.34, 0.31, 0.29, 0.34))
    assert levels(guard) == ["ok", "ok", "warn", "warn", "warn", "ok", "ok"]


def test_the_run_goes_back_to_where_the_check_that_stops_it_was_ok() -> None:
    """Another check that only warns, and has for long, does not take the weights back to the start."""
    guard = Guard(config())
    garish = [sighting(v, pictures=replace(BASE, saturation=0.5)) for v in (4, 8, 12)]
    both = [sighting(v, pictures=replace(BASE, saturation=0.5, dark=0.9)) for v in (16, 20)]
    verdicts = run(guard, sighting(0), *garish, *both)
    assert [v.level for v in verdicts] == ["ok", "warn", "warn", "warn", "warn", "stop"]
    assert verdicts[-1].good == 12 and guard.needed == {0, 12, 20}


def test_the_base_model_may_be_the_last_good_one() -> None:
    verdicts = run(Guard(config()), *dark(0.1, 0.9, 0.9))
    assert verdicts[-1].good == 0 and (verdicts[-1].reason or "").endswith(
        "the base model, as no later evaluation was good"
    )


def test_mode_warn_never_stops() -> None:
    guard = Guard(config("guard.mode=warn"))
    verdicts = run(guard, *dark(0.1, 0.9, 0.9, 0.9, 0.9))
    assert levels(guard) == ["ok", *["warn"] * 4] and not guard.may_stop and not guard.needed
    assert verdicts[-1].metrics()["guard/dark_state"] == 1


def test_metrics_say_state_and_value() -> None:
    verdict = run(Guard(config()), *dark(0.1, 0.9, 0.9))[-1]
    metrics = verdict.metrics()
    assert (metrics["guard/state"], metrics["guard/dark_state"], metrics["guard/edges_state"]) == (2, 2, 0)
    assert metrics["guard/dark"] == pytest.approx(0.8) and metrics["eval/gold_judge"] == verdict.gold["judge"]


def test_a_restored_guard_goes_on_as_if_nothing_had_happened() -> None:
    seen = dark(0.1, 0.1, 0.9, 0.9)
    whole, first, second = (Guard(config()) for _ in range(3))
    run(whole, *seen)
    run(first, *seen[:3])
    state = json.loads(json.dumps(first.until(8), allow_nan=False))
    second.restore(state)
    assert second.verdicts == first.verdicts
    run(second, seen[2])  # a resumed run evaluates again what it was resumed from
    assert second.verdicts == first.verdicts
    run(second, seen[3])
    assert second.verdicts == whole.verdicts and levels(second)[-1] == "stop"
    assert len(second.until(4)["evaluations"]) == 2 and len(second.until(4)["iterations"]) == 4


def test_facts_of_an_iteration() -> None:
    rewards = {0: (0.5, 0.5, 0.5), 1: (0.1, 0.9, None), 2: (0.3, None, None), 3: (0.2, 0.2 + 1e-9, 0.2)}
    scores = {
        SampleId(0, 7, group, i): Failed("no") if value is None else Scored(value)
        for group, found in rewards.items()
        for i, value in enumerate(found)
    }
    facts = IterationFacts.of(7, scores, {"approx_kl": 1e-6, "grad_norm": 0.1, "loss": 3.0}, tolerance=1e-8)
    assert facts.failed == pytest.approx(3 / 12) and facts.zero_variance == pytest.approx(2 / 3)
    assert (facts.kl, facts.grad_norm, facts.logp_gap, facts.diversity) == (1e-6, 0.1, None, None)
    broken = IterationFacts.of(7, {}, {"grad_norm": float("inf"), "approx_kl": float("nan")}, tolerance=0.0)
    assert broken == IterationFacts(7), "a checkpoint could not hold it"


def test_a_sighting_keeps_what_was_inspected() -> None:
    scores = {SampleId(0, EVAL_ITERATION, i, 0): Scored(0.1 * i) for i in range(4)}
    scores[SampleId(0, EVAL_ITERATION, 1, 0)] = Failed("no")
    inspection = Inspection({0: BASE, 1: BASE, 2: BASE}, {"judge": {0: Scored(1.0), 1: Failed("no"), 2: Scored(0.5)}})
    found = Sighting.of(3, scores, inspection)
    assert found.reward == {0: 0.0, 2: 0.2} and found.gold == {"judge": {0: 1.0, 2: 0.5}} and len(found.pictures) == 3
    assert Sighting.from_state(json.loads(json.dumps(found.to_state()))) == found
