"""Scheduling techniques together, in the simulator: every allowed pair of settings runs to its end, whoever is lost."""

from __future__ import annotations

from itertools import combinations

import pytest
from schedules import ALL, check_every_pair_has_one_fate, unit_s

from combinations import REAL, REFUSED, ROWS, VALUES, overrides, pairs, settings
from digenrl import runspec
from digenrl.config.load import load_config
from digenrl.identity import SampleId
from digenrl.rewards.base import Score, Scored
from digenrl.scheduling import RunShape, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.simulate import Behaviour, Costs, Result, Simulation
from digenrl.scheduling.units import RolloutUnit

WORKERS = ("w0", "w1", "w2")
HELD_OUT = 3


def test_every_pair_of_settings_is_in_a_row_or_refused() -> None:
    covered = {frozenset(pair) for row in ROWS for pair in combinations(settings(row), 2)}
    assert len(ROWS) <= 40
    assert covered.isdisjoint(REFUSED)
    assert covered | REFUSED.keys() == set(pairs())


def test_the_rows_for_real_workers_hold_every_value() -> None:
    assert len(REAL) == 6
    assert {s for row in REAL for s in settings(row)} == {(name, v) for name, values in VALUES.items() for v in values}


def _score(sample: SampleId) -> Score:
    return Scored(float((3 * sample.generation + sample.group) % 5))


def _scheduler(row: tuple[str, ...]) -> tuple[RunShape, Scheduler]:
    config = load_config("tiny-smoke", overrides(*settings(row)))
    shape = runspec.shape(config, HELD_OUT)
    guess = CostModel.from_profile(shape, {"cpu": {"rollout_step_s": 0.5, "install_s": 0.1}})
    return shape, runspec.scheduler_of(config, shape, guess)


def _run(row: tuple[str, ...], lost: tuple[str, float] | None = None) -> tuple[RunShape, Result]:
    shape, scheduler = _scheduler(row)
    incidents: list[tuple[float, m.Event]] = [(0.0, m.WorkerJoined(name, "cpu", ALL)) for name in WORKERS]
    if lost is not None:
        incidents.append((lost[1], m.WorkerLost(lost[0])))
    costs = Costs(unit_s, move_s=lambda command: 0.1)
    result = Simulation(scheduler, costs=costs, incidents=incidents, behaviour=Behaviour(_score)).run()
    assert result.finished, result.failure or result.waiting_for
    check_every_pair_has_one_fate(shape, result)
    return shape, result


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_a_row_runs_to_its_end_whoever_is_lost(row: tuple[str, ...]) -> None:
    shape, whole = _run(row)
    trained = [c.trained for _, c in whole.commands if isinstance(c, m.CloseIteration)]
    for position, name in enumerate(WORKERS):
        _, result = _run(row, (name, whole.makespan_s * (position + 1) / 4))
        assert [c.trained for _, c in result.commands if isinstance(c, m.CloseIteration)] == trained
        assert _versions(result, shape) == _versions(whole, shape)


def _versions(result: Result, shape: RunShape) -> dict[str, set[int]]:
    """The adapter each trajectory was generated with."""
    found: dict[str, set[int]] = {}
    for _, command in result.commands:
        if isinstance(command, m.Run) and isinstance(command.unit, RolloutUnit):
            found.setdefault(command.unit.micro_batch.label, set()).add(command.theta)
    assert all(len(thetas) == 1 for thetas in found.values())
    assert len(found) >= 2 * shape.groups * shape.micro_batches_per_group
    return found
