"""Why lanes stand still."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import ALL, SHAPE, centred, joins, shape, unit_s

from digenrl.identity import MicroBatchId
from digenrl.scheduling import Colocated, Disaggregated, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.bubbles import CAUSES, Bubble, Facts, bubbles, by_cause
from digenrl.scheduling.simulate import Costs, Result, Simulation
from digenrl.scheduling.trace import TracedUnit, from_records, traced
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit

#: One iteration of 2 groups of 4 in micro-batches of 2: m0 m1 | m2 m3.
M = [MicroBatchId("train", 0, i) for i in range(4)]


def ran(worker: str, unit: Unit, start_s: float, end_s: float, theta: int = 0) -> TracedUnit:
    return TracedUnit(worker, unit.lane, unit, start_s, end_s, theta, 0)


def rolled(worker: str, index: int, start_s: float, end_s: float, theta: int = 0) -> TracedUnit:
    return ran(worker, RolloutUnit(M[index], 0, 3), start_s, end_s, theta)


def scored(index: int, start_s: float, end_s: float) -> TracedUnit:
    return ran("s", ScoreUnit(M[index]), start_s, end_s)


def on(worker: str, found: list[Bubble]) -> list[tuple[float, float, str]]:
    return [(b.start_s, b.end_s, b.cause) for b in found if b.worker == worker and b.lane == "device"]


#: Both micro-batches of a group are rolled out on r by 2 and 4, of the other by 6 and 8, and each is scored a second
#: after it was.
ROLLED = [rolled("r", i, 2.0 * i, 2.0 * i + 2) for i in range(4)]
SCORED = [scored(i, 2.0 * i + 2, 2.0 * i + 3) for i in range(4)]


def test_a_trainer_waits_for_the_samples_of_the_group_then_for_their_reward_then_for_the_scheduler():
    spans = [*ROLLED, *SCORED, ran("t", TrainUnit(M[0], (0, 1)), 5.5, 9.0)]
    assert on("t", bubbles(spans, Facts(SHAPE))) == [
        (0.0, 4.0, "samples"),
        (4.0, 5.0, "reward"),
        (5.0, 5.5, "orchestration"),
    ]


def test_a_streamed_unit_waits_for_its_own_micro_batch_only():
    spans = [*ROLLED, *SCORED, ran("t", TrainUnit(M[0], (0, 1)), 3.25, 9.0)]
    assert on("t", bubbles(spans, Facts(SHAPE))) == [
        (0.0, 2.0, "samples"),
        (2.0, 3.0, "reward"),
        (3.0, 3.25, "orchestration"),
    ]


def test_a_larger_std_scope_is_told_apart_from_the_group():
    spans = [*ROLLED, *SCORED, ran("t", TrainUnit(M[0], (0, 1)), 9.25, 10.0)]
    expected = [(0.0, 4.0, "samples"), (4.0, 5.0, "reward"), (5.0, 9.0, "std scope"), (9.0, 9.25, "orchestration")]
    assert on("t", bubbles(spans, Facts(SHAPE, "iteration"))) == expected
    assert on("t", bubbles(spans, Facts(shape(updates=1), "update"))) == expected
    assert "std scope" not in [cause for _, _, cause in on("t", bubbles(spans, Facts(shape(updates=2), "update")))]


def test_without_gap_a_trainer_waits_for_all_samples():
    spans = [*ROLLED, *SCORED, ran("t", TrainUnit(M[0], (0, 1)), 9.0, 10.0)]
    assert on("t", bubbles(spans, Facts(SHAPE, gap=False)))[0] == (0.0, 8.0, "samples")


def test_a_rollout_worker_waits_for_weights_until_they_are_installed():
    step = ran("t", UpdateUnit(1), 9.0, 10.0)
    following = rolled("r", 0, 11.0, 12.0, theta=1)
    spans = [*ROLLED, step, following]
    assert on("r", bubbles(spans, Facts(SHAPE))) == [(8.0, 10.0, "weights"), (10.0, 11.0, "orchestration")]
    facts = Facts(SHAPE, installed={("r", 1): 10.75}, committed={1: 10.5})
    assert on("r", bubbles(spans, facts)) == [(8.0, 10.75, "weights"), (10.75, 11.0, "orchestration")]


def test_a_rollout_under_the_version_before_does_not_wait_for_weights():
    spans = [*ROLLED, ran("t", UpdateUnit(1), 9.0, 10.0), rolled("r", 0, 8.5, 9.5, theta=0)]
    assert on("r", bubbles(spans, Facts(SHAPE))) == [(8.0, 8.5, "orchestration"), (9.5, 10.0, "end")]


def test_the_lead_waits_for_the_others_before_it_steps():
    trained = [ran("u", TrainUnit(M[i], (0, 1)), 9.0, 11.0) for i in range(4)]
    spans = [*ROLLED, *SCORED, *trained, ran("t", UpdateUnit(1), 12.0, 13.0)]
    assert on("t", bubbles(spans, Facts(SHAPE))) == [
        (0.0, 8.0, "samples"),
        (8.0, 9.0, "reward"),
        (9.0, 12.0, "weights"),
    ]


def test_a_train_unit_of_the_next_update_waits_for_the_step_before():
    run_shape = shape(updates=2)
    spans = [*ROLLED, *SCORED, ran("t", UpdateUnit(1), 10.0, 11.0), ran("u", TrainUnit(M[2], (0, 1)), 12.0, 13.0, 1)]
    assert on("u", bubbles(spans, Facts(run_shape)))[-2:] == [(9.0, 11.0, "weights"), (11.0, 12.0, "orchestration")]


def test_a_trajectory_that_has_not_arrived_is_a_missing_sample():
    spans = [*ROLLED, *SCORED, ran("t", TrainUnit(M[0], (0, 1)), 7.0, 9.0)]
    facts = Facts(SHAPE, arrived={(M[0], "t"): 6.5})
    assert on("t", bubbles(spans, facts))[-2:] == [(5.0, 6.5, "samples"), (6.5, 7.0, "orchestration")]


def test_a_lost_trajectory_counts_when_it_was_made_again():
    spans = [*ROLLED, *SCORED, rolled("r", 1, 8.0, 10.0), ran("t", TrainUnit(M[1], (0, 1)), 10.0, 12.0)]
    assert on("t", bubbles(spans, Facts(SHAPE))) == [(0.0, 10.0, "samples")]


def test_draining_covers_everything_after_the_notice_and_the_lane_ends_with_its_worker():
    spans = [*ROLLED, *SCORED, ran("t", TrainUnit(M[0], (0, 1)), 6.0, 7.0)]
    facts = Facts(SHAPE, draining={"t": 4.5}, left={"t": 7.5})
    assert on("t", bubbles(spans, facts)) == [
        (0.0, 4.0, "samples"),
        (4.0, 4.5, "reward"),
        (4.5, 6.0, "draining"),
        (7.0, 7.5, "draining"),
    ]


def test_a_worker_without_units_stands_still_from_when_it_joined():
    assert on("idle", bubbles(ROLLED, Facts(SHAPE, joined={"idle": 3.0}))) == [(3.0, 8.0, "end")]


def test_sums_may_be_restricted_to_a_window():
    found = [Bubble("w", "device", 0.0, 4.0, "samples"), Bubble("w", "device", 6.0, 8.0, "weights")]
    assert by_cause(found, (3.0, 7.0)) == dict.fromkeys(CAUSES, 0.0) | {"samples": 1.0, "weights": 1.0}
    assert sum(by_cause(found).values()) == 6.0


# --- on simulated runs ---


@st.composite
def misfortunes(draw: st.DrawFn) -> list[tuple[float, m.Event]]:
    count = draw(st.integers(2, 5))
    times = st.floats(0, 60).map(lambda t: round(t, 3))
    events: list[tuple[float, m.Event]] = [
        (0.0 if i < 2 else draw(times), m.WorkerJoined(f"w{i}", draw(st.sampled_from(["cpu", "fast"])), ALL))
        for i in range(count)
    ]
    for i in range(2, count):
        fate = draw(st.sampled_from(["stays", "drains", "lost"]))
        if fate == "drains":
            at = draw(times)
            events += [(at, m.WorkerDraining(f"w{i}")), (at + draw(times), m.WorkerLost(f"w{i}"))]
        elif fate == "lost":
            events.append((draw(times), m.WorkerLost(f"w{i}")))
    return sorted(events, key=lambda event: event[0])


def run(incidents: list[tuple[float, m.Event]], layout: object, scope: str, updates: int) -> tuple[Scheduler, Result]:
    run_shape = shape(groups=4, updates=updates, detailed=lambda iteration: iteration == 1)
    scheduler = Scheduler(run_shape, layout, centred, std_scope=scope)  # type: ignore[arg-type]
    return scheduler, Simulation(scheduler, costs=Costs(unit_s, lambda command: 0.1), incidents=incidents).run()


@settings(deadline=None, max_examples=60)
@given(
    incidents=misfortunes(),
    layout=st.sampled_from([Colocated(), Disaggregated(1)]),
    scope=st.sampled_from(["group", "update", "iteration"]),
    updates=st.sampled_from([1, 2]),
)
def test_busy_and_bubbles_make_up_the_stay_of_every_worker(
    incidents: list[tuple[float, m.Event]], layout: object, scope: str, updates: int
):
    scheduler, result = run(incidents, layout, scope, updates)
    spans = traced(scheduler.shape, result.events, result.commands)
    facts = Facts.from_log(scheduler.shape, scope, result.events)  # type: ignore[arg-type]
    found = bubbles(spans, facts)
    total: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in (*spans, *found):
        total[span.worker, span.lane].append(span.end_s - span.start_s)
    assert all(b.seconds > 0 and b.cause in CAUSES for b in found)
    for (worker, _), parts in total.items():
        stay = facts.left.get(worker, result.makespan_s) - facts.joined[worker]
        assert math.fsum(parts) == pytest.approx(stay)


def test_a_run_without_misfortune_has_no_draining_and_few_unexplained_bubbles():
    scheduler, result = run(joins(3), Disaggregated(1), "group", 1)
    spans = traced(scheduler.shape, result.events, result.commands)
    total = by_cause(bubbles(spans, Facts.from_log(scheduler.shape, "group", result.events)))
    assert total["draining"] == total["std scope"] == 0
    assert total["weights"] > 0 and total["samples"] > 0
    assert total["orchestration"] < 0.1 * sum(total.values())


# --- traces ---


def test_a_trace_names_adapter_and_version():
    scheduler, result = run(joins(3), Disaggregated(1), "group", 2)
    spans = traced(scheduler.shape, result.events, result.commands)
    for span in spans:
        unit = span.unit
        if isinstance(unit, RolloutUnit | TrainUnit | ScoreUnit):
            assert span.version == unit.micro_batch.iteration
        if isinstance(unit, RolloutUnit):
            assert span.theta == 2 * unit.micro_batch.iteration
        if isinstance(unit, UpdateUnit):
            assert (span.theta, span.version) == (unit.theta - 1, (unit.theta - 1) // 2)


def test_records_of_a_run_start_at_zero_and_score_units_take_over_the_version():
    class Kept:
        def __init__(self, unit: Unit, theta: int, started_at: float) -> None:
            self.unit, self.theta, self.started_at, self.worker, self.seconds = unit, theta, started_at, "w", 2.0

    later = MicroBatchId("train", 1, 0)
    spans = from_records(SHAPE, [Kept(RolloutUnit(later, 0, 3), 0, 100.0), Kept(ScoreUnit(later), 1, 102.5)])
    assert [(s.start_s, s.end_s, s.version) for s in spans] == [(0.0, 2.0, 0), (2.5, 4.5, 0)]
    assert spans[1].lane == "cpu" and spans[0].activity == "rollout"
