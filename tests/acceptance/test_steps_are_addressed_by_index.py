"""A6. Symptom: a stored timestep (254.00001525) was not found in the scheduler's table, or the shift was applied twice.

Rule: what travels is a step's index and the table itself. Every index of a trajectory can be trained and replays to the
log-prob of its rollout. (tests/unit/models/test_sigmas.py compares each family's table with the installed diffusers.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from digenrl.scheduling.units import TrainUnit
from runs import Ground, small

STEPS = 10


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


def test_every_index_is_found_again(ground: Ground) -> None:
    config = small(
        f"algorithm.num_steps={STEPS}",
        "algorithm.sde_window_size=0",
        "algorithm.prompts_per_iteration=2",
        "algorithm.updates_per_iteration=1",
        "schedule.timestep_batch=1",
        "iterations=1",
        "evaluation.every=0",
    )
    outcome = ground.run(config)
    (report,) = outcome.reports
    trained = [unit.steps for unit in outcome.receipts if isinstance(unit, TrainUnit)]
    assert sorted(set(trained)) == [(step,) for step in range(STEPS - 1)]
    assert report.trained == 2 * 4 * (STEPS - 1)
    assert report.metrics["logp_gap_max"] < 1e-6
