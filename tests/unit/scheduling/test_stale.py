"""Stale groups (TCSS): which they are, when they are generated, and what is kept for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import ALL, COSTS, centred, commands, joins, run, shape, simulate
from test_invariants import Luck, incidents, shapes

from digenrl.identity import MicroBatchId
from digenrl.scheduling import Disaggregated, RunShape, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.simulate import Costs, Result, Simulation
from digenrl.scheduling.state import AHEAD
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit

#: 4 groups of 2 micro-batches, 2 of the groups stale, 2 updates.
STALE = shape(iterations=3, groups=4, updates=2, stale_groups=2)


def runs(result: Result, kind: type, iteration: int) -> list[tuple[float, m.Run]]:
    """Run commands of one kind of unit on data of one iteration, with their times."""
    found = [(t, c) for t, c in result.commands if isinstance(c, m.Run) and isinstance(c.unit, kind)]
    return [(t, c) for t, c in found if c.unit.micro_batch.iteration == iteration]


def published(result: Result, version: int) -> float:
    """When a version was published."""
    return next(t for t, c in result.commands if isinstance(c, m.Publish) and c.version == version)


def test_version_is_a_function_of_identity() -> None:
    def versions(iteration: int) -> list[int]:
        return [STALE.version_of(micro_batch) for micro_batch in STALE.micro_batches(iteration)]

    assert versions(0) == [0] * 8
    assert versions(1) == [0] * 4 + [1] * 4
    assert versions(2) == [1] * 4 + [2] * 4
    assert [STALE.staleness(micro_batch) for micro_batch in STALE.micro_batches(2)] == [1] * 4 + [0] * 4
    assert STALE.version_of(MicroBatchId("eval", 2, 0)) == 2


def test_only_fresh_groups_of_the_first_update_are_on_policy() -> None:
    def on_policy(run_shape: RunShape, iteration: int) -> list[bool]:
        return [run_shape.on_policy(micro_batch) for micro_batch in run_shape.micro_batches(iteration)[::2]]

    assert on_policy(shape(groups=4, updates=2), 1) == [True, True, False, False]
    assert on_policy(shape(groups=4, updates=2, stale_groups=1), 0) == [True, True, False, False]
    assert on_policy(shape(groups=4, updates=2, stale_groups=1), 1) == [False, True, False, False]


def test_stale_groups_are_generated_and_scored_while_the_iteration_before_is_trained() -> None:
    result = run(STALE, Disaggregated(1), workers=2)
    early = [c for t, c in runs(result, RolloutUnit, 1) if t < published(result, 1)]
    assert [c.unit.micro_batch.index for c in early] == [0, 1, 2, 3]
    assert {(c.theta, c.priority) for c in early} == {(0, AHEAD)}
    assert all(t < published(result, 1) for t, c in runs(result, ScoreUnit, 1) if STALE.staleness(c.unit.micro_batch))
    late = [c for t, c in runs(result, RolloutUnit, 1) if t >= published(result, 1)]
    assert [(c.unit.micro_batch.index, c.theta) for c in late] == [(4, 2), (5, 2), (6, 2), (7, 2)]


def test_no_rollout_of_the_next_iteration_before_the_last_of_this_one() -> None:
    result = run(STALE, Disaggregated(1), workers=3)
    for iteration in (0, 1):
        last = max(t for t, _ in runs(result, RolloutUnit, iteration))
        assert min(t for t, _ in runs(result, RolloutUnit, iteration + 1)) >= last


def test_stale_groups_are_trained_in_their_own_iteration_against_the_weights_that_made_them() -> None:
    result = run(STALE, Disaggregated(1), workers=2)
    for iteration in (1, 2):
        trained = runs(result, TrainUnit, iteration)
        assert all(t >= published(result, iteration) for t, _ in trained)
        thetas = {STALE.group_of(c.unit.micro_batch): (c.theta, c.old_theta) for _, c in trained}
        first, before = 2 * iteration, 2 * iteration - 2
        assert thetas == {0: (first, before), 1: (first, before), 2: (first + 1, first), 3: (first + 1, first)}


def test_adapter_is_kept_until_the_iteration_that_uses_it_last_is_over() -> None:
    result = run(STALE, Disaggregated(1), workers=2)
    dropped = {(c.ref.theta, c.worker): t for t, c in result.commands if isinstance(c, m.Drop) and _is_adapter(c.ref)}
    for worker in ("w0", "w1"):
        assert dropped[0, worker] == published(result, 2)
        assert dropped[2, worker] == published(result, 3)


def test_waiting_for_weights_goes_away() -> None:
    on_policy = run(shape(iterations=6, groups=4, updates=2), Disaggregated(1), workers=2)
    stale = run(shape(iterations=6, groups=4, updates=2, stale_groups=2), Disaggregated(1), workers=2)
    assert stale.makespan_s < 0.9 * on_policy.makespan_s
    busy = ("w0", "device")
    assert stale.busy_s[busy] == pytest.approx(on_policy.busy_s[busy])


def test_everything_may_be_stale() -> None:
    result = run(shape(iterations=4, groups=4, updates=2, stale_groups=4), Disaggregated(1), workers=2)
    assert {c.theta for _, c in runs(result, RolloutUnit, 3)} == {4}


def test_resumed_run_takes_the_adapter_of_the_version_before_from_the_driver() -> None:
    resumed = shape(start_iteration=2, iterations=4, groups=4, updates=2, stale_groups=2)
    result = run(resumed, Disaggregated(1), workers=2)
    assert {(c.theta, c.source) for c in commands(result, m.Install) if c.theta <= 4} == {
        (2, None),
        (4, None),
    }
    assert {resumed.group_of(c.unit.micro_batch): c.theta for _, c in runs(result, RolloutUnit, 2)} == {
        0: 2,
        1: 2,
        2: 4,
        3: 4,
    }


def test_lost_stale_trajectory_is_made_again_under_its_own_version() -> None:
    # Just after iteration 1 began everybody who has its stale trajectories is lost.
    late = published(run(STALE, Disaggregated(1), workers=2), 1) + 0.05
    lost = [(late, m.WorkerLost("w0")), (late, m.WorkerLost("w1"))]
    joined = [(late + 1, m.WorkerJoined(name, "cpu", ALL)) for name in ("w2", "w3")]
    result = simulate(Scheduler(STALE, Disaggregated(1), centred), [*joins(2), *lost, *joined])
    assert result.finished
    again = [c for t, c in runs(result, RolloutUnit, 1) if t > late]
    assert [(c.unit.micro_batch.index, c.theta) for c in again] == [(i, 0) for i in range(4)] + [
        (i, 2) for i in range(4, 8)
    ]


def test_stopping_early_withdraws_what_was_begun_for_the_next_iteration() -> None:
    class Stopper(Simulation):
        def _tell(self, event: m.Event) -> None:
            if self.scheduler.progress().ahead == 1:
                self.scheduler.stop_after(0)
            super()._tell(event)

    run_shape = shape(iterations=5, groups=4, updates=2, stale_groups=4, eval_prompts=2, evaluated=lambda v: True)
    result = Stopper(Scheduler(run_shape, Disaggregated(1), centred), costs=COSTS, incidents=joins(3)).run()
    assert result.finished
    assert [c.iteration for c in commands(result, m.CloseIteration)] == [0]
    assert [c.version for c in commands(result, m.EvaluationDone)] == [0, 1]
    assert len(runs(result, RolloutUnit, 1)) < run_shape.groups * run_shape.micro_batches_per_group


def test_progress_counts_what_is_ahead() -> None:
    seen = set()

    class Observed(Simulation):
        def _tell(self, event: m.Event) -> None:
            super()._tell(event)
            progress = self.scheduler.progress()
            seen.add((progress.version, progress.ahead))
            assert progress.micro_batches <= 8

    assert Observed(Scheduler(STALE, Disaggregated(1), centred), costs=COSTS, incidents=joins(2)).run().finished
    assert {(0, 0), (0, 4), (1, 4), (2, 0)} <= seen
    assert max(ahead for _, ahead in seen) == 4


@settings(max_examples=40, deadline=None)
@given(
    run_shape=shapes(),
    fleets=st.lists(incidents(), min_size=2, max_size=2),
    seeds=st.lists(st.integers(0, 99), min_size=2, max_size=2),
)
def test_which_groups_are_stale_does_not_depend_on_timing(
    run_shape: RunShape, fleets: list[list[tuple[float, m.Event]]], seeds: list[int]
) -> None:
    """On two fleets with other misfortune and other durations, every trajectory has the same version."""
    seen = []
    for fleet, seed in zip(fleets, seeds, strict=True):
        luck = Luck(seed, 0.1)
        scheduler = Scheduler(
            run_shape, Disaggregated(1), centred, max_attempts=100, max_losses=100, max_failed_share=1
        )
        result = simulate(scheduler, fleet, luck, Costs(luck.unit_s, luck.move_s))
        assert result.finished, result.failure or result.waiting_for
        rolled = [c for _, c in result.commands if isinstance(c, m.Run) and isinstance(c.unit, RolloutUnit)]
        seen.append({(c.unit.micro_batch, c.theta) for c in rolled if c.unit.micro_batch.phase == "train"})
    assert seen[0] == seen[1]


def _is_adapter(ref: m.Ref) -> bool:
    return isinstance(ref, m.AdapterRef)
