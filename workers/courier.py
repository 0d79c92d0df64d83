"""Moves data between workers, and between them and the driver.

Carries out Install, Transfer, Reduce and Commit as coroutines on the worker that receives, beside its slots, and
answers each with an event. Keeps the adapters that were committed to the driver, the content hash of every adapter,
and what each worker has still to be told to forget.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from distributed import Client

from digenrl.algorithms.optimizer import average_of
from digenrl.policy import adapter_hash
from digenrl.scheduling import messages as m
from workers import calls
from workers.fleet import Fleet
from workers.held import HeldRef, Parcel, TrainerStateRef, join_state, split_state
from workers.listener import TrainerState
from workers.receipts import Drops, RunSetup

#: A copy to a second place that fails although everybody is there is tried again this often, after a pause.
COMMIT_ATTEMPTS = 5
COMMIT_PAUSE_S = 1.0


class RunFailed(RuntimeError):
    """The run cannot go on; the message is a sentence for the person."""


class Courier:
    """Data movement of one run.

    Args:
        client: asynchronous client of the cluster.
        fleet: workers by incarnation.
        setup: the run.
        start: what the driver holds at first, with the adapter of the version before where that is still used;
            None: nothing, each worker makes theta 0 itself.
        answer: receives (worker it is about, event).
    """

    def __init__(
        self,
        client: Client,
        fleet: Fleet,
        setup: RunSetup,
        *,
        start: TrainerState | None,
        answer: Callable[[str, m.Event], None],
    ) -> None:
        self._client = client
        self._fleet = fleet
        self._setup = setup
        self._answer = answer
        self._states = _begun(start) if start is not None else {}
        self._hashes = {theta: state.adapter_hash for theta, state in self._states.items()}
        self._drops: dict[str, list[tuple[int, m.Ref]]] = {}
        self._dropped = 0

    # --- forgetting ---

    def drop(self, command: m.Drop) -> None:
        """Let the next message to the worker carry the drop."""
        self._dropped += 1
        self._drops.setdefault(command.worker, []).append((self._dropped, command.ref))

    @property
    def drops_issued(self) -> int:
        """Number of the last drop, of any worker."""
        return self._dropped

    def pending_drops(self, worker: str) -> Drops:
        """What a message to this worker must carry."""
        return tuple(self._drops.get(worker, ()))

    def acknowledge(self, worker: str, drops: Drops) -> None:
        """The worker answered a message that carried `drops`."""
        if drops:
            last = drops[-1][0]
            self._drops[worker] = [(number, ref) for number, ref in self._drops[worker] if number > last]

    # --- adapters ---

    def made(self, theta: int, adapter_hash: str) -> None:
        """An optimiser step made the adapter `theta`."""
        self._hashes[theta] = adapter_hash

    def publish(self, command: m.Publish) -> TrainerState:
        """The committed state that becomes a version; older ones are kept as long as somebody may need them."""
        config = self._setup.config
        updates, stale = config.algorithm.updates_per_iteration, config.stale_groups > 0
        state, before = self._states[command.theta], self._states.get(command.theta - updates)
        # The version before may still be asked for, by a worker that joins while its evaluation goes on, and where
        # that one had stale groups, the one before it.
        oldest = command.theta - (2 if stale else 1) * updates
        self._states = {theta: s for theta, s in self._states.items() if theta >= oldest}
        if stale and before is not None:
            return replace(state, previous=before.generator)
        return state

    # --- commands ---

    async def carry(self, command: m.Install | m.Transfer | m.Reduce | m.Commit) -> None:
        """Carry out a command and answer it.

        Raises:
            RunFailed: what arrived is not what was sent.
        """
        try:
            match command:
                case m.Install():
                    await self._install(command)
                case m.Transfer():
                    await self._transfer(command)
                case m.Reduce():
                    for source in command.sources:
                        await self._merge(command, source)
                case m.Commit():
                    await self._commit(command)
        except (ValueError, LookupError) as error:
            raise RunFailed(str(error)) from error

    async def _install(self, command: m.Install) -> None:
        theta, worker = command.theta, command.worker
        ref = TrainerStateRef(theta) if command.with_optimizer else m.AdapterRef(theta)
        try:
            if command.source is not None:
                await self._pull(worker, ref, command.source, self._hashes[theta])
            elif theta in self._states:
                state = self._states[theta]
                parts = (None, state.optimizer) if command.with_optimizer else (average_of(state.optimizer), None)
                tensors = join_state(state.adapter, state.behaviour, *parts)
                await self._on(worker, calls.install, ref, Parcel.of(None, tensors), state.adapter_hash)
            elif theta == 0:
                await self._initialise(worker)
            else:
                raise RunFailed(f"adapter theta {theta} is asked of the driver, which does not hold it")
        except OSError as error:
            self._answer(worker, m.TransferFailed(m.AdapterRef(theta), worker, str(error)))
        else:
            self._answer(worker, m.VersionInstalled(worker, theta))

    async def _initialise(self, worker: str) -> None:
        made = await self._on(worker, calls.initialise)
        if self._hashes.setdefault(0, made) != made:
            raise RunFailed(
                f"{self._fleet.name(worker)} made another initial adapter than the others from the same seed: "
                "its torch draws other random numbers"
            )

    async def _transfer(self, command: m.Transfer) -> None:
        target = command.target
        try:
            await self._pull(target, command.ref, command.source, "")
        except OSError as error:
            self._answer(target, m.TransferFailed(command.ref, target, str(error)))
        else:
            self._answer(target, m.Transferred(command.ref, target))

    async def _merge(self, command: m.Reduce, source: str) -> None:
        ref, lead = m.AccumulatorRef(command.theta, source), command.lead
        try:
            address = self._living_address(source)
            await self._on(lead, calls.merge, ref, address, command.contributions[source], command.closings)
        except OSError as error:
            self._answer(lead, m.TransferFailed(ref, lead, str(error)))
        else:
            self._answer(lead, m.Transferred(ref, lead))

    async def _commit(self, command: m.Commit) -> None:
        """Nobody answers for a worker that died: its loss makes the scheduler commit again or redo the update."""
        parties = [command.lead] if command.standby is None else [command.lead, command.standby]
        for attempt in range(1, COMMIT_ATTEMPTS + 1):
            try:
                await self._copy_state(command)
            except OSError as error:
                if not all(self._fleet.alive(worker) for worker in parties):
                    return
                if attempt == COMMIT_ATTEMPTS:
                    raise RunFailed(
                        f"theta {command.theta} could not be copied from {self._fleet.name(command.lead)} to a second "
                        f"place in {attempt} attempts: {error}"
                    ) from error
                await asyncio.sleep(COMMIT_PAUSE_S)
            else:
                self._answer(command.lead, m.Committed(command.theta))
                return

    async def _copy_state(self, command: m.Commit) -> None:
        theta, updates = command.theta, self._setup.config.algorithm.updates_per_iteration
        if command.standby is not None:
            await self._pull(command.standby, TrainerStateRef(theta), command.lead, self._hashes[theta])
        if command.standby is None or theta % updates == 0:
            # What will be published is kept here too: checkpoints are written from it.
            await self._fetch(theta, command.lead)

    async def _fetch(self, theta: int, worker: str) -> None:
        parcel: Parcel = await self._on(worker, calls.export, TrainerStateRef(theta))
        found = split_state(parcel.tensors())
        self._states[theta] = TrainerState(
            theta, found.adapter, found.optimizer, self._hashes[theta], behaviour=found.behaviour or None
        )

    # --- calls ---

    async def _pull(self, target: str, ref: HeldRef, source: str, expected_hash: str) -> None:
        await self._on(target, calls.pull, ref, self._living_address(source), expected_hash)

    async def _on(self, worker: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """Run a coroutine of workers.calls on one worker.

        Raises:
            OSError: the worker is gone, or its peer.
        """
        address, drops = self._living_address(worker), self.pending_drops(worker)
        asked = asyncio.ensure_future(
            self._client.run(calls.control, self._setup.epoch, drops, call, *arguments, workers=[address])
        )
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())
        left = asyncio.ensure_future(self._fleet.departure(worker))
        try:
            # Dask would go on trying to reach a dead worker for half a minute.
            await asyncio.wait({asked, left}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise OSError(f"{self._fleet.name(worker)} is gone")
            results = asked.result()
        finally:
            asked.cancel()
            left.cancel()
        self.acknowledge(worker, drops)
        return results[address]

    def _living_address(self, worker: str) -> str:
        # Asking first saves the connection's time-out.
        if not self._fleet.alive(worker):
            raise OSError(f"{self._fleet.name(worker)} is gone")
        return self._fleet.address(worker)


def _begun(start: TrainerState) -> dict[int, TrainerState]:
    """What the driver holds of a run that is resumed, by theta.

    Nobody trains from the adapter before, or evaluates it: of that only what generates samples is known.
    """
    states = {start.theta: start}
    if (before := start.previous) is not None:
        states[before.theta] = TrainerState(before.theta, before.weights, {}, adapter_hash(before.weights))
    return states
