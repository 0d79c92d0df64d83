"""Samples without a reward are drawn again: on_failed=redraw."""

from __future__ import annotations

from dataclasses import replace

import pytest
from schedules import centred, commands, joins, shape, simulate

from digenrl.identity import MicroBatchId, SampleId
from digenrl.rewards.base import Failed, Score, Scored
from digenrl.scheduling import Colocated, Digenrl, Disaggregated, Layout, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.simulate import Behaviour, Result
from digenrl.scheduling.units import RolloutUnit, ScoreUnit

ONE = shape(iterations=1)
UNLUCKY = SampleId(0, 0, 0, 3)


def run(layout: Layout, draws: int, *, redraws: int) -> Result:
    """One sample fails at its first `draws` draws."""

    def score(sample: SampleId) -> Score:
        if replace(sample, draw=0) == UNLUCKY and sample.draw < draws:
            return Failed("no face")
        return Scored(float(sample.generation + sample.group))

    scheduler = Scheduler(ONE, layout, centred, redraws=redraws)
    result = simulate(scheduler, joins(2), Behaviour(score=score), redraws=redraws)
    assert result.finished, result.failure or result.waiting_for
    return result


def rolled(result: Result) -> list[MicroBatchId]:
    return [c.unit.micro_batch for c in commands(result, m.Run) if isinstance(c.unit, RolloutUnit)]


@pytest.mark.parametrize("layout", [Disaggregated(1), Digenrl(1), Colocated()], ids=["fixed", "digenrl", "colocated"])
def test_a_failed_sample_is_drawn_again_with_its_micro_batch(layout: Layout) -> None:
    result = run(layout, 1, redraws=2)
    again = MicroBatchId("train", 0, 1, draws=(0, 1))
    assert sorted(rolled(result)) == sorted([*ONE.micro_batches(0), again])
    assert ONE.samples(again) == (SampleId(0, 0, 0, 2), UNLUCKY.redrawn())
    (closed,) = commands(result, m.CloseIteration)
    assert isinstance(closed, m.CloseIteration) and not closed.excluded
    trained = {sample for pairs in result.updates[1].values() for sample, _ in pairs}
    assert UNLUCKY.redrawn() in trained and UNLUCKY not in trained


def test_what_fails_every_time_is_left_out() -> None:
    result = run(Disaggregated(1), 9, redraws=2)
    assert [m.draws for m in rolled(result) if m.index == 1] == [(), (0, 1), (0, 2)]
    (closed,) = commands(result, m.CloseIteration)
    assert isinstance(closed, m.CloseIteration)
    last = replace(UNLUCKY, draw=2)
    assert closed.excluded == {(last, step): "no face" for step in ONE.trained_steps(0)}


def test_nothing_is_drawn_again_unless_asked_for() -> None:
    result = run(Disaggregated(1), 1, redraws=0)
    assert rolled(result) == ONE.micro_batches(0)


def test_only_the_last_draws_count_as_failed() -> None:
    scheduler = Scheduler(ONE, Disaggregated(1), centred, redraws=1, max_failed_share=0.0)
    unlucky = Behaviour(score=lambda s: Failed("no face") if s.draw == 0 else Scored(float(s.generation)))
    assert simulate(scheduler, joins(2), unlucky, redraws=1).finished


def test_the_old_trajectory_is_dropped_wherever_it_is() -> None:
    result = run(Disaggregated(1), 1, redraws=1)
    dropped = {c.ref.micro_batch for c in commands(result, m.Drop) if isinstance(c.ref, m.TrajectoryRef)}
    scored = [c.unit.micro_batch for c in commands(result, m.Run) if isinstance(c.unit, ScoreUnit)]
    assert MicroBatchId("train", 0, 1) in dropped and len(scored) == len(ONE.micro_batches(0)) + 1


def test_a_micro_batch_that_is_drawn_again_is_another_one() -> None:
    first = MicroBatchId("train", 3, 5)
    again = first.redrawn([True, False]).redrawn([True, True])
    assert again.draws == (2, 1) and again.draw == 2 and again.label == "i3 m5 draw 2"
    assert first.draw == 0 and first.label == "i3 m5"
