"""What moves between workers when one of them stops answering or dies in the middle: an answer within seconds."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from digenrl.scheduling.messages import (
    AdapterRef,
    Commit,
    Drop,
    Event,
    Install,
    Publish,
    Transfer,
    TransferFailed,
    VersionInstalled,
    WorkerJoined,
)
from runs import Ground, small
from workers.courier import Courier
from workers.fleet import Fleet
from workers.receipts import RunSetup

WORKERS = 2
PROMPT_S = 5.0


@pytest.fixture
def ground() -> Iterator[Ground]:
    found = Ground(WORKERS)
    yield found
    found.close()


class Post:
    """A courier between two workers, and what it answers."""

    def __init__(self, ground: Ground) -> None:
        setup = RunSetup("epoch", small(), 0)
        self.joined: asyncio.Queue[Event] = asyncio.Queue()
        self.answers: asyncio.Queue[Event] = asyncio.Queue()
        self.fleet = Fleet(ground.client, setup, emit=self.joined.put_nowait, say=lambda sentence: None)
        self.courier = Courier(
            ground.client, self.fleet, setup, start=None, answer=lambda worker, event: self.answers.put_nowait(event)
        )
        self.workers: list[str] = []

    async def carry(self, command: Install | Transfer | Commit) -> Event:
        await self.courier.carry(command)
        return self.answers.get_nowait()


@asynccontextmanager
async def post(ground: Ground) -> AsyncIterator[Post]:
    """Both workers hold theta 0."""
    found = Post(ground)
    await found.fleet.start()
    for _ in range(WORKERS):
        event = await found.joined.get()
        assert isinstance(event, WorkerJoined)
        found.workers.append(event.worker)
        assert await found.carry(Install(0, event.worker, None)) == VersionInstalled(event.worker, 0)
    yield found
    await found.fleet.close()


def pid_of(ground: Ground, found: Post, worker: str) -> int:
    return found.fleet._members[worker].card.pid


async def _dies_while_it_receives(ground: Ground) -> None:
    async with post(ground) as found:
        _, target = found.workers
        os.kill(pid_of(ground, found, target), signal.SIGSTOP)
        carried = asyncio.create_task(found.carry(Install(0, target, None)))
        await asyncio.sleep(0.3)
        assert not carried.done()
        os.kill(pid_of(ground, found, target), signal.SIGKILL)
        began = time.monotonic()
        assert isinstance(await carried, TransferFailed)
        assert time.monotonic() - began < PROMPT_S


def test_the_receiver_dies(ground: Ground) -> None:
    ground.do(_dies_while_it_receives, ground)


async def _dies_while_it_sends(ground: Ground) -> None:
    async with post(ground) as found:
        source, target = found.workers
        os.kill(pid_of(ground, found, source), signal.SIGSTOP)
        carried = asyncio.create_task(found.carry(Install(0, target, source)))
        await asyncio.sleep(0.3)
        assert not carried.done()
        os.kill(pid_of(ground, found, source), signal.SIGKILL)
        began = time.monotonic()
        answer = await carried
        assert isinstance(answer, TransferFailed)
        assert answer.target == target
        assert time.monotonic() - began < PROMPT_S
        # From now on it is known to be gone, and nobody tries to reach it.
        began = time.monotonic()
        assert "is gone" in (await found.carry(Install(0, target, source))).reason
        assert time.monotonic() - began < 0.1


def test_the_sender_dies(ground: Ground) -> None:
    ground.do(_dies_while_it_sends, ground)


async def _does_not_hold(ground: Ground) -> None:
    async with post(ground) as found:
        source, target = found.workers
        found.courier.drop(Drop(AdapterRef(0), source))
        # The drop travels with the next message to the source.
        assert isinstance(await found.carry(Commit(0, target, None)), object)
        assert await found.carry(Install(0, source, target)) == VersionInstalled(source, 0)
        found.courier.drop(Drop(AdapterRef(0), target))
        assert isinstance(await found.carry(Install(0, target, None)), VersionInstalled)
        state = found.courier.publish(Publish(0, 0, target))
        assert state.theta == 0
        answer = await found.carry(Transfer(AdapterRef(7), source, target))
        assert isinstance(answer, TransferFailed)
        assert "does not hold" in answer.reason


def test_committed_states_and_what_is_not_there(ground: Ground) -> None:
    ground.do(_does_not_hold, ground)
