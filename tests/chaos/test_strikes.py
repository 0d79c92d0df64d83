"""Workers are killed at random moments, several times a run, replacements included: nothing changes in the result."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import pytest

from runs import Ground, assert_as_expected, small
from workers.listener import Dispatched, Listener
from workers.presence import card

WORKERS = 3
LAYOUTS = (
    ("cluster.trainers=2", "schedule.micro_batch=2"),
    ("schedule.layout=colocated",),
    ("schedule.micro_batch=2",),
    ("cluster.trainers=2",),
)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(WORKERS)
    yield found
    found.close()


class Strikes(Listener):
    """Kills the worker of some of the first units, a moment after it was handed to it."""

    def __init__(self, ground: Ground, rng: random.Random, among: int = 60) -> None:
        self._ground = ground
        self._rng = rng
        self._at = set(rng.sample(range(1, among), rng.randrange(1, 5)))
        self._units = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.killed = 0

    def dispatched(self, event: Dispatched) -> None:
        self._units += 1
        if self._units in self._at:
            task = asyncio.create_task(self._strike(event.run.worker, self._rng.random() * 0.05))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _strike(self, incarnation: str, after_s: float) -> None:
        await asyncio.sleep(after_s)
        for worker in (await self._ground.client.run(card, on_error="ignore")).values():
            if worker.incarnation == incarnation:
                os.kill(worker.pid, signal.SIGKILL)
                self.killed += 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_kills_change_nothing(ground: Ground, seed: int) -> None:
    rng = random.Random(seed)
    config = small(f"cluster.workers={WORKERS}", "iterations=2", *LAYOUTS[seed % len(LAYOUTS)])
    ground.settle(WORKERS)
    strikes = Strikes(ground, rng)
    outcome = ground.run(config, strikes)
    assert_as_expected(outcome, config)
    assert strikes.killed
