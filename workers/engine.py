"""The wall-clock driver of the scheduler: events from Dask in, commands to Dask out.

The engine decides nothing. It turns each command of digenrl.scheduling into a call on a worker and each answer into
an event, and it alone submits to Dask. A unit is one Dask task in a slot of one incarnation; what moves data is left
to the courier.

    outcome = await Engine(...).run()
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from distributed import Client, Future

from digenrl.algorithms.optimizer import learning_rate
from digenrl.gates import LogProbGate, ReferenceGate
from digenrl.identity import MicroBatchId
from digenrl.rewards.base import PromptRecord
from digenrl.scheduling import messages as m
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from workers import calls
from workers.courier import Courier, RunFailed
from workers.fleet import Fleet
from workers.gaps import Gaps
from workers.listener import Dispatched, Evaluation, Listener, TrainerState
from workers.meter import Meter
from workers.presence import slots
from workers.receipts import Assignment, Drops, Receipt, RunSetup

logger = logging.getLogger(__name__)

#: Without news for this long while nothing is outstanding, the run has stalled.
STALL_S = 60.0

#: How long what is still under way at the end of a run may take to end by itself.
CLOSE_S = 1.0

#: How often the scheduler is told that time passes.
TICK_S = 1.0


class Machine(Protocol):
    """What the engine needs of the scheduler."""

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Commands that follow from an event."""

    def waiting_for(self) -> str:
        """One sentence: what the run waits for."""


@dataclass(frozen=True)
class Outstanding:
    """A unit that Dask holds."""

    future: Future
    outcome: asyncio.Future[Receipt]
    waiter: asyncio.Task[None]
    priority: int


class _Stop:
    """Asks the loop to end early."""


class Engine:
    """Runs one training run on one cluster."""

    def __init__(
        self,
        *,
        client: Client,
        setup: RunSetup,
        scheduler: Machine,
        start: TrainerState | None,
        prompts_of: Callable[[MicroBatchId], tuple[PromptRecord, ...]],
        listener: Listener,
    ) -> None:
        """Nothing happens until `run`.

        Args:
            client: asynchronous client of the cluster.
            setup: what replicas are built from.
            scheduler: the state machine.
            start: adapter and optimiser state the run starts from; None: theta 0, which every worker makes itself
                from the run's seed, so that the driver need not load the model.
            prompts_of: prompt records of a micro-batch, one per sample.
            listener: hears of everything worth showing or keeping.
        """
        self._client = client
        self._setup = setup
        self._scheduler = scheduler
        self._prompts_of = prompts_of
        self._listener = listener
        self._inbox: asyncio.Queue[m.Event | BaseException | _Stop] = asyncio.Queue()
        self._fleet = Fleet(client, setup, emit=self._inbox.put_nowait, say=listener.fleet_changed)
        self._outstanding: dict[tuple[Unit, str], Outstanding] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._courier = Courier(client, self._fleet, setup, start=start, answer=self._answer)
        self._done: list[Future] = []
        self._submissions = 0
        self._meter = Meter()
        self._gate, self._reference = LogProbGate(setup.config), ReferenceGate(setup.config)
        self._gaps = Gaps()
        self._moving: dict[m.Event, float] = {}
        self._finished = False
        self._address = client.scheduler.address
        self._last_news = time.monotonic()
        self.published: tuple[int, TrainerState] | None = None

    # --- the loop ---

    async def run(self) -> bool:
        """Drive the run to its end.

        Returns:
            True when all iterations are done, False when `stop` ended it early.

        Raises:
            RunFailed: the scheduler gave up, nothing moves any more, or no worker can take part.
        """
        try:
            await self._fleet.start()
            while not self._finished:
                event = await self._next()
                if isinstance(event, _Stop):
                    return False
                if isinstance(event, BaseException):
                    raise event
                if isinstance(event, m.WorkerLost):
                    self._withdraw_all(event.worker)
                for command in self._scheduler.handle(event, time.monotonic()):
                    self._perform(command)
                self._release()
            return True
        finally:
            await self._close()

    def stop(self) -> None:
        """End the run as soon as possible; the last published state stays readable in `published`."""
        self._inbox.put_nowait(_Stop())

    async def _next(self) -> m.Event | BaseException | _Stop:
        """The next event; a Tick if there is none for a while."""
        try:
            event = await asyncio.wait_for(self._inbox.get(), timeout=TICK_S)
        except TimeoutError:
            self._check_progress()
            event = m.Tick()
        else:
            self._last_news = time.monotonic()
        if self._client.status != "running":
            raise RunFailed(f"the connection to the Dask scheduler at {self._address} is lost")
        return event

    def _check_progress(self) -> None:
        """Nothing happened for a moment: is that as it should be?"""
        self._fleet.check()
        if self._outstanding or self._background or self._fleet.preparing:
            self._last_news = time.monotonic()
        elif time.monotonic() - self._last_news > STALL_S:
            reason = f"nothing happened for {STALL_S:.0f} s with {self._fleet.size} workers"
            raise self._failed(f"{reason}: {self._scheduler.waiting_for()}")

    def _failed(self, reason: str) -> RunFailed:
        """In words for people: names of workers, and who was lost on the way."""
        return RunFailed(self._fleet.named("; ".join(filter(None, (reason, self._fleet.obituary)))))

    async def _close(self) -> None:
        units = list(self._outstanding)
        for unit, worker in units:
            self._withdraw(unit, worker)
        if self._background:
            # Withdrawn units end by themselves at once; what moves data may not.
            await asyncio.wait(self._background, timeout=CLOSE_S)
        remaining = list(self._background)
        for task in remaining:
            task.cancel()
        await asyncio.gather(*remaining, return_exceptions=True)
        await self._fleet.close()

    def _spawn(self, work: Callable[..., Awaitable[Any]], *arguments: Any, **named: Any) -> asyncio.Task[None]:
        """Run in the background; an unexpected exception ends the run."""

        async def guarded() -> None:
            try:
                await work(*arguments, **named)
            except Exception as error:
                self._inbox.put_nowait(error)

        task = asyncio.create_task(guarded())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # --- commands ---

    def _perform(self, command: m.Command) -> None:
        match command:
            case m.Run():
                self._submit(command)
            case m.Cancel():
                self._withdraw(command.unit, command.worker)
            case m.Install() | m.Transfer() | m.Reduce() | m.Commit():
                self._clock(command)
                self._spawn(self._courier.carry, command)
            case m.Drop():
                self._courier.drop(command)
            case m.Publish():
                self.published = (command.version, self._courier.publish(command))
                self._listener.published(*self.published)
            case m.CloseIteration():
                names = {w: self._fleet.name(w) for w in self._meter.workers}
                self._listener.iteration_closed(self._meter.close(command, names, time.monotonic()))
            case m.EvaluationDone():
                version = command.version
                previews, inspection = self._meter.take_previews(version), self._meter.take_inspection(version)
                self._listener.evaluated(Evaluation(version, command.scores, previews, inspection))
            case m.FailRun():
                raise self._failed(command.reason)
            case m.Finished():
                self._finished = True

    def _submit(self, run: m.Run) -> None:
        unit = run.unit
        earlier = [self._outstanding.get((unit, run.worker)) for unit in run.depends_on]
        before = [outstanding for outstanding in earlier if outstanding is not None]
        self._submissions += 1
        # A unit never overtakes one it continues.
        priority = min([run.priority, *(outstanding.priority for outstanding in before)])
        assignment = self._assignment(run)
        self._meter.begin(time.monotonic())
        self._gaps.sent(unit, run.worker)
        future = self._client.submit(
            calls.execute,
            assignment,
            # The counter keeps a second attempt at a unit apart from a first one that Dask has not forgotten yet, the
            # epoch a run from the one before it on the same cluster.
            key=f"{unit.label} #{self._submissions} {self._setup.epoch[:12]}",
            resources={slots(run.worker)[unit.lane]: 1},
            # First come, first served within a priority: units of one trajectory run in the order they were sent in,
            # without a dependency between them, which would cost a round trip to Dask's scheduler each.
            priority=priority * 2**32 - self._submissions,
            fifo_timeout="0ms",
            pure=False,
            retries=0,
        )
        outcome: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        # Retrieved here so that a unit nobody observes does not warn about its exception.
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        waits = [outstanding.waiter for outstanding in before]
        waiter = self._spawn(self._wait, run, assignment.drops, future, outcome, waits)
        self._outstanding[(unit, run.worker)] = Outstanding(future, outcome, waiter, priority)
        self._listener.dispatched(Dispatched(run, self._fleet.name(run.worker), role_of(unit), outcome))

    def _assignment(self, run: m.Run) -> Assignment:
        unit, rate = run.unit, None
        prompts: tuple[PromptRecord, ...] = ()
        if isinstance(unit, UpdateUnit):
            config = self._setup.config
            iteration = (unit.theta - 1) // config.algorithm.updates_per_iteration
            rate = learning_rate(config.optimizer, config.iterations, iteration)
        else:
            prompts = self._prompts_of(unit.micro_batch)
        drops = self._courier.pending_drops(run.worker)
        return Assignment(self._setup.epoch, run, prompts, rate, drops, self._courier.drops_issued)

    async def _wait(
        self,
        run: m.Run,
        drops: Drops,
        future: Future,
        outcome: asyncio.Future[Receipt],
        before: list[asyncio.Task[None]],
    ) -> None:
        """Turn the end of a unit into an event, after those of the units in `before`.

        Receipts are fetched side by side, so that of a later unit may arrive first.
        """
        failure: Exception | None = None
        try:
            receipt = await future
        except Exception as error:
            failure = error
        if before:
            await asyncio.wait(before)
        if not self._forget(run, future):
            return
        if failure is not None:
            self._gaps.withdrawn(run.unit, run.worker)
            if not outcome.done():
                outcome.set_exception(failure)
            self._answer(run.worker, m.UnitFailed(run.unit, run.worker, f"{type(failure).__name__}: {failure}"))
            return
        self._courier.acknowledge(run.worker, drops)
        if isinstance(run.unit, UpdateUnit):
            self._courier.made(run.unit.theta, receipt.fingerprint)
        self._meter.add(run, receipt)
        if isinstance(run.unit, TrainUnit):
            self._judge(run, run.unit, receipt)
        if not outcome.done():
            outcome.set_result(receipt)
        gap_s = self._gaps.ended(run.unit, run.worker, receipt)
        self._answer(run.worker, m.UnitFinished(run.unit, run.worker, receipt.seconds, receipt.outcome, gap_s))

    def _judge(self, run: m.Run, unit: TrainUnit, receipt: Receipt) -> None:
        """See that what was trained is what was drawn."""
        for gate in (self._gate, self._reference):
            violation = gate.violation(unit, run.theta, self._fleet.name(run.worker), receipt.training)
            if violation is not None:
                self._inbox.put_nowait(self._failed(violation))
        if (caution := self._gate.caution()) is not None:
            logger.warning("%s", caution)

    def _forget(self, run: m.Run, future: Future) -> bool:
        """A unit ended. False if it was withdrawn before, and nobody wants to know."""
        outstanding = self._outstanding.get((run.unit, run.worker))
        if outstanding is None or outstanding.future is not future:
            return False
        del self._outstanding[run.unit, run.worker]
        self._done.append(future)
        return True

    def _release(self) -> None:
        # Dropping a future once the receipt is kept is what stops Dask from computing it again after a loss. After the
        # next units are sent, not before: a message to Dask holds back those that follow it for 10 ms.
        for future in self._done:
            future.release()
        self._done.clear()

    def _withdraw(self, unit: Unit, worker: str) -> None:
        outstanding = self._outstanding.pop((unit, worker), None)
        if outstanding is not None:
            self._gaps.withdrawn(unit, worker)
            outstanding.outcome.cancel()
            # This ends the waiter too. Cancelling that instead would leave pieces of Dask's own waiting behind.
            self._spawn(self._client.cancel, [outstanding.future], force=True)

    def _withdraw_all(self, worker: str) -> None:
        # Its slot is gone: Dask would hold these units for ever.
        for unit, holder in [key for key in self._outstanding if key[1] == worker]:
            self._withdraw(unit, holder)

    def _answer(self, worker: str, event: m.Event) -> None:
        """Tell the scheduler, unless the worker is lost: it has been told of that, and nothing counts after it."""
        if self._fleet.alive(worker):
            began = self._moving.pop(event, None) if isinstance(event, m.VersionInstalled | m.Transferred) else None
            self._inbox.put_nowait(event if began is None else replace(event, seconds=time.monotonic() - began))

    def _clock(self, command: m.Install | m.Transfer | m.Reduce | m.Commit) -> None:
        """Note when a copy begins whose time is a cost, under its answer."""
        match command:
            case m.Install(theta, worker):
                self._moving[m.VersionInstalled(worker, theta)] = time.monotonic()
            case m.Transfer(ref, _, target):
                self._moving[m.Transferred(ref, target)] = time.monotonic()


def role_of(unit: Unit) -> str:
    """What a worker does while it runs a unit."""
    match unit:
        case RolloutUnit():
            return "rollout" if unit.micro_batch.phase == "train" else "evaluate"
        case ScoreUnit():
            return "score"
        case TrainUnit():
            return "train"
        case UpdateUnit():
            return "update"
