"""Requests that arrive close together are scored together: a model takes sixteen pictures hardly slower than one.

Batcher      requests in, scores out; one batch at a time, in a thread of its own
Full         so much waits that no more is taken
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from digenrl.rewards.base import PromptRecord, Reward, Score

#: Pictures (F, H, W, 3) uint8 and prompt.
Sample = tuple[NDArray[np.uint8], PromptRecord]


class Full(RuntimeError):
    """So much waits that no more is taken."""


@dataclass(frozen=True)
class Limits:
    """When a batch is complete, and how many samples may wait.

    Attributes:
        samples: of a batch. A single request may have more.
        wait_s: how long the first request of a batch waits for others.
        waiting: samples that may wait in all.
    """

    samples: int = 32
    wait_s: float = 0.005
    waiting: int = 1024


@dataclass(frozen=True)
class _Request:
    samples: Sequence[Sample]
    answer: asyncio.Future[list[Score]]


class Batcher:
    """Scores requests in batches.

    Args:
        reward: that scores; one thread at a time calls it.
        limits: of batches and of the queue.
    """

    def __init__(self, reward: Reward, limits: Limits) -> None:
        self._reward = reward
        self._limits = limits
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._waiting = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reward")

    async def load(self) -> None:
        """Load the reward, in the thread that will score. Raises RewardError."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._reward.load)

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """Scores of one request's samples, in their order.

        Raises:
            Full: too many samples wait.
            Exception: whatever the reward raises for this request alone.
        """
        if self._waiting and self._waiting + len(samples) > self._limits.waiting:
            raise Full(f"{self._waiting} samples wait already")
        self._waiting += len(samples)
        try:
            request = _Request(samples, asyncio.get_running_loop().create_future())
            self._queue.put_nowait(request)
            return await request.answer
        finally:
            self._waiting -= len(samples)

    async def run(self) -> None:
        """Score batch after batch, until cancelled."""
        try:
            while True:
                await self._settle(await self._next_batch())
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def _next_batch(self) -> list[_Request]:
        """Requests that nobody has given up: the first that comes, and what follows soon."""
        batch = [await self._queue.get()]
        deadline = asyncio.get_running_loop().time() + self._limits.wait_s
        while sum(len(request.samples) for request in batch) < self._limits.samples:
            try:
                async with asyncio.timeout_at(deadline):
                    batch.append(await self._queue.get())
            except TimeoutError:
                break
        return [request for request in batch if not request.answer.done()]

    async def _settle(self, batch: Sequence[_Request]) -> None:
        """Answer a batch; if it cannot be scored as a whole, each of its requests by itself."""
        try:
            found = await self._together([sample for request in batch for sample in request.samples])
        except Exception as error:
            if len(batch) > 1:
                for request in batch:
                    await self._settle([request])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        for request in batch:
            own, found = found[: len(request.samples)], found[len(request.samples) :]
            if not request.answer.done():
                request.answer.set_result(own)

    async def _together(self, samples: Sequence[Sample]) -> list[Score]:
        return await asyncio.get_running_loop().run_in_executor(self._pool, score_samples, self._reward, samples)


def score_samples(reward: Reward, samples: Sequence[Sample]) -> list[Score]:
    """Scores of samples of any sizes, in their order: those of one size in one call.

    Raises:
        ValueError: the reward did not return as many scores.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, (pictures, _) in enumerate(samples):
        rows_of.setdefault(pictures.shape, []).append(row)
    scores: dict[int, Score] = {}
    for rows in rows_of.values():
        found = reward(np.stack([samples[row][0] for row in rows]), [samples[row][1] for row in rows])
        if len(found) != len(rows):
            raise ValueError(f"reward {reward.name} returned {len(found)} scores for {len(rows)} samples")
        scores |= dict(zip(rows, found, strict=True))
    return [scores[row] for row in range(len(samples))]
