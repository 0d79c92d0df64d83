"""A simulated worker: it computes nothing, but keeps books of what it holds and refuses what it could not do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from digenrl.identity import MicroBatchId
from digenrl.scheduling.ledger import Pair
from digenrl.scheduling.messages import AccumulatorRef, AdapterRef, Ref, Run, Trained, TrajectoryRef
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit

Accumulator = dict[TrainUnit, frozenset[Pair]]
Closings = Mapping[int, object]


class SimulationError(AssertionError):
    """A command that a real worker could not carry out."""


@dataclass
class Lane:
    """Runs one unit at a time: of those that wait, the most urgent whose predecessors have ended, first come first.

    Attributes:
        waiting: units that are not begun.
        running: what runs.
        previous: the unit begun last.
        withdrawn: the running one was cancelled.
        void: the accumulator that the running one was to add to was dropped.
        failed: units that raised and were not sent again.
    """

    waiting: dict[Unit, Run] = field(default_factory=dict)
    running: Run | None = None
    previous: Unit | None = None
    withdrawn: bool = False
    void: bool = False
    failed: set[Unit] = field(default_factory=set)

    def enqueue(self, run: Run) -> None:
        """Accept a unit."""
        if run.unit in self.waiting:
            raise SimulationError(f"{run.unit.label} is queued twice on {run.worker}")
        self.failed.discard(run.unit)
        self.waiting[run.unit] = run

    def next(self) -> Run | None:
        """Begin the next unit, if the lane is free."""
        if self.running is not None or not self.waiting:
            return None
        ready = [r for r in self.waiting.values() if not r.depends_on or not any(map(self._unfinished, r.depends_on))]
        run = max(ready, key=_priority, default=None) if len(ready) > 1 else next(iter(ready), None)
        if run is not None:
            del self.waiting[run.unit]
            self.running, self.previous = run, run.unit
            self.withdrawn = self.void = False
        return run

    def end(self, unit: Unit, *, failed: bool) -> bool:
        """The running unit ended. False if it had been withdrawn: nobody is told."""
        assert self._runs(unit)
        self.running = None
        if failed:
            # What depends on it does not run; the scheduler is expected to withdraw it.
            self.failed.add(unit)
        return not self.withdrawn

    def withdraw(self, unit: Unit) -> None:
        """Take a unit back. If it runs it goes on."""
        if self._runs(unit):
            self.withdrawn = True
        elif self.waiting.pop(unit, None) is None:
            raise SimulationError(f"{unit.label} is withdrawn but not there")

    def _unfinished(self, unit: Unit) -> bool:
        return unit in self.waiting or self._runs(unit) or unit in self.failed

    def _runs(self, unit: Unit) -> bool:
        return self.running is not None and self.running.unit == unit


def _priority(run: Run) -> int:
    return run.priority


@dataclass
class SimWorker:
    """What one worker holds.

    Attributes:
        name: incarnation.
        kind: type, for durations.
        adapters: thetas.
        optimizers: thetas whose optimiser state is there too.
        partial: rollout steps done of unfinished trajectories.
        trajectories: finished ones.
        accumulators: by the theta they help to make.
        waiting: train units in them whose group was open when they ran, and is not folded here.
        updates: what entered the optimiser step that made a theta here.
    """

    name: str
    kind: str
    device: Lane = field(default_factory=Lane)
    cpu: Lane = field(default_factory=Lane)
    adapters: set[int] = field(default_factory=set)
    optimizers: set[int] = field(default_factory=set)
    partial: dict[MicroBatchId, int] = field(default_factory=dict)
    trajectories: set[MicroBatchId] = field(default_factory=set)
    accumulators: dict[int, Accumulator] = field(default_factory=dict)
    waiting: set[TrainUnit] = field(default_factory=set)
    updates: dict[int, Accumulator] = field(default_factory=dict)

    def lane(self, unit: Unit) -> Lane:
        """The lane of a unit."""
        return self.device if unit.lane == "device" else self.cpu

    def begin(self, run: Run, shape: RunShape) -> None:
        """A unit begins. What it is told of closed groups comes first, so it counts even if the unit fails."""
        self._check(run)
        if isinstance(run.unit, TrainUnit | UpdateUnit):
            self._fold(run.theta + 1, run.closings, shape)

    def _check(self, run: Run) -> None:
        """Assert that a unit that is about to begin finds what it needs."""
        match run.unit:
            case RolloutUnit(micro_batch, first, _):
                self._need(run, run.theta in self.adapters, f"adapter {run.theta}")
                done = self.partial.get(micro_batch, 0)
                self._need(run, first in (0, done), f"steps before {first} (it has {done})")
            case ScoreUnit(micro_batch):
                self._need(run, micro_batch in self.trajectories, "the trajectory")
            case TrainUnit(micro_batch, _):
                self._need(run, micro_batch in self.trajectories, "the trajectory")
                self._need(run, run.theta in self.adapters, f"adapter {run.theta}")
                self._need(run, run.old_theta in self.adapters, f"adapter {run.old_theta}")
                self._need(run, bool(run.advantages) != bool(run.rewards), "either advantages or rewards")
                self._need(run, not run.rewards or run.theta == run.old_theta, "its ratio to be 1")
            case UpdateUnit(theta):
                self._need(run, theta - 1 in self.optimizers, f"optimiser state {theta - 1}")

    def complete(self, run: Run, outcome: object, shape: RunShape) -> None:
        """Keep what a unit leaves behind."""
        match run.unit:
            case RolloutUnit(micro_batch, _, last):
                if last < (shape.num_steps if micro_batch.phase == "train" else shape.eval_num_steps):
                    self.partial[micro_batch] = last
                else:
                    self.partial.pop(micro_batch, None)
                    self.trajectories.add(micro_batch)
            case TrainUnit(_, steps):
                assert isinstance(outcome, Trained)
                pairs = (
                    frozenset((s, t) for s in run.advantages or run.rewards for t in steps) - outcome.excluded.keys()
                )
                accumulator = self.accumulators.setdefault(run.theta + 1, {})
                # A repeated unit returns its old receipt and adds nothing.
                if run.unit not in accumulator and not self.device.void:
                    accumulator[run.unit] = pairs
                    self.waiting.update([run.unit] if run.rewards else [])
            case UpdateUnit(theta):
                for unit in self.waiting & self.accumulators.get(theta, {}).keys():
                    raise SimulationError(f"{self.name} steps to theta {theta} while the group of {unit.label} is open")
                self.updates[theta] = dict(self.accumulators.get(theta, {}))
                self.adapters.add(theta)
                self.optimizers.add(theta)
            case ScoreUnit():
                pass

    def merge(self, theta: int, source: SimWorker, closings: Closings, shape: RunShape) -> None:
        """Add another worker's accumulator."""
        other = source.accumulators.get(theta, {})
        mine = self.accumulators.setdefault(theta, {})
        twice = mine.keys() & other.keys()
        if twice:
            raise SimulationError(f"{self.name} would count {next(iter(twice)).label} twice for theta {theta}")
        mine |= other
        self.waiting |= source.waiting & other.keys()
        self._fold(theta, closings, shape)

    def drop(self, ref: Ref) -> None:
        """Forget something."""
        match ref:
            case TrajectoryRef(micro_batch):
                self.trajectories.discard(micro_batch)
                self.partial.pop(micro_batch, None)
            case AccumulatorRef(theta, _):
                self.waiting -= self.accumulators.pop(theta, {}).keys()
                running = self.device.running
                if running is not None and isinstance(running.unit, TrainUnit) and running.theta + 1 == theta:
                    self.device.void = True
            case AdapterRef(theta):
                self.adapters.discard(theta)
                self.optimizers.discard(theta)

    def _fold(self, theta: int, closings: Closings, shape: RunShape) -> None:
        """Groups are closed: those without statistics are dropped, which without a KL term is nobody taking part."""
        accumulator = self.accumulators.get(theta, {})
        for unit in [unit for unit in self.waiting if unit in accumulator]:
            group = shape.group_of(unit.micro_batch)
            if group in closings:
                self.waiting.discard(unit)
                if closings[group] is None:
                    accumulator[unit] = frozenset()

    def _need(self, run: Run, held: bool, what: str) -> None:
        if not held:
            raise SimulationError(f"{run.unit.label} on {self.name} needs {what}")
