"""A run does not wait for rewards that take as long as rollouts."""

from __future__ import annotations

from benchmarks.exposed_rewards import PER_WORKER, simulated


def test_it_waits_for_the_last_one_at_most() -> None:
    found = simulated()
    assert len(found) == 5
    for exposed in found:
        assert 0 <= exposed.share <= 1 / PER_WORKER, exposed
    # Where nothing is trained before every reward is there, the last one is waited for.
    assert sum(exposed.share > 0 for exposed in found) == 2
