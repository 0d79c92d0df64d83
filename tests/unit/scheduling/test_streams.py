"""Streaming advantage: what runs early, what the workers are told of closed groups, and what becomes of the samples."""

from __future__ import annotations

import pytest
from schedules import ALL, COSTS, centred, commands, joins, shape, simulate

from digenrl.algorithms.advantages import GroupStatistics
from digenrl.identity import MicroBatchId, SampleId
from digenrl.rewards.base import Failed, Score, Scored
from digenrl.scheduling import Disaggregated, RunShape, Scheduler, Verdict
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.simulate import Behaviour, Costs, Result
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit

#: One group of 8 in micro-batches of 1: its trainer could wait for a long time.
LONG = shape(iterations=1, groups=1, group_size=8, micro_batch=1)

#: Training keeps up with the rollout, so units seldom wait until their group is complete.
FAST_TRAINING = Costs(lambda unit, kind: 0.1 if isinstance(unit, TrainUnit) else COSTS.unit_s(unit, kind))


def uneven(unit: Unit, kind: str) -> float:
    """Fast training, and the first micro-batch of every group takes very long."""
    slow = isinstance(unit, RolloutUnit) and unit.micro_batch.index % 4 == 0
    return 20.0 if slow else FAST_TRAINING.unit_s(unit, kind)


def go(
    run_shape: RunShape,
    *,
    workers: int = 2,
    trainers: int = 1,
    incidents: tuple[tuple[float, m.Event], ...] = (),
    behaviour: Behaviour | None = None,
    streaming: bool = True,
    max_open_groups: int = 8,
    costs: Costs = FAST_TRAINING,
    scheduler_costs: CostModel | None = None,
    **options: object,
) -> Result:
    """A simulated run to its end."""
    scheduler = Scheduler(
        run_shape,
        Disaggregated(trainers),
        centred,
        streaming=streaming,
        max_open_groups=max_open_groups,
        costs=scheduler_costs,
        **options,  # type: ignore[arg-type]
    )
    result = simulate(scheduler, [*joins(workers), *incidents], behaviour, costs)
    assert result.finished, result.failure or result.waiting_for
    return result


def trained(result: Result, iteration: int = 0) -> list[tuple[float, m.Run]]:
    """Train units of an iteration as they were dispatched, with their times."""
    found = [(t, c) for t, c in result.commands if isinstance(c, m.Run) and isinstance(c.unit, TrainUnit)]
    return [(t, c) for t, c in found if c.unit.micro_batch.iteration == iteration]


def updates(result: Result) -> list[m.Run]:
    """Optimiser steps."""
    return [c for c in commands(result, m.Run) if isinstance(c.unit, UpdateUnit)]


def all_scored(result: Result, group: int, run_shape: RunShape) -> float:
    """When the last score of a group of iteration 0 came."""
    return max(
        t
        for t, e in result.events
        if isinstance(e, m.UnitFinished)
        and isinstance(e.unit, ScoreUnit)
        and run_shape.group_of(e.unit.micro_batch) == group
    )


def test_sample_is_trained_as_soon_as_it_is_scored() -> None:
    result, waiting = go(LONG, costs=COSTS), go(LONG, streaming=False, costs=COSTS)
    scored = {
        e.unit.micro_batch: t
        for t, e in result.events
        if isinstance(e, m.UnitFinished) and isinstance(e.unit, ScoreUnit)
    }
    first = trained(result)[0]
    assert first[0] == scored[MicroBatchId("train", 0, 0)]
    assert first[1].rewards and not first[1].advantages
    assert trained(waiting)[0][0] == all_scored(waiting, 0, LONG)
    assert result.makespan_s < 0.8 * waiting.makespan_s


def test_what_is_dispatched_after_the_group_is_complete_is_trained_the_ordinary_way() -> None:
    result = go(LONG, costs=COSTS)
    complete = all_scored(result, 0, LONG)
    for t, c in trained(result):
        assert (t < complete) == bool(c.rewards)
        assert bool(c.rewards) != bool(c.advantages)
    assert {bool(c.rewards) for _, c in trained(result)} == {True, False}


def test_step_is_told_the_statistics_of_its_groups() -> None:
    (update,) = updates(go(LONG))
    assert update.closings == {0: GroupStatistics(3.5, 1.0)}
    assert not updates(go(LONG, streaming=False))[0].closings


def test_only_ratio_one_is_streamed() -> None:
    """The second update and stale groups wait for their group; the first has a baseline from the iteration before."""
    run_shape = shape(iterations=3, groups=4, group_size=8, micro_batch=1, updates=2, stale_groups=1)
    result = go(run_shape, workers=4)
    for iteration in range(3):
        streamed = [c for _, c in trained(result, iteration) if c.rewards]
        groups = {run_shape.group_of(c.unit.micro_batch) for c in streamed}
        assert groups == ({0, 1} if iteration == 0 else {1})
        assert all(c.theta == c.old_theta == 2 * iteration for c in streamed)
        assert {c.baseline for c in streamed} == {3.5 if iteration else 0.0}
    assert [set(c.closings) for c in updates(result)] == [{0, 1}, set(), {1}, set(), {1}, set()]


def test_sample_without_reward_is_not_in_the_unit() -> None:
    def score(sample: SampleId) -> Score:
        return Failed("no reward") if sample.generation in (0, 2, 3) else Scored(float(sample.generation))

    run_shape = shape(iterations=1, groups=1, group_size=8, micro_batch=2)
    result = go(run_shape, behaviour=Behaviour(score=score))
    first = trained(result)[0][1]
    assert {s.generation: r for s, r in first.rewards.items()} == {1: 1.0}
    assert MicroBatchId("train", 0, 1) not in {c.unit.micro_batch for _, c in trained(result)}
    (closed,) = commands(result, m.CloseIteration)
    assert closed.trained == 5 * 3 and set(closed.excluded.values()) == {"no reward"}


def test_group_of_zero_variance_is_excluded_after_all() -> None:
    """Group 0 has been trained in part when it turns out that all its rewards are equal."""
    run_shape = shape(iterations=1, groups=2, group_size=4, micro_batch=1)
    rewards = Behaviour(score=lambda sample: Scored(float(sample.group * sample.generation)))
    result = go(run_shape, behaviour=rewards)
    assert [c for _, c in trained(result) if c.rewards and run_shape.group_of(c.unit.micro_batch) == 0]
    (closed,) = commands(result, m.CloseIteration)
    assert closed.trained == 4 * 3
    assert {sample.group for sample, _ in closed.excluded} == {0}
    assert set(closed.excluded.values()) == {"zero variance"}
    assert updates(result)[0].closings == {0: None, 1: GroupStatistics(1.5, 1.0)}


def test_step_without_anything_left_is_no_bad_update() -> None:
    equal = Behaviour(score=lambda sample: Scored(1.0), skips=lambda theta: True)
    result = go(LONG, behaviour=equal, max_bad_updates=0)
    (closed,) = commands(result, m.CloseIteration)
    assert (closed.trained, closed.skipped_updates) == (0, 0)
    assert any(c.rewards for _, c in trained(result))


def test_trainer_holds_sums_of_so_many_groups_only() -> None:
    """One sample of each group comes late, so that many groups are open together."""
    run_shape = shape(iterations=1, groups=6, group_size=4, micro_batch=1)

    def most(limit: int) -> int:
        result = go(run_shape, workers=6, max_open_groups=limit, costs=Costs(uneven))
        open_groups: set[int] = set()
        peak = 0
        for _, c in trained(result):
            open_groups -= c.closings.keys()
            if c.rewards:
                open_groups.add(run_shape.group_of(c.unit.micro_batch))
            peak = max(peak, len(open_groups))
        return peak

    assert most(8) > 2
    assert most(2) == 2
    assert most(1) == 1


def test_closed_group_is_told_with_the_next_unit_so_that_its_sums_are_freed() -> None:
    run_shape = shape(iterations=1, groups=4, group_size=4, micro_batch=1)
    result = go(run_shape, workers=4, max_open_groups=1)
    told = [set(c.closings) for _, c in trained(result) if c.closings]
    assert told and all(len(groups) == 1 for groups in told)
    streamed = {run_shape.group_of(c.unit.micro_batch) for _, c in trained(result) if c.rewards}
    assert len(streamed) > 1


def test_lost_contributions_of_a_streamed_group_are_done_again_the_ordinary_way() -> None:
    run_shape = shape(iterations=1, groups=2, group_size=4, micro_batch=1)
    calm = go(run_shape, workers=4, trainers=2)
    late = max(t for t, _ in trained(calm)) + 0.1
    other = next(c.worker for _, c in trained(calm) if c.worker != commands(calm, m.Commit)[0].lead)
    result = go(run_shape, workers=4, trainers=2, incidents=((late, m.WorkerLost(other)),))
    again = [c for t, c in trained(result) if t >= late]
    assert again and all(c.advantages for c in again)


def test_nobody_is_asked_again_for_a_lost_contribution_without_variance() -> None:
    run_shape = shape(iterations=1, groups=2, group_size=4, micro_batch=1)
    behaviour = Behaviour(score=lambda sample: Scored(float(sample.group * sample.generation)))
    calm = go(run_shape, workers=4, trainers=2, behaviour=behaviour)
    late = max(t for t, _ in trained(calm)) + 0.1
    for lost in ("w0", "w1"):
        result = go(run_shape, workers=4, trainers=2, behaviour=behaviour, incidents=((late, m.WorkerLost(lost)),))
        groups = {run_shape.group_of(c.unit.micro_batch) for t, c in trained(result) if t >= late}
        assert groups <= {1}


def test_scope_other_than_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="std_scope='update' cannot be combined with streaming; use 'group'"):
        Scheduler(LONG, Disaggregated(1), centred, streaming=True, std_scope="update")


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (lambda groups: Verdict(dict.fromkeys(groups[0], 1.0)), "needs the statistics of group 0"),
        (
            lambda groups: Verdict({}, dict.fromkeys(groups[0], "odd"), [GroupStatistics(0, 1)]),
            "group 0 has statistics, so no sample of i0 m0 may be excluded",
        ),
    ],
)
def test_advantage_function_that_does_not_allow_streaming_is_refused(verdict: object, sentence: str) -> None:
    scheduler = Scheduler(LONG, Disaggregated(1), verdict, streaming=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        simulate(scheduler, joins(2), costs=COSTS)


def test_one_worker_alone_streams_between_its_rollouts() -> None:
    scheduler = Scheduler(LONG, Disaggregated(1), centred, streaming=True)
    assert simulate(scheduler, [(0.0, m.WorkerJoined("w0", "cpu", ALL))]).finished


def test_what_a_streamed_unit_takes_longer_is_not_learned_as_the_time_of_ordinary_ones() -> None:
    profile = {"cpu": {"rollout_step_s": 1.0, "train_s": {2: 0.1}, "score_s": 1.0, "update_s": 0.5}}
    known = CostModel.from_profile(LONG, profile)
    costs = CostModel.from_profile(LONG, profile)
    result = go(LONG, costs=Costs(known.seconds, streamed=known.streamed), scheduler_costs=costs)
    assert [run.rewards for _, run in trained(result) if run.rewards], "some are streamed"
    assert costs.of_kind("cpu").train_s[2] == pytest.approx(0.1)
