"""Runs a Scheduler on a virtual clock against workers that keep books of what they hold.

    result = Simulation(scheduler, costs=..., behaviour=..., incidents=[(0.0, WorkerJoined(...)), ...]).run()

The workers (simworker.py) are strict: a command that needs something the worker does not hold, or that would count a
gradient twice, raises SimulationError. So a simulated schedule is one that real workers could have executed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from digenrl.identity import SampleId
from digenrl.rewards.base import Score, Scored
from digenrl.scheduling import messages as m
from digenrl.scheduling.ledger import Pair
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.simworker import Accumulator, Lane, SimulationError, SimWorker
from digenrl.scheduling.timeline import Span, busy_s, spans
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit


@dataclass(frozen=True)
class Costs:
    """Modelled seconds.

    Attributes:
        unit_s: (unit, kind of worker) -> seconds on its lane.
        move_s: seconds of an Install, a Transfer, a Commit, or one source of a Reduce.
        between_s: (unit before it on the lane or None, unit, kind of worker) -> seconds the lane stands still before
            the unit: orchestration gap and role switch. They are not part of its reported seconds.
        streamed: how many times as long a train unit takes before its group is complete.
        tick_s: seconds between Ticks while nothing else happens.
    """

    unit_s: Callable[[Unit, str], float]
    move_s: Callable[[m.Command], float] = lambda command: 0.0
    between_s: Callable[[Unit | None, Unit, str], float] = lambda previous, unit, kind: 0.0
    streamed: float = 1.0
    tick_s: float = 1.0


@dataclass(frozen=True)
class Behaviour:
    """What units yield.

    Attributes:
        score: result of a sample.
        left_out: pairs of a train unit that the worker leaves out, with the reason.
        skips: whether the step that makes a theta is skipped.
        fails: (unit, worker, attempt from 0) -> reason why it raises, or None.
        move_fails: (command, attempt from 0) -> reason why it does not arrive, or None.
        outlives_source: whether a trajectory that is under way arrives though its source is lost.
        answers_cancelled: whether a cancelled unit that was running is reported all the same when it ends.
    """

    score: Callable[[SampleId], Score] = lambda sample: Scored(float(sample.generation))
    left_out: Callable[[TrainUnit, Iterable[SampleId]], dict[Pair, str]] = lambda unit, samples: {}
    skips: Callable[[int], bool] = lambda theta: False
    fails: Callable[[Unit, str, int], str | None] = lambda unit, worker, attempt: None
    move_fails: Callable[[m.Command, int], str | None] = lambda command, attempt: None
    answers_cancelled: bool = False
    outlives_source: bool = False


@dataclass
class Result:
    """What happened.

    Attributes:
        makespan_s: virtual time of the last command.
        events: what the scheduler was told, with the time.
        commands: what it answered, with the time.
        updates: the gradients in the committed step that made each theta.
        finished: it ended with Finished.
        failure: the reason, if it ended with FailRun.
        waiting_for: what it waited for, if it ended with neither.
    """

    makespan_s: float = 0.0
    events: list[tuple[float, m.Event]] = field(default_factory=list)
    commands: list[tuple[float, m.Command]] = field(default_factory=list)
    updates: dict[int, Accumulator] = field(default_factory=dict)
    finished: bool = False
    failure: str | None = None
    waiting_for: str | None = None

    @property
    def spans(self) -> list[Span]:
        """Who ran what when."""
        return spans(self.events)

    @property
    def busy_s(self) -> dict[tuple[str, str], float]:
        """Seconds each (worker, lane) was running units."""
        return {(worker, lane): seconds for (worker, lane), seconds in busy_s(self.spans).items()}


class Simulation:
    """One run on a virtual clock."""

    #: Ticks without any other event after which the run is given up as waiting.
    MAX_IDLE_TICKS = 100

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        costs: Costs,
        incidents: Iterable[tuple[float, m.Event]],
        behaviour: Behaviour | None = None,
    ) -> None:
        """Nothing happens until `run`.

        Args:
            scheduler: fresh.
            costs: durations.
            incidents: joins, drains and losses with their times. News of a worker that is not there is left out.
            behaviour: what units yield.
        """
        self.scheduler = scheduler
        self.workers: dict[str, SimWorker] = {}
        self.driver: set[int] = self._in_use(scheduler.progress().version)
        self.result = Result()
        self._costs = costs
        self._behaviour = behaviour or Behaviour()
        self._now = 0.0
        self._order = 0
        self._due: list[tuple[float, int, Callable[[], m.Event | None]]] = []
        self._attempts: dict[object, int] = {}
        for at, event in incidents:
            self._at(at, lambda event=event: self._happen(event))  # type: ignore[misc]

    def run(self) -> Result:
        """Run to Finished, to FailRun, or until nothing happens any more."""
        idle = 0
        while not (self.result.finished or self.result.failure):
            if self._due:
                self._now, _, cause = heapq.heappop(self._due)
                event = cause()
                idle = 0
            elif idle < self.MAX_IDLE_TICKS:
                self._now += self._costs.tick_s
                event = m.Tick()
                idle += 1
            else:
                self.result.waiting_for = self.scheduler.waiting_for()
                break
            if event is not None:
                self._tell(event)
        self.result.makespan_s = self._now
        return self.result

    def _tell(self, event: m.Event) -> None:
        self.result.events.append((self._now, event))
        for command in self.scheduler.handle(event, self._now):
            self.result.commands.append((self._now, command))
            self._perform(command)

    def _at(self, when: float, cause: Callable[[], m.Event | None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (when, self._order, cause))

    # --- incidents ---

    def _happen(self, event: m.Event) -> m.Event | None:
        match event:
            case m.WorkerJoined(name, kind, _):
                self.workers[name] = SimWorker(name, kind)
            case m.WorkerLost(name) if self.workers.pop(name, None) is None:
                return None
            case m.WorkerDraining(name) if name not in self.workers:
                return None
        return event

    # --- commands ---

    def _perform(self, command: m.Command) -> None:
        match command:
            case m.Run():
                worker = self._live(command.worker)
                lane = worker.lane(command.unit)
                lane.enqueue(command)
                self._start(worker, lane)
            case m.Cancel(unit, name):
                self._live(name).lane(unit).withdraw(unit)
            case m.Install() | m.Transfer() | m.Commit():
                self._depart(command)
            case m.Reduce(theta, _, sources, _):
                # The lead takes in one after the other: each may be as large as the model.
                for position, source in enumerate(sources, start=1):
                    self._live(source)
                    ref = m.AccumulatorRef(theta, source)
                    arrival = self._now + position * self._costs.move_s(command)
                    self._at(arrival, lambda r=ref: self._merge(command, r))  # type: ignore[misc]
            case m.Drop(ref, name):
                self._live(name).drop(ref)
            case m.Publish():
                oldest = min(self._in_use(command.version))
                self.driver = {theta for theta in self.driver if theta >= oldest}
            case m.Finished():
                self.result.finished = True
            case m.FailRun(reason):
                self.result.failure = reason
            case m.CloseIteration() | m.EvaluationDone():
                pass

    def _in_use(self, version: int) -> set[int]:
        shape = self.scheduler.shape
        return {shape.theta_of_version(v) for v in shape.versions_in_use(version)}

    def _live(self, name: str) -> SimWorker:
        if name not in self.workers:
            raise SimulationError(f"a command names {name}, which is not there")
        return self.workers[name]

    # --- moving ---

    def _depart(self, command: m.Install | m.Transfer | m.Commit) -> None:
        """Assert that what is to be moved is there; when it should arrive, it may not be any more."""
        if not self._holds(command):
            raise SimulationError(f"the source does not hold what is to be moved: {command}")
        self._at(self._now + self._costs.move_s(command), lambda: self._arrive(command))

    def _holds(self, command: m.Install | m.Transfer | m.Commit) -> bool:
        match command:
            case m.Install(theta, _, None):
                return theta in self.driver
            case m.Install(theta, _, source, with_optimizer) if source in self.workers:
                worker = self.workers[source]
                return theta in (worker.optimizers if with_optimizer else worker.adapters)
            case m.Transfer(m.TrajectoryRef(micro_batch), source) if source in self.workers:
                return micro_batch in self.workers[source].trajectories
            case m.Commit(theta, lead) if lead in self.workers:
                return theta in self.workers[lead].optimizers
        return False

    def _arrive(self, command: m.Install | m.Transfer | m.Commit) -> m.Event | None:
        reason = self._behaviour.move_fails(command, self._count(command))
        outlives = isinstance(command, m.Transfer) and self._behaviour.outlives_source
        if not self._holds(command) and not outlives:
            reason = "the source holds it no longer"
        match command:
            case m.Commit():
                return self._commit(command) if self._holds(command) else None
            case m.Install(theta, name, _, with_optimizer) if name in self.workers:
                if reason is not None:
                    return m.TransferFailed(m.AdapterRef(theta), name, reason)
                self.workers[name].adapters.add(theta)
                if with_optimizer:
                    self.workers[name].optimizers.add(theta)
                return m.VersionInstalled(name, theta)
            case m.Transfer(m.TrajectoryRef(micro_batch) as ref, _, name) if name in self.workers:
                if reason is not None:
                    return m.TransferFailed(ref, name, reason)
                self.workers[name].trajectories.add(micro_batch)
                return m.Transferred(ref, name)
        # Nothing is reported about a worker that is gone.
        return None

    def _commit(self, command: m.Commit) -> m.Event | None:
        if command.standby is None:
            self.driver.add(command.theta)
        elif command.standby in self.workers:
            self.workers[command.standby].adapters.add(command.theta)
            self.workers[command.standby].optimizers.add(command.theta)
        else:
            return None
        self.result.updates[command.theta] = self.workers[command.lead].updates[command.theta]
        return m.Committed(command.theta)

    def _merge(self, command: m.Reduce, ref: m.AccumulatorRef) -> m.Event | None:
        lead, source = self.workers.get(command.lead), self.workers.get(ref.worker)
        if lead is None:
            return None
        reason = self._behaviour.move_fails(command, self._count((command.theta, ref, command.lead)))
        if source is None:
            reason = f"{ref.worker} is gone"
        if source is None or reason is not None:
            return m.TransferFailed(ref, command.lead, str(reason))
        held = source.accumulators.get(ref.theta, {})
        if held.keys() != command.contributions[ref.worker]:
            raise SimulationError(f"{ref.worker} does not hold exactly what is to be merged for theta {ref.theta}")
        lead.merge(ref.theta, source, command.closings, self.scheduler.shape)
        return m.Transferred(ref, command.lead)

    # --- units ---

    def _start(self, worker: SimWorker, lane: Lane) -> None:
        previous = lane.previous
        run = lane.next()
        if run is not None:
            worker.begin(run, self.scheduler.shape)
            pause = self._costs.between_s(previous, run.unit, worker.kind)
            seconds = self._costs.unit_s(run.unit, worker.kind) * (self._costs.streamed if run.rewards else 1.0)
            self._at(self._now + pause + seconds, lambda: self._end(worker, lane, run, seconds))

    def _end(self, worker: SimWorker, lane: Lane, run: m.Run, seconds: float) -> m.Event | None:
        if self.workers.get(worker.name) is not worker:
            return None
        reason = self._behaviour.fails(run.unit, worker.name, self._count((run.unit, worker.name)))
        event: m.Event
        if reason is not None:
            event = m.UnitFailed(run.unit, worker.name, reason)
        else:
            event = m.UnitFinished(run.unit, worker.name, seconds, self._outcome(worker, run))
        answered = lane.end(run.unit, failed=reason is not None)
        self._start(worker, lane)
        return event if answered or self._behaviour.answers_cancelled else None

    def _outcome(self, worker: SimWorker, run: m.Run) -> m.Outcome:
        outcome: m.Outcome
        match run.unit:
            case RolloutUnit():
                outcome = m.RolloutDone()
            case ScoreUnit(micro_batch):
                samples = self.scheduler.shape.samples(micro_batch)
                outcome = m.ScoresDone({sample: self._behaviour.score(sample) for sample in samples})
            case TrainUnit():
                left_out = self._behaviour.left_out(run.unit, run.advantages or run.rewards)
                outcome = m.Trained((run.unit,), left_out, streamed=bool(run.rewards))
            case UpdateUnit(theta):
                outcome = m.Updated(theta, self._behaviour.skips(theta))
        worker.complete(run, outcome, self.scheduler.shape)
        return outcome

    def _count(self, key: object) -> int:
        attempt = self._attempts.get(key, 0)
        self._attempts[key] = attempt + 1
        return attempt
