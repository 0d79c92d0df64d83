"""One rule of the scheduler per test, on small simulated runs without misfortune."""

from __future__ import annotations

import pytest
from schedules import ALL, COSTS, SHAPE, centred, commands, joins, run, shape, simulate

from digenrl.identity import MicroBatchId
from digenrl.rewards.base import Failed, Scored
from digenrl.scheduling import Colocated, Disaggregated, Scheduler, Verdict
from digenrl.scheduling import messages as m
from digenrl.scheduling.simulate import Behaviour, Result
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, UpdateUnit


def runs(result: Result, kind: type) -> list[m.Run]:
    """Run commands of one kind of unit."""
    return [c for _, c in result.commands if isinstance(c, m.Run) and isinstance(c.unit, kind)]


def first_time(result: Result, kind: type) -> float:
    """When the first unit of a kind was dispatched."""
    return next(t for t, c in result.commands if isinstance(c, m.Run) and isinstance(c.unit, kind))


def test_groups_are_generated_in_order_and_spread_over_the_rollout_workers():
    result = run(shape(iterations=1), Disaggregated(1), workers=3)
    assert [(r.unit.micro_batch.index, r.worker) for r in runs(result, RolloutUnit)] == [
        (0, "w1"),
        (1, "w2"),
        (2, "w1"),
        (3, "w2"),
    ]


def test_disaggregated_trains_while_others_roll_out():
    result = run(shape(iterations=1), Disaggregated(1), workers=2)
    last_rollout = max(t for t, e in result.events if isinstance(e, m.UnitFinished) and isinstance(e.unit, RolloutUnit))
    assert first_time(result, TrainUnit) < last_rollout
    assert {r.worker for r in runs(result, RolloutUnit)} == {"w1"}
    assert {r.worker for r in runs(result, TrainUnit)} == {"w0"}


def test_colocated_trains_only_when_everything_is_generated():
    result = run(shape(iterations=1), Colocated(), workers=2)
    last_rollout = max(t for t, e in result.events if isinstance(e, m.UnitFinished) and isinstance(e.unit, RolloutUnit))
    assert first_time(result, TrainUnit) >= last_rollout
    assert {r.worker for r in runs(result, RolloutUnit)} == {r.worker for r in runs(result, TrainUnit)} == {"w0", "w1"}
    assert not commands(result, m.Transfer) or all(
        any(r.worker == c.target for r in runs(result, ScoreUnit)) for c in commands(result, m.Transfer)
    )


def test_life_of_an_iteration_in_order():
    result = run(shape(iterations=1), Colocated(), workers=2)
    names = [type(c).__name__ for c in (c for _, c in result.commands) if not isinstance(c, m.Run | m.Drop)]
    assert names == ["Install", "Install", "Reduce", "Commit", "Install", "Publish", "CloseIteration", "Finished"]


def test_second_update_uses_the_new_adapter_and_names_the_old_one():
    result = run(shape(iterations=2, updates=2), Disaggregated(1))
    thetas = {(r.unit.micro_batch.iteration, r.unit.micro_batch.index // 2): r for r in runs(result, TrainUnit)}
    assert {key: (r.theta, r.old_theta) for key, r in thetas.items()} == {
        (0, 0): (0, 0),
        (0, 1): (1, 0),
        (1, 0): (2, 2),
        (1, 1): (3, 2),
    }
    assert [c.theta for c in commands(result, m.Publish)] == [2, 4]


def test_trainer_keeps_the_adapter_that_generated_the_samples_until_the_next_version():
    result = run(shape(iterations=1, updates=2), Disaggregated(1))
    dropped = [t for t, c in result.commands if c == m.Drop(m.AdapterRef(0), "w0")]
    published = [t for t, c in result.commands if isinstance(c, m.Publish)]
    assert dropped == published


def test_next_rollout_waits_for_the_acknowledgement_of_the_new_version():
    result = run(shape(iterations=2), Disaggregated(1), workers=3)
    installed = {e.worker: t for t, e in result.events if isinstance(e, m.VersionInstalled) and e.theta == 1}
    for t, c in result.commands:
        if isinstance(c, m.Run) and isinstance(c.unit, RolloutUnit) and c.theta == 1:
            assert t >= installed[c.worker]


def test_detailed_rollout_depends_on_its_previous_step_and_outranks_new_ones():
    result = run(shape(iterations=1, detailed=lambda k: True), Disaggregated(1))
    rollouts = runs(result, RolloutUnit)
    by_batch = [r for r in rollouts if r.unit.micro_batch == MicroBatchId("train", 0, 1)]
    assert [(r.unit.first, r.unit.last) for r in by_batch] == [(0, 1), (1, 2), (2, 3)]
    assert by_batch[0].depends_on == ()
    assert by_batch[1].depends_on == (by_batch[0].unit,)
    assert by_batch[0].priority < by_batch[1].priority < runs(result, TrainUnit)[0].priority
    assert runs(result, TrainUnit)[0].priority < runs(result, UpdateUnit)[0].priority


def test_trajectory_travels_to_its_trainer_before_it_is_scored():
    result = run(shape(iterations=1), Disaggregated(1), workers=2)
    first = MicroBatchId("train", 0, 0)
    sent = next(t for t, c in result.commands if isinstance(c, m.Transfer) and c.ref == m.TrajectoryRef(first))
    ended = next(t for t, e in result.events if isinstance(e, m.UnitFinished) and e.unit == RolloutUnit(first, 0, 3))
    assert sent == ended


def test_failed_samples_are_left_out_and_a_unit_without_samples_is_not_run():
    def score(sample):
        return (
            Failed("no reward")
            if (sample.group, sample.generation) in {(0, 0), (1, 0), (1, 1)}
            else Scored(float(sample.generation))
        )

    scheduler = Scheduler(shape(iterations=1), Disaggregated(1), centred)
    result = simulate(scheduler, joins(2), Behaviour(score=score))
    trained = {r.unit.micro_batch.index: r.advantages for r in runs(result, TrainUnit)}
    assert trained.keys() == {0, 1, 3}
    assert [s.generation for s in trained[0]] == [1]
    assert list(trained[0].values()) == [-1.0]
    (closed,) = commands(result, m.CloseIteration)
    assert closed.trained == 5 * 3
    assert set(closed.excluded.values()) == {"no reward"}


def test_update_of_which_everything_is_excluded_still_advances_theta():
    scheduler = Scheduler(shape(iterations=1), Disaggregated(1), centred, max_bad_updates=0)
    result = simulate(scheduler, joins(2), Behaviour(score=lambda s: Scored(1.0), skips=lambda theta: True))
    assert result.finished
    (closed,) = commands(result, m.CloseIteration)
    assert (closed.trained, closed.skipped_updates) == (0, 0)
    assert set(closed.excluded.values()) == {"zero variance"}
    assert not runs(result, TrainUnit)
    assert [c.theta for c in commands(result, m.Publish)] == [1]


def test_too_many_failed_samples_end_the_run():
    scheduler = Scheduler(shape(), Disaggregated(1), centred, max_failed_share=0.25)
    result = simulate(scheduler, joins(2), Behaviour(score=lambda s: Failed("server is down")))
    assert (
        result.failure
        == "4 of 8 samples of iteration 0 failed; gates.max_failed_share=0.25 allows 2; the first: server is down"
    )
    assert not runs(result, UpdateUnit)


def test_std_scope_iteration_waits_for_all_scores():
    result = run(shape(iterations=1, updates=2), Disaggregated(1), std_scope="iteration")
    last = max(t for t, e in result.events if isinstance(e, m.UnitFinished) and isinstance(e.unit, ScoreUnit))
    assert first_time(result, TrainUnit) == last


def test_advantages_see_the_rewards_by_group_in_order():
    seen = []

    def record(groups):
        seen.append([[s.generation for s in group] for group in groups])
        return centred(groups)

    scheduler = Scheduler(shape(iterations=1), Disaggregated(1), record, std_scope="update")
    simulate(scheduler, joins(2))
    assert seen == [[[0, 1, 2, 3], [0, 1, 2, 3]]]


def test_sample_without_verdict_is_refused():
    scheduler = Scheduler(shape(iterations=1), Disaggregated(1), lambda groups: Verdict({}, {}))
    with pytest.raises(ValueError, match="must be either in `advantages` or in `excluded`"):
        simulate(scheduler, joins(2))


def test_skipped_updates_advance_theta_and_too_many_end_the_run():
    scheduler = Scheduler(shape(iterations=5), Disaggregated(1), centred, max_bad_updates=1)
    result = simulate(scheduler, joins(2), Behaviour(skips=lambda theta: theta >= 2))
    assert [c.skipped_updates for c in commands(result, m.CloseIteration)] == [0, 1]
    assert [c.trained for c in commands(result, m.CloseIteration)] == [24, 0]
    assert result.failure is not None
    assert "2 optimiser steps were skipped" in result.failure
    assert "max_bad_updates=1" in result.failure


def test_evaluation_of_a_version_comes_before_the_next_is_published():
    result = run(
        shape(iterations=2, eval_prompts=5, evaluated=lambda version: version in (0, 2)), Disaggregated(1), workers=2
    )
    order = [(type(c).__name__, c.version) for _, c in result.commands if isinstance(c, m.EvaluationDone | m.Publish)]
    assert order == [("EvaluationDone", 0), ("Publish", 1), ("Publish", 2), ("EvaluationDone", 2)]
    assert [len(c.scores) for c in commands(result, m.EvaluationDone)] == [5, 5]


def test_colocated_evaluates_when_the_updates_are_done():
    result = run(shape(iterations=1, eval_prompts=4, evaluated=lambda v: v == 0), Colocated(), workers=2)
    evaluated = [
        t for t, c in result.commands if isinstance(c, m.Run) and isinstance(c.unit, RolloutUnit) and not c.priority
    ]
    committed = [t for t, e in result.events if isinstance(e, m.Committed)]
    assert evaluated[0] == committed[0]


def test_one_worker_alone_plays_both_roles():
    assert run(shape(updates=2, eval_prompts=2, evaluated=lambda v: True), Disaggregated(1), workers=1).finished


def test_score_goes_to_the_least_loaded_and_among_equals_to_who_has_the_trajectory():
    scorer = [(0.0, m.WorkerJoined("cpu", "cpu", frozenset({"score"})))]
    scheduler = Scheduler(shape(iterations=1), Disaggregated(1), centred)
    result = simulate(scheduler, joins(2) + scorer)
    assert runs(result, ScoreUnit)[0].worker in {"w0", "cpu"}
    assert {r.worker for r in runs(result, ScoreUnit)} <= {"w0", "w1", "cpu"}
    alone = run(shape(iterations=1), Colocated(), workers=1)
    assert not commands(alone, m.Transfer)


def test_resumed_run_starts_from_its_version():
    result = run(shape(start_iteration=3, iterations=5, updates=2), Disaggregated(1))
    assert {r.unit.micro_batch.iteration for r in runs(result, RolloutUnit)} == {3, 4}
    assert commands(result, m.Install)[0] == m.Install(6, "w0", None, True)
    assert [c.version for c in commands(result, m.Publish)] == [4, 5]


def test_stop_after_the_iteration_in_progress():
    scheduler = Scheduler(shape(iterations=9), Disaggregated(1), centred)
    scheduler.stop_after(0)
    result = simulate(scheduler, joins(2))
    assert result.finished
    assert [c.iteration for c in commands(result, m.CloseIteration)] == [0]


def test_more_trainers_shorten_the_run_and_share_the_work():
    one = run(shape(groups=8, iterations=1), Disaggregated(1), workers=6)
    three = run(shape(groups=8, iterations=1), Disaggregated(3), workers=8)
    assert three.makespan_s < one.makespan_s
    per_trainer = [sum(r.worker == w for r in runs(three, TrainUnit)) for w in ("w0", "w1", "w2")]
    assert max(per_trainer) - min(per_trainer) <= 2


def test_busy_time_is_taken_from_the_log():
    result = run(shape(iterations=1), Disaggregated(1))
    assert result.busy_s["w1", "device"] == pytest.approx(4 * 3.0)
    assert result.busy_s["w0", "device"] == pytest.approx(8 * 2.0 + 0.5)
    assert sum(s for (_, lane), s in result.busy_s.items() if lane == "cpu") == pytest.approx(4 * 1.0)


def test_progress_and_what_a_run_waits_for():
    scheduler = Scheduler(SHAPE, Disaggregated(1), centred)
    assert scheduler.waiting_for() == (
        "waiting for a worker that can rollout and one that can train and one that can score; there are no workers"
    )
    scheduler.handle(m.WorkerJoined("w0", "cpu", ALL), 0.0)
    assert scheduler.waiting_for() == "waiting for theta 0 to reach w0 from the driver"
    scheduler.handle(m.VersionInstalled("w0", 0), 1.0)
    assert scheduler.waiting_for() == "waiting for rollout i0 m0 t0-2 on w0"
    progress = scheduler.progress()
    assert (progress.version, progress.theta, progress.micro_batches, progress.generated) == (0, 0, 4, 0)
    assert (progress.workers, progress.finished) == (1, False)


def test_nothing_happens_after_the_end():
    scheduler = Scheduler(shape(iterations=1), Disaggregated(1), centred)
    assert simulate(scheduler, joins(2), costs=COSTS).finished
    assert scheduler.handle(m.WorkerJoined("late", "cpu", ALL), 1e6) == []
    assert scheduler.waiting_for() == "the run is over"
    assert scheduler.progress().finished
