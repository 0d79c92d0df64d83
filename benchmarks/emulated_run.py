"""One schedule of benchmarks/emulated_fleet.py: on emulated devices, and its twin on the virtual clock.

    run(plan)            real Dask workers that sleep, driven by the engine -> Measured
    twin(plan, costs)    the same plan, simulated with what orchestration was measured to take -> Figures
    twins_s(plan, costs) how far apart such twins are if their pauses vary

Both leave a log of the scheduler's events and commands, from which the same functions take the same figures.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import psutil

from benchmarks.emulated_plan import Plan
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.simulate import Costs, Simulation
from digenrl.scheduling.units import Lane, TrainUnit, Unit
from workers.emulated import Emulation, config_for, emulated_cluster
from workers.engine import Engine
from workers.listener import Listener
from workers.receipts import RunSetup

#: Twins with luck, and by what share of its mean a pause or a copy differs in them at most.
TWINS, SPREAD = 7, 0.25

#: Commands that move something, and how the table of orchestration calls them.
MOVES: dict[type, str] = {m.Install: "install", m.Transfer: "transfer", m.Reduce: "merge", m.Commit: "commit"}


@dataclass
class Log:
    """What the scheduler was told and what it answered, in order, with the time in seconds."""

    entries: list[tuple[float, m.Event, Sequence[m.Command]]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[tuple[float, m.Event]], commands: Iterable[tuple[float, m.Command]]) -> Log:
        """From the two lists of a simulation."""
        found = [(at, event, ()) for at, event in events] + [(at, m.Tick(), (command,)) for at, command in commands]
        return cls(sorted(found, key=lambda entry: entry[0]))

    @property
    def closed(self) -> list[float]:
        """When the iterations ended."""
        return [at for at, _, commands in self.entries for c in commands if isinstance(c, m.CloseIteration)]


class Recorder:
    """Passes everything on to a scheduler and keeps it: the engine's `scheduler`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.log = Log()

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """See Scheduler."""
        commands = self._scheduler.handle(event, now)
        self.log.entries.append((now, event, tuple(commands)))
        return commands

    def waiting_for(self) -> str:
        """See Scheduler."""
        return self._scheduler.waiting_for()


@dataclass(frozen=True)
class Figures:
    """Of the iterations between the first and the last one.

    Attributes:
        iteration_s: mean seconds of an iteration, as slept.
        utilisation: share of the devices' time that units ran.
        stale_share: share of the trained (micro-batch, timestep batch) pairs whose samples were one version old.
    """

    iteration_s: float
    utilisation: float
    stale_share: float


@dataclass(frozen=True)
class Orchestration:
    """What engine and Dask took, beyond what is modelled, in seconds.

    Attributes:
        gap_s: mean pause of a device before a unit that waited there.
        trip_s: by lane, the mean time that a unit sent to an idle lane took beyond its own.
        move_s: mean of each kind of command that moves something: "install", "transfer", "merge" (one source of a
            Reduce), "commit". A kind that did not occur is missing.
        flow_cpu_s: CPU time of the process with engine, client and Dask scheduler, per unit.
        host_cpu_s: CPU time of the processes that host the devices, per unit, their start included.
    """

    gap_s: float
    trip_s: dict[Lane, float]
    move_s: dict[str, float]
    flow_cpu_s: float
    host_cpu_s: float


@dataclass(frozen=True)
class Measured:
    """One emulated run.

    Attributes:
        figures: of it.
        orchestration: of it.
        seconds: it took, cluster included.
    """

    figures: Figures
    orchestration: Orchestration
    seconds: float


def figures(log: Log, shape: RunShape, devices: int) -> Figures:
    """Figures of a log.

    Raises:
        ValueError: fewer than three iterations: the first and the last do not count.
    """
    closed = log.closed
    if len(closed) < 3:
        raise ValueError(f"a run of {len(closed)} iterations has none between the first and the last")
    begin, end = closed[0], closed[-2]
    busy, trained, stale = 0.0, 0, 0
    for at, event, _ in log.entries:
        if isinstance(event, m.UnitFinished) and event.unit.lane == "device":
            busy += max(0.0, min(at, end) - max(at - event.seconds, begin))
            if isinstance(event.unit, TrainUnit) and 0 < event.unit.micro_batch.iteration < len(closed) - 1:
                trained += 1
                stale += shape.staleness(event.unit.micro_batch)
    return Figures((end - begin) / (len(closed) - 2), busy / ((end - begin) * devices), stale / trained)


def pauses_s(log: Log, costs: CostModel) -> tuple[float, dict[Lane, float]]:
    """Mean seconds that orchestration holds up a unit: one that waited on its device, and by lane one that did not.

    The first is the pause between two units, by the worker's clock. The second is the way of a unit to an idle lane and
    the way back of its receipt, without a role switch, which is slept. The first iteration does not count.
    """
    kind_of: dict[str, str] = {}
    previous: dict[tuple[str, Lane], Unit] = {}
    there: dict[tuple[str, Lane], set[Unit]] = {}
    sent_at: dict[tuple[str, Unit], float] = {}
    begin = log.closed[0]
    gaps: list[float] = []
    trips: dict[Lane, list[float]] = {"device": [], "cpu": []}
    for at, event, commands in log.entries:
        match event:
            case m.WorkerJoined(worker, kind, _):
                kind_of[worker] = kind
            case m.UnitFinished(unit, worker, seconds, _, paused_s):
                lane = (worker, unit.lane)
                there.get(lane, set()).discard(unit)
                sent = sent_at.pop((worker, unit), None)
                before, previous[lane] = previous.get(lane), unit
                switch_s = costs.between_s(before, unit, kind_of[worker])
                if paused_s is not None and not switch_s and at > begin:
                    gaps.append(paused_s)
                elif paused_s is None and sent is not None and sent > begin:
                    trips[unit.lane].append(at - sent - seconds - switch_s)
        for command in commands:
            if isinstance(command, m.Run):
                waiting = there.setdefault((command.worker, command.unit.lane), set())
                if not waiting:
                    sent_at[command.worker, command.unit] = at
                waiting.add(command.unit)
            elif isinstance(command, m.Cancel):
                there.get((command.worker, command.unit.lane), set()).discard(command.unit)
    return _mean(gaps), {lane: _mean(found) for lane, found in trips.items()}


def moves_s(log: Log, costs: CostModel) -> dict[str, float]:
    """Mean seconds of each kind of move beyond the modelled ones. Sources of a Reduce arrive one after the other."""
    begun: dict[m.Event, tuple[float, m.Command]] = {}
    merging: dict[int, tuple[float, m.Command]] = {}
    found: dict[str, list[float]] = {}

    def ended(start: tuple[float, m.Command] | None, at: float) -> None:
        if start is not None:
            found.setdefault(MOVES[type(start[1])], []).append(at - start[0] - costs.move_s(start[1]))

    for at, event, commands in log.entries:
        match event:
            case m.VersionInstalled(worker, theta):
                ended(begun.pop(m.VersionInstalled(worker, theta), None), at)
            case m.Transferred(m.AccumulatorRef(theta), _) if theta in merging:
                ended(merging[theta], at)
                merging[theta] = (at, merging[theta][1])
            case m.Transferred(ref, target):
                ended(begun.pop(m.Transferred(ref, target), None), at)
            case m.Committed():
                ended(begun.pop(event, None), at)
        for command in commands:
            match command:
                case m.Install(theta, worker):
                    begun[m.VersionInstalled(worker, theta)] = (at, command)
                case m.Transfer(ref, _, target):
                    begun[m.Transferred(ref, target)] = (at, command)
                case m.Commit(theta):
                    begun[m.Committed(theta)] = (at, command)
                case m.Reduce(theta):
                    merging[theta] = (at, command)
    return {name: _mean(seconds) for name, seconds in found.items()}


def _mean(seconds: Sequence[float]) -> float:
    return max(0.0, fmean(seconds)) if seconds else 0.0


class _Marks(Listener):
    """CPU time of this process at the end of every iteration, and units so far."""

    def __init__(self) -> None:
        self.units = 0
        self.marks: list[tuple[float, int]] = []

    def dispatched(self, event: object) -> None:
        """See Listener."""
        self.units += 1

    def iteration_closed(self, report: object) -> None:
        """See Listener."""
        self.marks.append((_cpu_s(psutil.Process()), self.units))


async def run(plan: Plan) -> Measured:
    """Run on emulated devices.

    Raises:
        RunFailed: the run could not go on.
    """
    began, marks, recorder = time.monotonic(), _Marks(), Recorder(plan.scheduler())
    async with emulated_cluster(plan.kinds) as cluster:
        hosts = [psutil.Process(host.pid) for host in cluster.hosts]
        engine = Engine(
            client=cluster.client,
            setup=RunSetup(uuid.uuid4().hex, config_for(plan.shape, plan.std_scope), 0, replica=Emulation(plan.costs)),
            scheduler=recorder,
            start=None,
            prompts_of=lambda micro_batch: (),
            listener=marks,
        )
        await engine.run()
        hosts_s = sum(map(_cpu_s, hosts))
    (first_s, first), (last_s, last) = marks.marks[0], marks.marks[-1]
    waited_s, trip_s = pauses_s(recorder.log, plan.costs)
    orchestration = Orchestration(
        gap_s=waited_s,
        trip_s=trip_s,
        move_s=moves_s(recorder.log, plan.costs),
        flow_cpu_s=(last_s - first_s) / (last - first),
        host_cpu_s=hosts_s / marks.units,
    )
    return Measured(figures(recorder.log, plan.shape, len(plan.kinds)), orchestration, seconds=time.monotonic() - began)


def twin(plan: Plan, orchestration: Orchestration, luck: random.Random | None = None) -> Figures:
    """The same plan on the virtual clock. With `luck`, pauses and copies differ from their means by up to `SPREAD`.

    Raises:
        RuntimeError: it does not come to its end.
    """
    joins = [m.WorkerJoined(str(i), kind, _EVERYTHING) for i, kind in enumerate(plan.kinds)]
    for join in joins:
        plan.costs.observe(join)
    result = _Twin(plan, orchestration, joins, luck).run()
    if not result.finished:
        raise RuntimeError(f"{plan.case.label}, {plan.case.policy.name}: {result.failure or result.waiting_for}")
    return figures(Log.of(result.events, result.commands), plan.shape, len(joins))


def twins_s(plan: Plan, orchestration: Orchestration) -> tuple[float, float]:
    """Seconds of an iteration, the shortest and the longest of `TWINS` twins with luck.

    Who is asked first depends on milliseconds, and another first answer is another schedule.
    """
    found = [twin(plan, orchestration, random.Random(seed)).iteration_s for seed in range(TWINS)]
    return min(found), max(found)


_EVERYTHING: frozenset[m.Capability] = frozenset({"rollout", "train", "score"})


class _Twin(Simulation):
    """A simulation in which orchestration takes the time it was measured to take."""

    def __init__(
        self, plan: Plan, orchestration: Orchestration, joins: Sequence[m.WorkerJoined], luck: random.Random | None
    ) -> None:
        self._plan = plan
        self._orchestration = orchestration
        self._luck = luck
        self._sending = False
        costs = Costs(plan.costs.seconds, self._move_s, self._between_s, plan.costs.streamed)
        super().__init__(plan.scheduler(), costs=costs, incidents=[(0.0, join) for join in joins])

    def _perform(self, command: m.Command) -> None:
        # A unit that begins while it is being sent was sent to an idle lane.
        self._sending = isinstance(command, m.Run)
        super()._perform(command)
        self._sending = False

    def _move_s(self, command: m.Command) -> float:
        mean_s = self._orchestration.move_s.get(MOVES[type(command)], 0.0)
        return self._plan.costs.move_s(command) + self._varied(mean_s)

    def _between_s(self, previous: Unit | None, unit: Unit, kind: str) -> float:
        mean_s = self._orchestration.trip_s[unit.lane] if self._sending else self._orchestration.gap_s
        return self._varied(mean_s) + self._plan.costs.between_s(previous, unit, kind)

    def _varied(self, mean_s: float) -> float:
        return mean_s if self._luck is None else mean_s * self._luck.uniform(1 - SPREAD, 1 + SPREAD)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system
