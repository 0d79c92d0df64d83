"""Trainer-assisted generation: who helps when, and what that must not touch. Greedy and with search."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from schedules import ALL, centred, check_every_pair_has_one_fate, commands, shape

from digenrl.scheduling import Digenrl, Disaggregated, Layout, RunShape, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.simulate import Costs, Result, Simulation
from digenrl.scheduling.units import RolloutUnit, TrainUnit, UpdateUnit

ROLLS: frozenset[m.Capability] = frozenset({"rollout", "score"})

PROFILE = {"a": {"rollout_step_s": 3.0, "train_s": {1: 2.0}, "score_s": 1.0, "update_s": 0.5}}

#: Two updates of two groups; a lone rollout worker is the bottleneck.
RUN = shape(
    iterations=2,
    groups=4,
    group_size=4,
    micro_batch=1,
    num_steps=1,
    updates=2,
    timestep_batch=1,
    trained_steps=lambda iteration: (0,),
)

ASSISTS = ["greedy", "search"]

TRAINERS, EVERYBODY = {"w0", "w1"}, {"w0", "w1", "w2"}


def go(assist: str, *, run_shape: RunShape = RUN, able: frozenset[m.Capability] = ROLLS) -> Result:
    """A simulated run on two trainers that can do everything, and a third worker."""
    costs = CostModel.from_profile(run_shape, PROFILE)
    layout: Layout = Disaggregated(2) if assist == "off" else Digenrl(2)
    scheduler = Scheduler(run_shape, layout, centred, costs=costs, search=assist == "search")
    joins = [(0.0, m.WorkerJoined(name, "a", ALL if name in TRAINERS else able)) for name in sorted(EVERYBODY)]
    result = Simulation(scheduler, costs=Costs(costs.seconds, costs.move_s), incidents=joins).run()
    assert result.finished, result.failure or result.waiting_for
    check_every_pair_has_one_fate(run_shape, result)
    return result


def begun(result: Result, kind: type | tuple[type, ...], workers: set[str]) -> list[tuple[float, m.Run]]:
    """Run commands of some kind of unit to some workers, with their times."""
    runs = [(t, c) for t, c in result.commands if isinstance(c, m.Run)]
    return [(t, c) for t, c in runs if isinstance(c.unit, kind) and c.worker in workers]


@pytest.mark.parametrize("assist", ASSISTS)
def test_trainers_roll_out_while_they_have_nothing_to_train(assist: str) -> None:
    result, without = go(assist), go("off")
    assert begun(result, RolloutUnit, TRAINERS)
    assert not begun(without, RolloutUnit, TRAINERS)
    assert result.makespan_s < 0.8 * without.makespan_s


@pytest.mark.parametrize("assist", ASSISTS)
@pytest.mark.parametrize("able", [ROLLS, ALL], ids=["rollout workers cannot train", "they can"])
def test_helper_never_commits(assist: str, able: frozenset[m.Capability]) -> None:
    """Who makes the steps is the same as without help: a trainer by its role, not who only helps to train."""
    result, without = go(assist, able=able), go("off", able=able)
    assert ({c.worker for _, c in begun(result, TrainUnit, EVERYBODY)} == TRAINERS) == (able == ROLLS)
    steps = [[c.worker for _, c in begun(r, UpdateUnit, EVERYBODY)] for r in (result, without)]
    commits = [[c.lead for c in commands(r, m.Commit)] for r in (result, without)]
    assert steps[0] == steps[1] == commits[0] == commits[1]
    assert set(commits[0]) <= TRAINERS


@pytest.mark.parametrize("assist", ASSISTS)
def test_accumulator_survives_helping(assist: str) -> None:
    """A trainer trains, helps and trains again for one update: each unit runs once, and all of them enter it."""
    result = go(assist, run_shape=replace(RUN, updates=1))
    between = 0
    for name in TRAINERS:
        kinds = [(type(c.unit), c.theta) for _, c in begun(result, (RolloutUnit, TrainUnit), {name})]
        for i in range(1, len(kinds) - 1):
            trained = [j for j in (i - 1, i + 1) if kinds[j][0] is TrainUnit]
            between += kinds[i][0] is RolloutUnit and len(trained) == 2 and kinds[i - 1] == kinds[i + 1]
    assert between > 0
    runs = Counter(c.unit for _, c in begun(result, TrainUnit, TRAINERS))
    assert set(runs.values()) == {1}
    committed = [unit for accumulator in result.updates.values() for unit in accumulator]
    assert Counter(committed) == runs


@pytest.mark.parametrize("assist", ASSISTS)
def test_one_unit_of_help_is_queued_at_most_and_behind_nothing(assist: str) -> None:
    result = go(assist)
    on_device: Counter[str] = Counter()
    log = sorted([*result.events, *result.commands], key=lambda item: item[0])
    for _, item in log:
        if isinstance(item, m.UnitFinished) and item.unit.lane == "device":
            on_device[item.worker] -= 1
        elif isinstance(item, m.Run) and item.unit.lane == "device":
            if isinstance(item.unit, RolloutUnit) and item.worker in TRAINERS:
                assert on_device[item.worker] == 0
            on_device[item.worker] += 1


@pytest.mark.parametrize("assist", ASSISTS)
def test_ready_train_unit_waits_for_the_running_unit_at_most(assist: str) -> None:
    """Nothing moves slowly here, so a trainer that begins to help has no unit of a scored group left to train."""
    result = go(assist)
    closed_at: dict[int, float] = {}
    for t, run in begun(result, TrainUnit, TRAINERS):
        closed_at.setdefault(RUN.group_of(run.unit.micro_batch) + 4 * run.unit.micro_batch.iteration, t)
    trained = begun(result, TrainUnit, TRAINERS)
    helped = begun(result, RolloutUnit, TRAINERS)
    assert helped
    for t, help_ in helped:
        for later, run in trained:
            group = RUN.group_of(run.unit.micro_batch) + 4 * run.unit.micro_batch.iteration
            same_step = run.theta == help_.theta
            assert not (same_step and later > t and closed_at[group] < t), f"{run.unit.label} waits for {help_.unit}"


def test_records_are_the_same_with_and_without_help() -> None:
    """Helping changes who generates a trajectory, not what is generated and trained."""
    results = [go(assist) for assist in ("off", *ASSISTS)]
    rolled = [Counter(c.unit for _, c in begun(r, RolloutUnit, EVERYBODY)) for r in results]
    pairs = [{theta: sorted(map(repr, units)) for theta, units in r.updates.items()} for r in results]
    assert rolled[0] == rolled[1] == rolled[2]
    assert pairs[0] == pairs[1] == pairs[2]
