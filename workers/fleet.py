"""The workers of one run, as the engine sees them: who is there, under which address, ready or not.

Turns Dask's presence events into WorkerJoined (after the worker has built its replica) and WorkerLost.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from digenrl.scheduling.messages import Event, WorkerJoined, WorkerLost
from workers import calls
from workers.presence import TOPIC, Departures, Exits, Presence, WorkerCard, card, slots
from workers.receipts import Readiness, RunSetup

#: A worker that has not built its replica after this long counts as unable to.
PREPARE_S = 1800.0

#: How long the cluster may take to say who is there, and workers to free their replicas at the end.
ANSWER_S = 30.0
GOODBYE_S = 5.0

#: After this long without hearing itself, a fleet calls again.
ECHO_S = 0.05


class FleetError(RuntimeError):
    """No worker can take part in the run; the message says why."""


@dataclass
class _Member:
    """A worker that is or was known.

    Attributes:
        card: who it is.
        gone: set once the scheduler has given it up.
        preparing: builds its replica.
        ready: whether the engine was told of it.
        end: how it ended, in words, as far as known.
    """

    card: WorkerCard
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    preparing: asyncio.Task[None] | None = None
    ready: bool = False
    end: str = ""


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
        self._members: dict[str, _Member] = {}
        self._left: set[str] = set()
        self._failures: dict[str, list[str]] = {}  # workers by their reason, which is mostly the same
        self._hearing = asyncio.Event()
        self._closed = False

    # --- who is there ---

    def address(self, incarnation: str) -> str:
        """Dask address of a worker that is or was known."""
        return self._members[incarnation].card.address

    def name(self, incarnation: str) -> str:
        """Name for people: stable over restarts of a local cluster's workers."""
        return f"worker {self._members[incarnation].card.name}"

    def named(self, text: str) -> str:
        """The text with names in place of incarnations."""
        for incarnation in self._members:
            text = text.replace(incarnation, self.name(incarnation))
        return text

    def alive(self, incarnation: str) -> bool:
        """Whether the worker has not left yet."""
        return not self._members[incarnation].gone.is_set()

    async def departure(self, incarnation: str) -> None:
        """Return once the worker has left."""
        await self._members[incarnation].gone.wait()

    @property
    def size(self) -> int:
        """Workers that are ready or getting ready."""
        return sum(not member.gone.is_set() for member in self._members.values())

    @property
    def preparing(self) -> bool:
        """Whether a worker is building its replica."""
        return any(member.preparing is not None for member in self._members.values())

    @property
    def obituary(self) -> str:
        """Who was lost and how, in one sentence; empty if nobody was."""
        lost = [_described(member) for member in self._members.values() if member.gone.is_set()]
        return f"lost so far: {', '.join(lost)}" if lost else ""

    def check(self) -> None:
        """Raise if every worker there is failed to build its replica.

        Raises:
            FleetError: with each worker's reason.
        """
        ready = any(member.ready and not member.gone.is_set() for member in self._members.values())
        if self._failures and not ready and not self.preparing:
            raise FleetError(
                "no worker can take part in the run: "
                + "; ".join(f"{', '.join(who)}: {reason}" for reason, who in self._failures.items())
            )

    # --- life ---

    async def start(self) -> None:
        """Hear of joins and departures, then take in the workers that are already there.

        Raises:
            OSError, TimeoutError: the cluster does not answer.
        """
        async with asyncio.timeout(ANSWER_S):
            await self._listen()
            for plugin in (Departures(), Exits(), Presence()):
                await self._client.register_plugin(plugin)
            found = await self._client.run(card, on_error="ignore")
        for worker in found.values():
            if worker.address not in self._left:
                self._join(worker)

    async def _listen(self) -> None:
        """Return once whoever joins or leaves is heard of: a subscription takes effect some time after the call."""
        self._client.subscribe_topic(TOPIC, self._on_presence)
        while not self._hearing.is_set():
            await self._client.log_event(TOPIC, {"op": "echo"})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hearing.wait(), ECHO_S)

    async def close(self) -> None:
        """Stop listening and free the replicas."""
        self._closed = True
        with contextlib.suppress(Exception):
            self._client.unsubscribe_topic(TOPIC)
        preparing = [member.preparing for member in self._members.values() if member.preparing is not None]
        for task in preparing:
            task.cancel()
        await asyncio.gather(*preparing, return_exceptions=True)
        addresses = [m.card.address for m in self._members.values() if m.ready and not m.gone.is_set()]
        if addresses and self._client.status == "running":
            # The run is over: a worker that dies now loses nothing.
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(
                    self._client.run(calls.retire, self._setup.epoch, workers=addresses, on_error="ignore"), GOODBYE_S
                )

    def _on_presence(self, event: tuple[float, dict[str, Any]]) -> None:
        _, message = event
        if self._closed:
            return
        match message["op"]:
            case "echo":
                self._hearing.set()
            case "joined":
                self._join(WorkerCard(**message["card"]))
            case "left":
                self._leave(message["address"], self._silence() if message["silent"] else "is gone")
            case "exited":
                self._exited(message["address"], message["exit_code"])

    def _join(self, found: WorkerCard) -> None:
        if found.incarnation not in self._members:
            member = self._members[found.incarnation] = _Member(found)
            member.preparing = asyncio.create_task(self._prepare(member))

    async def _prepare(self, member: _Member) -> None:
        found = member.card
        try:
            async with asyncio.timeout(PREPARE_S):
                ready: Readiness = await self._client.submit(
                    calls.prepare,
                    self._setup,
                    key=f"prepare {found.incarnation} {self._setup.epoch}",
                    resources={slots(found.incarnation)["device"]: 1},
                    pure=False,
                    retries=0,
                )
        except Exception as error:
            reason = str(error) or f"its model was not loaded within {PREPARE_S:.0f} s"
            same = self._failures.setdefault(reason, [])
            same.append(f"worker {found.name} on {found.host}")
            self._say(f"worker {found.name} cannot take part: {reason if len(same) == 1 else f'as {same[0]}'}")
            return
        finally:
            member.preparing = None
        member.ready = True
        self._say(f"worker {found.name} joined ({ready.kind}, ready in {ready.load_s:.1f} s)")
        self._emit(WorkerJoined(found.incarnation, ready.kind, ready.capabilities))

    def _leave(self, address: str, how: str) -> None:
        self._left.add(address)
        member = next((m for m in self._at(address) if not m.gone.is_set()), None)
        if member is None:
            return
        member.gone.set()
        member.end = how
        if member.preparing is not None:
            # It may not even have begun, and then would not say that it ended.
            member.preparing.cancel()
            member.preparing = None
        self._say(f"worker {member.card.name} (pid {member.card.pid}) {how}")
        if member.ready:
            self._emit(WorkerLost(member.card.incarnation))

    def _exited(self, address: str, exit_code: int) -> None:
        for member in self._at(address)[-1:]:
            silent = member.end == self._silence()
            how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
            member.end = f"{member.end} and {how}" if silent else how

    def _at(self, address: str) -> list[_Member]:
        """Workers that have or had this address, in join order."""
        return [member for member in self._members.values() if member.card.address == address]

    def _silence(self) -> str:
        cluster = self._setup.config.cluster
        limit = (
            f"cluster.worker_ttl_s={cluster.worker_ttl_s:g}" if cluster.address == "local" else "its scheduler's limit"
        )
        return f"was silent for longer than {limit}"


def _described(member: _Member) -> str:
    return f"worker {member.card.name} (pid {member.card.pid}, {member.end})"
