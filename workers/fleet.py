"""The workers of one run, as the engine sees them: who is there, under which address, ready or not.

Turns Dask's presence events into WorkerJoined (after the worker has built its replica) and WorkerLost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from distributed import Client

from digenrl.scheduling.messages import Event, WorkerJoined, WorkerLost
from workers import calls
from workers.presence import TOPIC, Departures, Presence, WorkerCard, card, slots
from workers.receipts import Readiness, RunSetup


class FleetError(RuntimeError):
    """No worker can take part in the run; the message says why."""


class Fleet:
    """Known workers by incarnation."""

    def __init__(
        self, client: Client, setup: RunSetup, *, emit: Callable[[Event], None], say: Callable[[str], None]
    ) -> None:
        """Nothing happens until `start`.

        Args:
            client: asynchronous client of the cluster.
            setup: what replicas are built from.
            emit: receives WorkerJoined and WorkerLost.
            say: receives one sentence per change of the fleet.
        """
        self._client = client
        self._setup = setup
        self._emit = emit
        self._say = say
        self._cards: dict[str, WorkerCard] = {}
        self._ready: dict[str, Readiness] = {}
        self._by_address: dict[str, str] = {}
        self._preparing: dict[str, asyncio.Task[None]] = {}
        self._failures: list[str] = []

    def address(self, incarnation: str) -> str:
        """Dask address of a worker that is or was known."""
        return self._cards[incarnation].address

    def name(self, incarnation: str) -> str:
        """Name for people: stable over restarts of a local cluster's workers."""
        return f"worker {self._cards[incarnation].name}"

    def alive(self, incarnation: str) -> bool:
        """Whether the worker has not left yet."""
        return self._by_address.get(self._cards[incarnation].address) == incarnation

    @property
    def size(self) -> int:
        """Workers that are ready or getting ready."""
        return len(self._by_address)

    async def start(self) -> None:
        """Hear of joins and departures, then take in the workers that are already there."""
        self._client.subscribe_topic(TOPIC, self._on_presence)
        await self._client.register_plugin(Departures())
        await self._client.register_plugin(Presence())
        for found in (await self._client.run(card)).values():
            self._join(found)

    async def close(self) -> None:
        """Stop listening and free the replicas."""
        with contextlib.suppress(Exception):
            self._client.unsubscribe_topic(TOPIC)
        for task in self._preparing.values():
            task.cancel()
        addresses = [self._cards[i].address for i in self._ready if self.alive(i)]
        if addresses:
            # The run is over: a worker that dies now loses nothing.
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._client.run(calls.retire, self._setup.epoch, workers=addresses), 5)

    async def _on_presence(self, event: tuple[float, dict[str, Any]]) -> None:
        _, message = event
        address = message["address"]
        if message["op"] == "left":
            self._leave(address)
        elif address not in self._by_address:
            found = await self._client.run(card, workers=[address])
            self._join(found[address])

    def _join(self, found: WorkerCard) -> None:
        if found.incarnation in self._cards:
            return
        self._cards[found.incarnation] = found
        self._by_address[found.address] = found.incarnation
        self._preparing[found.incarnation] = asyncio.create_task(self._prepare(found))

    async def _prepare(self, found: WorkerCard) -> None:
        future = self._client.submit(
            calls.prepare,
            self._setup,
            key=f"prepare {found.incarnation} {self._setup.epoch}",
            resources={slots(found.incarnation)["device"]: 1},
            pure=False,
            retries=0,
        )
        try:
            ready = await future
        except Exception as error:
            self._failures.append(f"worker {found.name} on {found.host}: {error}")
            self._say(f"worker {found.name} cannot take part: {error}")
            return
        finally:
            self._preparing.pop(found.incarnation, None)
        if self.alive(found.incarnation):
            self._ready[found.incarnation] = ready
            self._say(f"worker {found.name} joined ({ready.kind}, ready in {ready.load_s:.1f} s)")
            self._emit(WorkerJoined(found.incarnation, ready.kind, ready.capabilities))

    def _leave(self, address: str) -> None:
        incarnation = self._by_address.pop(address, None)
        if incarnation is None:
            return
        preparing = self._preparing.pop(incarnation, None)
        if preparing is not None:
            preparing.cancel()
        self._say(f"worker {self._cards[incarnation].name} (pid {self._cards[incarnation].pid}) is gone")
        if self._ready.pop(incarnation, None) is not None:
            self._emit(WorkerLost(incarnation))

    def check(self) -> None:
        """Raise if every worker there is failed to build its replica.

        Raises:
            FleetError: with each worker's reason.
        """
        if self._failures and not self._ready and not self._preparing:
            raise FleetError("no worker can take part in the run: " + "; ".join(self._failures))
