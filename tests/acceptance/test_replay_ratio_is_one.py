"""A1. Symptom: next latents were stored in bfloat16 after the float32 ones had been scored; ratios left the clip range
although no weight had changed.

Rule: from rollout over the wire to the trainer, a replay under the same weights has ratio 1 and a log-prob within 1e-6
of the one noted at rollout. With the casts in the wrong order this test fails. (tests/unit/test_training.py has the
same inside one process, with guidance.)
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from digenrl.config import RunConfig
from faults import Faults, installed
from runs import Ground, Outcome, small
from workers.courier import RunFailed

LIMIT = 1e-6


def config(*overrides: str) -> RunConfig:
    """One update on fresh samples, which travel to another worker to be trained on."""
    return small("iterations=1", "evaluation.every=0", "algorithm.updates_per_iteration=1", *overrides)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


def gap(ground: Ground, *overrides: str) -> float:
    (report,) = ground.run(config(*overrides)).reports
    assert report.metrics["ratio"] == report.metrics["ratio_max"] == 1
    assert report.metrics["clipped"] == 0
    return report.metrics["logp_gap_max"]


#: One timestep at a time: a bfloat16 kernel gives other bits for another batch.
SINGLY = "schedule.timestep_batch=1"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drawn", ["sampler=flow_sde", "sampler=cps", "sampler=wan_sde", "name=dance_grpo"])
def test_frozen_weights(ground: Ground, drawn: str, dtype: str) -> None:
    assert gap(ground, f"algorithm.{drawn}", f"model.dtype={dtype}", SINGLY) < LIMIT


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_rounding_does_is_known_before_anything_is_judged(ground: Ground, dtype: str) -> None:
    """The gap of a whole batch at once, and the floor that one pair at a time shows, are of one size."""
    (report,) = ground.run(config(f"model.dtype={dtype}", "schedule.timestep_batch=3")).reports
    found = report.logp_gap
    (trainer,) = (name for name in found if name.startswith("worker"))
    assert 0 <= found["mean"] <= found["max"] == found[trainer]
    assert found["max"] == max(gap for name, gap in found.items() if name.startswith("t="))
    assert found["max"] <= max(LIMIT, 5 * found["floor"])
    assert (found["floor"] > 1e-5) is (dtype == "bfloat16")


def test_storing_what_was_not_scored_is_noticed(ground: Ground) -> None:
    with installed(ground, Faults(round_stored=True)):
        assert gap(ground, "gates.max_logp_gap=1") > 10 * LIMIT


def test_storing_what_was_not_scored_ends_the_run(ground: Ground) -> None:
    """In the first update, before any weight has moved, and without a limit having been given."""
    outcome = Outcome()
    with installed(ground, Faults(round_stored=True)), pytest.raises(RunFailed) as failed:
        ground.do(ground.drive, config(), outcome)
    assert "from those noted at rollout, more than the 1e-06 of rounding" in str(failed.value)
    assert not outcome.versions


def test_a_gap_beyond_its_limit_ends_the_run(ground: Ground) -> None:
    with installed(ground, Faults(round_stored=True)), pytest.raises(RunFailed) as failed:
        ground.run(config("gates.max_logp_gap=1e-6"))
    assert "from those noted at rollout, more than gates.max_logp_gap=1e-06" in str(failed.value)
    assert "model.dtype=float32, 12 x 24, micro-batches of" in str(failed.value)
