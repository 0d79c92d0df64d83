"""Who trains what: the common line, claims, assistance in both directions, and fleets of unequal speed."""

from __future__ import annotations

import pytest
from cost_models import FAST, model
from schedules import COSTS, centred, commands, joins, run, shape, simulate

from digenrl.scheduling import Digenrl, Disaggregated, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.bound import Pool, work_bound
from digenrl.scheduling.loads import Loads
from digenrl.scheduling.predict import predict
from digenrl.scheduling.simulate import Behaviour, Result
from digenrl.scheduling.units import RolloutUnit, TrainUnit

FREE = FAST | {"switch_s": 0.0, "install_s": 0.0, "gather_s": 0.0, "gap_s": 0.0, "transfer_s": 0.0, "score_s": 0.0}
MIXED = {"fast": FREE, "slow": {"rollout_step_s": 0.4}}


def trainers_of(result: Result) -> dict[object, str]:
    """Who was given each train unit."""
    return {c.unit: c.worker for c in commands(result, m.Run) if isinstance(c.unit, TrainUnit)}


def test_workers_that_roll_out_share_the_tail_of_training():
    run_shape = shape(iterations=1, groups=4)
    alone, shared = run(run_shape, Disaggregated(1), workers=4), run(run_shape, Digenrl(1), workers=4)
    assert set(trainers_of(alone).values()) == {"w0"}
    assert set(trainers_of(shared).values()) == {"w0", "w1", "w2", "w3"}
    assert shared.makespan_s < 0.7 * alone.makespan_s


def test_who_rolls_out_trains_only_when_the_update_needs_no_more_rollouts():
    result = run(shape(iterations=1, groups=8, updates=2), Digenrl(1), workers=3)
    last_of_first_update = max(
        t
        for t, c in result.commands
        if isinstance(c, m.Run) and isinstance(c.unit, RolloutUnit) and c.unit.micro_batch.index < 8
    )
    assisted = [
        t for t, c in result.commands if isinstance(c, m.Run) and isinstance(c.unit, TrainUnit) and c.worker != "w0"
    ]
    assert assisted and min(assisted) >= last_of_first_update


def test_timestep_batches_of_one_micro_batch_are_trained_by_several_workers():
    run_shape = shape(iterations=1, groups=1, group_size=2, micro_batch=2, timestep_batch=1)
    result = run(run_shape, Disaggregated(3), workers=4)
    assert len(set(trainers_of(result).values())) == 3


def test_a_claimed_unit_goes_back_if_the_trajectory_does_not_arrive():
    """Copies to w1 always fail, so the other trainer does all the work."""

    def fails(command: m.Command, attempt: int) -> str | None:
        return "unreachable" if isinstance(command, m.Transfer) and command.target == "w1" else None

    scheduler = Scheduler(shape(iterations=1, groups=4), Disaggregated(2), centred, patience_s=1e9)
    unreachable = (0.0, m.WorkerJoined("w1", "cpu", frozenset({"train"})))
    workers = [join for join in joins(3) if join[1].worker != "w1"]
    result = simulate(scheduler, [workers[0], unreachable, workers[1]], Behaviour(move_fails=fails), COSTS)
    assert result.finished
    assert set(trainers_of(result).values()) == {"w0"}


def test_units_spread_by_speed():
    """A trainer of a quarter of the speed gets about a quarter of the units of a fast one."""
    predicted = predict(model(MIXED), [Pool("fast", 2), Pool("slow", 1), Pool("fast", 9)], Disaggregated(3))
    units = [s for s in predicted.spans if isinstance(s.unit, TrainUnit)]
    slow = sum(s.worker.startswith("slow") for s in units)
    fast = sum(s.worker.startswith("fast") for s in units)
    assert slow / fast == pytest.approx(1 / 8, abs=0.05)


def test_a_trajectory_is_sent_to_the_trainer_that_will_be_done_first():
    scheduler = Scheduler(shape(), Disaggregated(2), centred, costs=model(MIXED))
    able = frozenset({"rollout", "train", "score"})
    for name, kind in (("slow-0", "slow"), ("fast-0", "fast"), ("fast-1", "fast")):
        scheduler.handle(m.WorkerJoined(name, kind, able), 0.0)
    loads, unit = Loads(scheduler._state), TrainUnit(scheduler.shape.micro_batches(0)[0], (0,))
    chosen = []
    for _ in range(10):
        name = loads.least(1, unit, 1)
        assert name is not None
        loads.add(name, 1, 1)
        chosen.append(name)
    assert chosen.count("slow-0") == 2 and chosen.count("fast-0") == 8
    loads.add("fast-0", 1, -8)
    assert loads.least(1, unit, 1) == "fast-0"


@pytest.mark.parametrize(
    ("pools", "least"),
    [([Pool("fast", 4)], 0.95), ([Pool("fast", 2), Pool("slow", 2)], 0.92)],
    ids=["equal", "mixed"],
)
def test_with_help_in_both_directions_a_fleet_comes_near_the_work_bound_on_policy(pools: list[Pool], least: float):
    costs = model(MIXED, groups=16)
    bound = work_bound(costs, pools).samples_per_s
    split = predict(costs, pools, Disaggregated(1)).samples_per_s
    shared = predict(costs, pools, Digenrl(1)).samples_per_s
    assert split < least * bound <= shared <= bound * (1 + 1e-9)
