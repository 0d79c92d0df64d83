"""A5. Symptom: latents that overflowed were decoded, clamped and scored as a black picture; training went on with it.

Rule: the sample is Failed("non-finite image") and its group trains on the others. If all of an iteration's samples
fail, the run fails and nothing is published.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from digenrl.rewards.base import Failed, Scored
from faults import Faults, installed
from runs import Ground, Outcome, small
from workers.courier import RunFailed

GROUPS, SIZE, STEPS = 2, 8, 3
CONFIG = small(
    "iterations=1",
    "evaluation.every=0",
    f"algorithm.prompts_per_iteration={GROUPS}",
    f"algorithm.samples_per_prompt={SIZE}",
    "algorithm.updates_per_iteration=1",
)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


def test_one_of_eight_fails_and_its_group_trains_on_seven(ground: Ground) -> None:
    with installed(ground, Faults(nan=frozenset({(1, 3)}))):
        outcome = ground.run(CONFIG)
    (report,) = outcome.reports
    failed = {(s.group, s.generation): score for s, score in report.scores.items() if not isinstance(score, Scored)}
    assert failed == {(1, 3): Failed("non-finite image")}
    assert len(report.rewards) == GROUPS * SIZE - 1
    assert report.trained == report.metrics["pairs"] == (GROUPS * SIZE - 1) * STEPS
    assert sum(report.excluded.values()) == STEPS
    assert all("non-finite image" in reason for reason in report.excluded)
    assert report.skipped_updates == 0
    assert [version for version, _ in outcome.versions] == [1]


def test_nothing_is_published_if_all_fail(ground: Ground) -> None:
    every = frozenset((group, generation) for group in range(GROUPS) for generation in range(SIZE))
    outcome = Outcome()
    with installed(ground, Faults(nan=every)), pytest.raises(RunFailed, match="16 of 16 samples of iteration 0 failed"):
        ground.do(ground.drive, CONFIG, outcome)
    assert not outcome.versions
    assert not outcome.reports
