"""Losses, failures and departures: each at the moment where it hurts, which a run without it tells beforehand."""

from __future__ import annotations

from collections import Counter

import pytest
from schedules import ALL, centred, commands, joins, shape, simulate

from digenrl.identity import MicroBatchId
from digenrl.scheduling import Colocated, Disaggregated, Layout, RunShape, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.simulate import Behaviour, Result
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, UpdateUnit

SHORT = 0.05


def go(
    run_shape: RunShape,
    layout: Layout,
    workers: int,
    *incidents: tuple[float, m.Event],
    behaviour: Behaviour | None = None,
    **options: object,
) -> Result:
    """Simulate a run."""
    scheduler = Scheduler(run_shape, layout, centred, **options)  # type: ignore[arg-type]
    return simulate(scheduler, [*joins(workers), *incidents], behaviour)


def when(result: Result, kind: type, count: int = 0) -> float:
    """Time of the count-th command of a kind, or of the Run of a unit of that kind."""
    times = [
        t for t, c in result.commands if isinstance(c, kind) or (isinstance(c, m.Run) and isinstance(c.unit, kind))
    ]
    return times[count]


def finished(result: Result, kind: type) -> Counter[object]:
    """How often each unit of a kind ended."""
    return Counter(e.unit for _, e in result.events if isinstance(e, m.UnitFinished) and isinstance(e.unit, kind))


def test_lost_trajectory_is_generated_again_but_not_scored_again():
    """With 3 workers w0 trains; w1 dies right after its first micro-batch was scored elsewhere."""
    calm = go(shape(iterations=1), Colocated(), 2)
    scored = next(t for t, e in calm.events if isinstance(e, m.UnitFinished) and isinstance(e.unit, ScoreUnit))
    result = go(shape(iterations=1), Colocated(), 2, (scored + SHORT, m.WorkerLost("w1")))
    assert result.finished
    assert set(finished(result, ScoreUnit).values()) == {1}
    assert max(finished(result, RolloutUnit).values()) == 2


def test_trajectory_in_progress_restarts_from_its_first_step():
    run_shape = shape(iterations=1, detailed=lambda k: True)
    result = go(run_shape, Disaggregated(1), 3, (4.0, m.WorkerLost("w1")))
    assert result.finished
    again = [c for t, c in result.commands if isinstance(c, m.Run) and c.unit == RolloutUnit(_mb(0), 0, 1)]
    assert [r.worker for r in again] == ["w1", "w2"]


def test_contributions_of_a_lost_trainer_are_computed_again_and_no_others():
    calm = go(shape(iterations=1, groups=4), Disaggregated(2), 4)
    ended = [
        (t, e)
        for t, e in calm.events
        if isinstance(e, m.UnitFinished) and isinstance(e.unit, TrainUnit) and e.worker == "w1"
    ]
    loss = ended[1][0] + SHORT
    result = go(shape(iterations=1, groups=4), Disaggregated(2), 4, (loss, m.WorkerLost("w1")))
    assert result.finished
    twice = {unit for unit, times in finished(result, TrainUnit).items() if times == 2}
    assert twice == {e.unit for t, e in ended if t < loss}


def test_promoted_trainer_replaces_the_only_one():
    result = go(shape(iterations=1), Disaggregated(1), 3, (5.0, m.WorkerLost("w0")))
    assert result.finished
    promoted = {c.worker for c in commands(result, m.Install) if c.with_optimizer} - {"w0"}
    assert len(promoted) == 1
    assert {
        c.worker for t, c in result.commands if t > 5 and isinstance(c, m.Run) and isinstance(c.unit, TrainUnit)
    } == (promoted)


@pytest.mark.parametrize("moment", [m.Reduce, UpdateUnit, m.Commit])
def test_lead_lost_before_its_step_is_committed(moment: type):
    calm = go(shape(iterations=1), Colocated(), 3)
    lead = commands(calm, m.Commit)[0].lead
    result = go(shape(iterations=1), Colocated(), 3, (when(calm, moment) + SHORT, m.WorkerLost(lead)))
    assert result.finished
    heir = commands(result, m.Commit)[-1].lead
    assert heir != lead
    assert m.Install(0, heir, None, True) in commands(result, m.Install)
    assert [c.theta for c in commands(result, m.Publish)] == [1]


def test_standby_takes_over_without_the_driver():
    run_shape = shape(iterations=1, updates=2)
    calm = go(run_shape, Colocated(), 3)
    first, second = commands(calm, m.Commit)
    assert first.standby is not None
    assert second.standby is None
    result = go(run_shape, Colocated(), 3, (when(calm, m.Commit) + 0.1 + SHORT, m.WorkerLost(first.lead)))
    assert result.finished
    assert commands(result, m.Commit)[-1].lead == first.standby
    assert sum(isinstance(e, m.Committed) for _, e in result.events) == 2


def test_standby_lost_while_it_is_copied_to():
    run_shape = shape(iterations=1, updates=2)
    calm = go(run_shape, Colocated(), 3)
    first = commands(calm, m.Commit)[0]
    result = go(run_shape, Colocated(), 3, (when(calm, m.Commit) + SHORT, m.WorkerLost(first.standby)))
    assert result.finished
    assert commands(result, m.Commit)[1].theta == first.theta
    assert commands(result, m.Commit)[1].standby not in (first.standby, first.lead)


def test_lead_and_standby_lost_together_take_the_run_back_to_what_the_driver_has():
    run_shape = shape(iterations=1, updates=2)
    calm = go(run_shape, Colocated(), 4)
    first = commands(calm, m.Commit)[0]
    after = when(calm, m.Commit) + 0.1 + SHORT
    result = go(run_shape, Colocated(), 4, (after, m.WorkerLost(first.lead)), (after, m.WorkerLost(first.standby)))
    assert result.finished
    assert [c.theta for c in commands(result, m.Commit)] == [1, 1, 2]
    assert m.Drop(m.AdapterRef(1), "w2") in commands(result, m.Drop)


def test_accumulator_merged_before_its_source_died_counts_once():
    """The loss is known before the answer of the merge. Had it been given up, it would be in the update twice."""
    scheduler = Scheduler(shape(iterations=1), Colocated(), centred)
    calm = go(shape(iterations=1), Colocated(), 3)
    reduce = commands(calm, m.Reduce)[0]
    source = reduce.sources[0]
    told: list[m.Command] = []
    for t, event in calm.events:
        if t == when(calm, m.Reduce) + 0.1 and isinstance(event, m.Transferred):
            told += scheduler.handle(m.WorkerLost(source), t)
        told += scheduler.handle(event, t)
        if any(isinstance(c, m.Run) and isinstance(c.unit, UpdateUnit) for c in told):
            break
    assert sum(isinstance(c, m.Run) and isinstance(c.unit, UpdateUnit) for c in told) == 1
    trained = [c.unit for c in told if isinstance(c, m.Run) and isinstance(c.unit, TrainUnit)]
    assert len(trained) == len(set(trained))


def test_failed_unit_is_tried_elsewhere():
    failing = Behaviour(fails=lambda unit, worker, n: "out of memory" if worker == "w1" else None)
    result = go(shape(iterations=1), Disaggregated(1), 3, behaviour=failing, max_attempts=100)
    assert result.finished
    assert {e.worker for _, e in result.events if isinstance(e, m.UnitFinished)} == {"w0", "w2"}


def test_unit_that_always_fails_ends_the_run_and_is_named():
    failing = Behaviour(fails=lambda unit, worker, n: "cuda error" if isinstance(unit, TrainUnit) else None)
    result = go(shape(), Disaggregated(1), 3, behaviour=failing)
    assert result.failure == "train i0 m0 t0,1 failed 3 times, the last time on w0: cuda error"


def test_failed_step_of_a_trajectory_withdraws_the_next_one():
    failing = Behaviour(fails=lambda unit, worker, n: "flaky" if unit == RolloutUnit(_mb(0), 1, 2) and n == 0 else None)
    result = go(shape(iterations=1, detailed=lambda k: True), Disaggregated(1), 2, behaviour=failing)
    assert result.finished
    assert m.Cancel(RolloutUnit(_mb(0), 2, 3), "w1") in commands(result, m.Cancel)
    assert m.Drop(m.TrajectoryRef(_mb(0)), "w1") in commands(result, m.Drop)


def test_unit_that_kills_its_workers_does_not_kill_them_all():
    scheduler = Scheduler(shape(), Colocated(), centred, max_losses=3)
    told: list[m.Command] = []
    for i in range(5):
        told += scheduler.handle(m.WorkerJoined(f"w{i}", "cpu", ALL), float(i))
        told += scheduler.handle(m.VersionInstalled(f"w{i}", 0), float(i))
        told += scheduler.handle(m.WorkerLost(f"w{i}"), float(i))
    (failure,) = [c for c in told if isinstance(c, m.FailRun)]
    assert failure.reason == ("rollout i0 m0 t0-2 was running on 3 workers when they were lost, the last of them w2")


def test_copy_that_fails_rests_until_the_next_tick_and_ends_the_run_only_after_a_while():
    def transfers(command: m.Command, attempt: int) -> str | None:
        return "connection refused" if isinstance(command, m.Transfer) and attempt < 4 else None

    result = go(shape(iterations=1), Disaggregated(1), 2, behaviour=Behaviour(move_fails=transfers))
    assert result.finished
    sent = [t for t, c in result.commands if isinstance(c, m.Transfer) and c.ref == m.TrajectoryRef(_mb(0))]
    assert len(sent) == 5
    impatient = go(shape(iterations=1), Disaggregated(1), 2, behaviour=Behaviour(move_fails=transfers), patience_s=0.0)
    assert impatient.failure is not None
    assert impatient.failure.startswith("copying i0 m0 to w0 failed 3 times")


def test_installation_from_a_lost_source_comes_from_elsewhere():
    calm = go(shape(iterations=2), Disaggregated(1), 3)
    published = when(calm, m.Publish)
    result = go(shape(iterations=2), Disaggregated(1), 3, (published + SHORT, m.WorkerLost("w0")))
    assert result.finished
    assert {c.source for t, c in result.commands if isinstance(c, m.Install) and c.theta == 1 and t > published} == {
        None
    }


def test_draining_worker_finishes_what_it_has_and_gets_nothing_new():
    result = go(shape(iterations=2, detailed=lambda k: True), Disaggregated(1), 3, (4.0, m.WorkerDraining("w1")))
    assert result.finished
    late = [c.unit for t, c in result.commands if t > 4.0 and isinstance(c, m.Run) and c.worker == "w1"]
    assert all(isinstance(unit, RolloutUnit) and unit.micro_batch == _mb(0) and unit.first > 0 for unit in late)
    assert max(finished(result, RolloutUnit).values()) == 1


def test_draining_lead_hands_over_its_gradient_and_its_optimiser_state():
    run_shape = shape(iterations=2, groups=4)
    calm = go(run_shape, Disaggregated(2), 4)
    lead = commands(calm, m.Commit)[0].lead
    drained = when(calm, m.Commit) - 3.0
    result = go(run_shape, Disaggregated(2), 4, (drained, m.WorkerDraining(lead)))
    assert result.finished
    assert lead in commands(result, m.Reduce)[0].sources
    assert max(finished(result, TrainUnit).values()) == 1


def test_without_a_capable_worker_the_run_waits_and_says_for_what():
    result = simulate(
        Scheduler(shape(), Disaggregated(1), centred),
        [(0.0, m.WorkerJoined("w0", "cpu", frozenset({"rollout", "score"})))],
    )
    assert not result.finished
    assert result.waiting_for == "waiting for a worker that can train; there are w0 (rollout, score)"


def test_worker_that_joins_late_gets_what_it_needs_and_works():
    late = (20.0, m.WorkerJoined("late", "cpu", ALL))
    result = go(shape(iterations=4, groups=4), Disaggregated(1), 2, late)
    assert result.finished
    assert "late" in {c.worker for c in commands(result, m.Run)}


def _mb(index: int) -> MicroBatchId:
    return MicroBatchId("train", 0, index)


def test_a_scorer_does_not_wait_for_a_trajectory_that_is_made_again() -> None:
    """It could be what the scorer is for that has to happen first."""
    scheduler = Scheduler(shape(iterations=1), Disaggregated(1), centred)
    scheduler.handle(m.WorkerJoined("scorer", "cpu", frozenset({"train", "score"})), 0)
    issued = scheduler.handle(m.WorkerJoined("roller", "cpu", frozenset({"rollout"})), 0)
    assert {c.worker for c in issued} == {"roller"}
    issued = [c for name in ("roller", "scorer") for c in scheduler.handle(m.VersionInstalled(name, 0), 0)]
    unit = next(c.unit for c in issued if isinstance(c, m.Run))
    issued = scheduler.handle(m.UnitFinished(unit, "roller", 1.0, m.RolloutDone()), 1)
    (copy,) = (c for c in issued if isinstance(c, m.Transfer))
    assert copy.target == "scorer"
    lane = scheduler._state.fleet.workers["scorer"].cpu
    assert list(lane) == [ScoreUnit(unit.micro_batch)]
    scheduler.handle(m.WorkerLost("roller"), 2)
    assert not lane
    issued = scheduler.handle(m.Transferred(copy.ref, "scorer"), 3)
    assert ScoreUnit(unit.micro_batch) in {c.unit for c in issued if isinstance(c, m.Run)}, "it arrived after all"
