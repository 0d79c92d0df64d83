"""Emulated devices: real Dask workers whose units sleep for modelled times.

    async with emulated_cluster(kinds) as cluster:        two processes host one Dask worker per device
        Engine(client=cluster.client, setup=RunSetup(..., replica=Emulation(costs)), ...)

Scheduler, engine, courier and fleet are those of a training run. Only the replica is another: it computes nothing and
holds no tensors, but keeps books of what a replica would hold, and refuses what one could not do.

A unit takes `CostModel.seconds`, after `CostModel.between_s` if the device changes its role. What moves between devices
takes `CostModel.move_s`, spent where it is sent from; what comes from the driver or goes there takes none. Two units of
a lane are further apart by whatever engine and Dask need: that is not modelled, it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.process import BaseProcess
from typing import Any

import dask
from distributed import Client, Scheduler, Worker
from distributed.utils import silence_logging_cmgr

from digenrl.algorithms.streaming import Closings
from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.contributions import UnitMetrics
from digenrl.identity import SampleId, seed_of
from digenrl.rewards.base import Scored
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.simworker import SimWorker
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from workers import forkserver, process
from workers.cluster import LANES
from workers.forgetting import Forgetting
from workers.forkserver import ENVIRONMENT
from workers.held import HeldRef, Tensors, TrainerStateRef
from workers.presence import incarnation_of
from workers.receipts import Assignment, Drops, Receipt, RunSetup

#: Processes that host the devices of a cluster.
PROCESSES = 2

#: How long the devices may take to appear, and their processes to end when told to.
APPEAR_S, END_S = 60.0, 10.0

#: Devices become ready one by one, in the order of the fleet: roles are given in join order.
TURN_S = 0.02


def scaled(costs: CostModel, factor: float) -> CostModel:
    """The same model with all times multiplied by `factor`, and without an orchestration gap: the real one counts."""
    data = costs.to_json()
    for known in data["kinds"].values():
        for name, seconds in known.items():
            if name == "train_s":
                known[name] = {batch: factor * s for batch, s in seconds.items()}
            elif seconds is not None:
                known[name] = 0.0 if name == "gap_s" else factor * seconds
    return CostModel.from_json(costs.shape, data)


def config_for(shape: RunShape, std_scope: StdScope = "group") -> RunConfig:
    """A configuration with the sizes of `shape`, for what engine and workers read of it."""
    sizes = {
        "iterations": shape.iterations,
        "algorithm.prompts_per_iteration": shape.groups,
        "algorithm.samples_per_prompt": shape.group_size,
        "algorithm.updates_per_iteration": shape.updates,
        "algorithm.num_steps": shape.num_steps,
        "algorithm.std_scope": std_scope,
        "schedule.micro_batch": shape.micro_batch,
        "optimizer.warmup_iterations": 0,
        "evaluation.every": 0,
        "tracking.uri": "none",
    }
    return load_config("tiny-smoke", [f"{name}={value}" for name, value in sizes.items()])


# --- what a device does ---


@dataclass(frozen=True)
class Emulation:
    """Makes the replicas of a run: `RunSetup.replica`.

    Attributes:
        costs: seconds of every unit and copy, and the shape of the run.
    """

    costs: CostModel

    def __call__(self, setup: RunSetup, incarnation: str) -> EmulatedReplica:
        """The replica of one device. Returns when it is the device's turn to be ready."""
        device = _DEVICES[incarnation]
        time.sleep(device.number * TURN_S)
        return EmulatedReplica(setup, incarnation, device.kind, self.costs)


class EmulatedReplica:
    """The state of one run on one emulated device.

    Args:
        setup: the run.
        incarnation: of the device.
        kind: of the device, to which `costs` refers.
        costs: of units and copies.
    """

    def __init__(self, setup: RunSetup, incarnation: str, kind: str, costs: CostModel) -> None:
        self.setup = setup
        self.kind = kind
        self._costs = costs
        self._shape = costs.shape
        self._books = SimWorker(incarnation, kind)
        # The device's lanes and the event loop all read and write the books.
        self._lock = threading.Lock()
        self._previous: Unit | None = None
        self._forgetting = Forgetting()

    # --- units ---

    def run(self, assignment: Assignment) -> Receipt:
        """Let a unit's time pass.

        Raises:
            SimulationError: a replica could not run it here and now.
        """
        self.drop(assignment.drops)
        run = assignment.run
        if run.unit.lane == "device":
            previous, self._previous = self._previous, run.unit
            time.sleep(self._costs.between_s(previous, run.unit, self.kind))
        started_at, began = time.time(), time.perf_counter()
        with self._lock:
            self._books.begin(run, self._shape)
        time.sleep(self._costs.seconds(run.unit, self.kind, streamed=bool(run.rewards)))
        receipt = self._receipt(run)
        with self._lock:
            if not self._forgetting.voids(assignment):
                self._books.complete(run, receipt.outcome, self._shape)
        return replace(receipt, started_at=started_at, seconds=time.perf_counter() - began)

    def _receipt(self, run: m.Run) -> Receipt:
        match run.unit:
            case RolloutUnit():
                return Receipt(m.RolloutDone(), 0.0, 0.0, fingerprint=run.unit.label)
            case ScoreUnit(micro_batch):
                scores = {sample: Scored(score_of(sample)) for sample in self._shape.samples(micro_batch)}
                return Receipt(m.ScoresDone(scores), 0.0, 0.0)
            case TrainUnit(micro_batch, steps):
                pairs = len(run.advantages or run.rewards) * len(steps)
                training = UnitMetrics(pairs=pairs, stale=pairs * self._shape.staleness(micro_batch))
                return Receipt(m.Trained((run.unit,), streamed=bool(run.rewards)), 0.0, 0.0, training)
            case UpdateUnit(theta):
                return Receipt(m.Updated(theta), 0.0, 0.0, grad_norm=0.0, fingerprint=_hash(theta))

    # --- what travels ---

    def initialise(self) -> str:
        """Make theta 0; returns what stands for its hash."""
        with self._lock:
            self._keep_state(0)
        return _hash(0)

    def holds(self, ref: HeldRef) -> bool:
        """Whether a replica would hold it."""
        with self._lock:
            match ref:
                case m.TrajectoryRef(micro_batch):
                    return micro_batch in self._books.trajectories
                case m.AccumulatorRef(theta):
                    return theta in self._books.accumulators
                case m.AdapterRef(theta):
                    return theta in self._books.adapters
                case TrainerStateRef(theta):
                    return theta in self._books.optimizers

    def load(self, ref: HeldRef) -> tuple[Any, Tensors]:
        """What stands for it on the wire: an accumulator is its entry in the books, everything else is empty."""
        if not isinstance(ref, m.AccumulatorRef):
            return None, {}
        with self._lock:
            held = dict(self._books.accumulators[ref.theta])
            waiting = self._books.waiting & held.keys()
        return SimWorker(self._books.name, self.kind, accumulators={ref.theta: held}, waiting=waiting), {}

    def store(self, ref: HeldRef, meta: Any, tensors: Tensors, expected_hash: str) -> None:
        """Enter what arrived into the books."""
        with self._lock:
            match ref:
                case m.TrajectoryRef(micro_batch):
                    self._books.trajectories.add(micro_batch)
                case m.AccumulatorRef():
                    raise TypeError("accumulators are merged, not stored")
                case m.AdapterRef(theta):
                    self._books.adapters.add(theta)
                case TrainerStateRef(theta):
                    self._keep_state(theta)

    def merge(
        self, theta: int, state: SimWorker, tensors: Tensors, expected: frozenset[TrainUnit], closings: Closings
    ) -> None:
        """Add another device's accumulator to this one's.

        Raises:
            ValueError: it does not hold exactly `expected`.
        """
        if state.accumulators[theta].keys() != expected:
            raise ValueError(f"the accumulator of {state.name} for theta {theta} is not what was announced")
        with self._lock:
            self._books.merge(theta, state, closings, self._shape)

    def travel_s(self, ref: HeldRef) -> float:
        """Seconds it takes to bring something from here to another device."""
        match ref:
            case m.TrajectoryRef():
                return self._costs.move_s(m.Transfer(ref, "", ""))
            case m.AdapterRef(theta) | m.AccumulatorRef(theta) | TrainerStateRef(theta):
                return self._costs.move_s(m.Install(theta, "", ""))

    def drop(self, drops: Drops) -> None:
        """Strike from the books, once, what is to be forgotten."""
        with self._lock:
            for ref in self._forgetting.new(drops):
                self._books.drop(ref)

    def _keep_state(self, theta: int) -> None:
        self._books.adapters.add(theta)
        self._books.optimizers.add(theta)


def score_of(sample: SampleId) -> float:
    """Reward of a sample, uniform in [0, 1): a function of its identity, so that a redone unit scores the same."""
    return seed_of("emulated reward", *asdict(sample).values()) % 2**20 / 2**20


def _hash(theta: int) -> str:
    return f"emulated theta {theta}"


# --- where devices live ---


class Device(Worker):
    """A Dask worker that stands for one device."""

    def __init__(self, scheduler: str, *, number: int, kind: str) -> None:
        """Of a process that may host others.

        Args:
            scheduler: Dask address.
            number: its place in the fleet.
            kind: its type.
        """
        name = f"{number} ({kind})"
        super().__init__(scheduler, name=name, nthreads=LANES, host="127.0.0.1", memory_limit=0, dashboard=False)
        self.number = number
        self.kind = kind
        self.incarnation = incarnation_of(self)
        self.handlers["digenrl_fetch"] = self.fetch
        _DEVICES[self.incarnation] = self

    async def fetch(self, epoch: str, ref: HeldRef) -> dict[str, Any]:
        """Answer another worker's fetch when what it asks for would have arrived."""
        replica = process.find(self.incarnation, epoch)
        if isinstance(replica, EmulatedReplica):
            await asyncio.sleep(replica.travel_s(ref))
        return await process.fetch_handler(self.incarnation)(epoch, ref)


#: Devices of this process by incarnation.
_DEVICES: dict[str, Device] = {}


@dataclass
class EmulatedCluster:
    """A Dask scheduler in this process, and devices in others.

    Attributes:
        client: asynchronous client.
        hosts: processes that host the devices.
    """

    client: Client
    hosts: list[BaseProcess]

    async def add(self, kinds: Sequence[str], processes: int = PROCESSES) -> None:
        """Start devices of these kinds, dealt out to new processes; returns when all have appeared.

        Raises:
            TimeoutError: they have not.
        """
        there = len(await self.client.nthreads())
        numbered = list(enumerate(kinds, start=there))
        forkserver.start(ENVIRONMENT)
        context = multiprocessing.get_context(forkserver.METHOD)
        for i in range(processes):
            arguments = (self.client.scheduler.address, tuple(numbered[i::processes]))
            host = context.Process(target=_host, args=arguments, name=f"devices {there}+{i}", daemon=True)
            host.start()
            self.hosts.append(host)
        await self.client.wait_for_workers(there + len(kinds), timeout=APPEAR_S)


@contextlib.asynccontextmanager
async def emulated_cluster(kinds: Sequence[str], processes: int = PROCESSES) -> AsyncIterator[EmulatedCluster]:
    """A cluster of emulated devices, numbered in the order of `kinds`; everything is stopped at the end.

    Args:
        kinds: type of each device.
        processes: to host them.

    Raises:
        TimeoutError: the devices have not appeared.
    """
    # Hosts of many threads may be late with a heartbeat on a busy machine; their sockets tell when they die.
    settings = {"distributed.admin.tick.limit": "30s", "distributed.scheduler.worker-ttl": None}
    with dask.config.set(settings), silence_logging_cmgr(logging.ERROR):
        hosts: list[BaseProcess] = []
        try:
            async with (
                Scheduler(host="127.0.0.1", port=0, dashboard=False, dashboard_address="127.0.0.1:0") as scheduler,
                Client(scheduler.address, asynchronous=True) as client,
            ):
                cluster = EmulatedCluster(client, hosts)
                await cluster.add(kinds, processes)
                yield cluster
        finally:
            # Last: a scheduler that ends first tells its workers, one that loses them complains.
            await asyncio.gather(*(asyncio.to_thread(_end, host) for host in hosts))


def counted(kinds: Sequence[str]) -> str:
    """A fleet for people: `8 x rate-1.0, 8 x rate-0.6`."""
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(kinds).items())


def _end(host: BaseProcess) -> None:
    host.terminate()
    host.join(END_S)
    if host.is_alive():
        host.kill()
        host.join()


def _host(scheduler: str, devices: tuple[tuple[int, str], ...]) -> None:
    """The process that hosts some devices: until it is told to end, or its parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # Every worker would sample the threads of all workers of the process, 100 times a second.
    settings = {"distributed.admin.tick.limit": "30s", "distributed.worker.profile.enabled": False}
    with dask.config.set(settings), silence_logging_cmgr(logging.ERROR):
        asyncio.run(_serve(scheduler, devices))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


async def _serve(scheduler: str, devices: tuple[tuple[int, str], ...]) -> None:
    async with contextlib.AsyncExitStack() as stack:
        for number, kind in devices:
            await stack.enter_async_context(Device(scheduler, number=number, kind=kind))
        await asyncio.Event().wait()
