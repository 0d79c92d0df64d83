"""What the stages of the state machine share: fleet, ledger, open micro-batches and the outgoing commands."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Literal

from digenrl.identity import MicroBatchId, SampleId
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Fleet, Worker
from digenrl.scheduling.foresight import Foresight
from digenrl.scheduling.ledger import Ledger
from digenrl.scheduling.messages import Command, Drop, Install, Ref, Run, TrajectoryRef, Transfer
from digenrl.scheduling.policies import Layout, Stage
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import Unit

if TYPE_CHECKING:
    from digenrl.algorithms.advantages import Advantage, GroupStatistics

# Priorities of Run. On the device: an optimiser step holds everybody up, then come train units, then trajectories that
# are under way, then new ones, then new ones of the next iteration; evaluation takes what is left.
UPDATE, TRAIN, CONTINUE, ROLLOUT, AHEAD, EVALUATE = 5, 4, 3, 2, 1, 0


class RunOver(Exception):
    """The run cannot go on. The message is a sentence for the person."""


@dataclass
class Step:
    """The optimiser step in progress.

    Attributes:
        phase: contributions are collected and merged; the lead takes the step; the result is being committed.
        awaited: workers whose accumulator is on its way to the lead.
        merged: workers whose accumulator is in the lead's.
        standby: trainer to which the result is being copied (None: to the driver).
    """

    phase: Literal["collect", "update", "commit"] = "collect"
    awaited: set[str] = field(default_factory=set)
    merged: set[str] = field(default_factory=set)
    standby: str | None = None

    def seals(self, worker: str | None) -> bool:
        """Whether the worker must add nothing to its accumulator."""
        return worker in self.awaited or worker in self.merged

    @property
    def sealed(self) -> int:
        """How many workers that is."""
        return len(self.awaited) + len(self.merged)

    @property
    def merging(self) -> bool:
        """Whether the lead has begun to take in other accumulators."""
        return bool(self.awaited or self.merged)


class State:
    """Shared by the stages.

    Attributes:
        shape: sizes of the run.
        layout: roles and order.
        max_attempts: failures of one unit, copy or installation that end the run.
        max_losses: workers that may be lost while they run one and the same unit.
        patience_s: how long moving something may go on failing.
        now: the driver's clock at the present event.
        postponed: what failed to move and is not tried again before the next Tick or change of the fleet.
        fleet: workers and their lanes.
        ledger: what lives where.
        installing: adapters on their way, by worker and theta.
        batches: open micro-batches.
        version: the newest there is; the iteration of the same number is in progress. The stale groups of the next
            iteration are open too, but are only generated and scored.
        stage: of that iteration.
        theta: the committed adapter; the optimiser step in progress makes theta + 1.
        step: the optimiser step in progress.
        lead: the trainer that takes the optimiser steps.
        trainers: workers that train, in join order.
        able: those, and the workers that assist in training.
        disturbed: contributions were taken back, so micro-batches have to be tended again.
        awake: workers whose device lane may be able to take a unit; the others were asked and had nothing to do.
        foresight: predictions, if there is a cost model.
        declined: workers that left to others what they could have begun.
        resting: trainers that could help and wait for something to train instead, or did when they were last idle.
        stuck: no device does anything, so whoever is asked must not leave anything to others: predictions were wrong.
        reassigned: how often roles were assigned.
    """

    def __init__(
        self,
        shape: RunShape,
        layout: Layout,
        *,
        queue_depth: int,
        max_attempts: int,
        max_losses: int,
        patience_s: float,
    ) -> None:
        self.shape = shape
        self.layout = layout
        self.max_attempts = max_attempts
        self.max_losses = max_losses
        self.patience_s = patience_s
        self.now = 0.0
        self.postponed: set[str] = set()
        self.version = shape.start_iteration
        self.stage: Stage = "generate"
        self.theta = self.version_theta
        self.step = Step()
        self.lead: str | None = None
        self.trainers: list[Worker] = []
        self.able: list[Worker] = []
        self.fleet = Fleet(queue_depth)
        self.ledger = Ledger(self.version_theta)
        self.ledger.driver |= self.version_thetas
        self.installing: dict[tuple[str, int], Install] = {}
        self.batches: dict[MicroBatchId, Batch] = {}
        self.disturbed = False
        self.awake: set[str] = set()
        self.foresight: Foresight | None = None
        self.declined: set[str] = set()
        self.resting: set[str] = set()
        self.stuck = False
        self.reassigned = 0
        self._failures: Counter[str] = Counter()
        self._failing_since: dict[str, float] = {}
        self._losses: Counter[Unit] = Counter()
        self._out: list[Command] = []

    @property
    def version_theta(self) -> int:
        """The adapter of the current version."""
        return self.shape.theta_of_version(self.version)

    @property
    def version_thetas(self) -> set[int]:
        """Adapters that samples which are open, or will be until the next version, are generated with."""
        return {self.shape.theta_of_version(version) for version in self.shape.versions_in_use(self.version)}

    def urgency(self, batch: Batch) -> int:
        """Priority of beginning its rollout, and of scoring it."""
        if batch.id.phase == "eval":
            return EVALUATE
        return ROLLOUT if batch.id.iteration <= self.version else AHEAD

    # --- commands ---

    def emit(self, command: Command) -> None:
        """Issue a command."""
        self._out.append(command)

    def take_commands(self) -> list[Command]:
        """Commands issued since the last call."""
        commands, self._out = self._out, []
        return commands

    def run(
        self,
        unit: Unit,
        worker: Worker,
        theta: int,
        priority: int,
        advantages: dict[SampleId, Advantage] | None = None,
        old_theta: int | None = None,
        depends_on: tuple[Unit, ...] = (),
        rewards: dict[SampleId, float] | None = None,
        baseline: float = 0.0,
        closings: dict[int, GroupStatistics | None] | None = None,
    ) -> None:
        """Give a unit to a worker, which has room for it."""
        self.fleet.give(unit, worker)
        if self.foresight is not None and unit.lane == "device":
            self.foresight.given(unit, worker, self.now)
        streamed = (rewards or {}, baseline, closings or {})
        self.emit(Run(unit, worker.name, theta, priority, advantages or {}, old_theta, depends_on, *streamed))

    def take(self, unit: Unit, worker: Worker) -> bool:
        """A unit ended. Returns whether it was outstanding on that worker."""
        expected = self.fleet.take(unit, worker)
        if self.foresight is not None and unit.lane == "device":
            self.foresight.ended(worker, self.now)
        return expected

    def without(self, theta: int, worker: Worker) -> list[Worker]:
        """Workers other than this one that cannot soon work with an adapter: they neither hold nor are sent it.

        Who gets it some milliseconds later than others must count: else the first one, maybe a slow one, takes what
        the others would have ended before. Mostly all hold it, and then nobody is looked at.
        """
        workers, holders, sent = self.fleet.workers, self.ledger.adapters(theta), self.installing
        if len(holders) == len(workers):
            return []
        lacking = (w for name, w in workers.items() if name not in holders and (name, theta) not in sent)
        return [w for w in lacking if w is not worker]

    def drop(self, ref: Ref, worker: str) -> None:
        """Tell a worker to forget something, if it is still there."""
        if self.fleet.alive(worker):
            self.emit(Drop(ref, worker))

    def copy(self, batch: Batch, target: str) -> None:
        """Bring a trajectory to a worker, unless it is there or on its way."""
        holders = self.ledger.holders(batch.id)
        if target in holders or target in batch.copying or copying(batch, target) in self.postponed:
            return
        # A worker that is leaving is the second choice.
        source = min(holders, key=lambda name: self.fleet.workers[name].draining)
        batch.copying[target] = source
        self.emit(Transfer(TrajectoryRef(batch.id), source, target))

    def release(self, batch: Batch) -> None:
        """Close a micro-batch: nobody needs its trajectory."""
        del self.batches[batch.id]
        assert batch.roller is None or batch.complete, f"{batch.id.label} is closed while it is being generated"
        for worker in self.ledger.release(batch.id):
            self.drop(TrajectoryRef(batch.id), worker)

    # --- roles and waking ---

    def leave(self, name: str) -> Worker | None:
        """A worker is gone. Returns it, or None if it is not known (any more)."""
        if self.foresight is not None:
            self.foresight.left(name)
        return self.fleet.leave(name)

    def assign_roles(self) -> list[str]:
        """Ask the layout again, because the fleet has changed. Returns whose roles are others than before."""
        workers = self.fleet.workers
        changed = self.fleet.assign(self.layout.roles(workers.values()))
        self.trainers = [worker for worker in workers.values() if "train" in worker.roles]
        self.able = [worker for worker in workers.values() if worker.trains]
        self.reassigned += 1
        self.awake.update(changed)
        if self.foresight is not None:
            for name in changed:
                self.foresight.assigned(workers[name])
        return changed

    def wake(self, worker: str) -> None:
        """There may be something to do for the device of this worker."""
        self.awake.add(worker)

    def wake_all(self) -> None:
        """There may be something to do for everybody."""
        self.awake.update(self.fleet.workers)

    def wake_declined(self) -> None:
        """Time passed: workers that left units to others are asked again."""
        self.stuck = not any(worker.device for worker in self.fleet.workers.values())
        self.awake.update(self.fleet.workers if self.stuck else self.declined)
        self.declined.clear()

    def wake_idle_trainers(self, units: int) -> None:
        """There may be so many units to train for workers that do nothing, whatever their kind."""
        for idle in self.fleet.idle_trainers.values():
            self.awake.update(islice(idle, units))

    # --- failures ---

    def failed(self, what: str, worker: str, reason: str) -> int:
        """Count a failure.

        Returns:
            How often `what` has failed.

        Raises:
            RunOver: too often.
        """
        self._failures[what] += 1
        times = self._failures[what]
        if times >= self.max_attempts:
            raise RunOver(f"{what} failed {times} times, the last time on {worker}: {reason}")
        return times

    def postpone(self, what: str, worker: str, reason: str) -> None:
        """Count a failure to move something, and let it rest until the next Tick or change of the fleet.

        The most likely reason is that a worker died whose loss is not known yet; trying again at once would only fail
        again. So the run ends only if it also has gone on failing for `patience_s`.

        Raises:
            RunOver: too often and for too long.
        """
        self._failures[what] += 1
        since = self._failing_since.setdefault(what, self.now)
        if self._failures[what] >= self.max_attempts and self.now - since >= self.patience_s:
            raise RunOver(
                f"{what} failed {self._failures[what]} times in {self.now - since:.0f} s, "
                f"the last time on {worker}: {reason}"
            )
        self.postponed.add(what)

    def succeeded(self, what: str) -> None:
        """Forget earlier failures to move something."""
        if self._failing_since.pop(what, None) is not None:
            del self._failures[what]

    def lost_with(self, worker: Worker) -> None:
        """Count a lost worker against the units it was running: one that kills its workers must not kill them all.

        Raises:
            RunOver: one unit has been running on too many lost workers.
        """
        for lane in (worker.device, worker.cpu):
            unit = next(iter(lane), None)
            if unit is None or worker.draining:
                continue
            self._losses[unit] += 1
            if self._losses[unit] >= self.max_losses:
                raise RunOver(
                    f"{unit.label} was running on {self._losses[unit]} workers when they were lost, "
                    f"the last of them {worker.name}"
                )


def copying(batch: Batch, target: str) -> str:
    """What copying a trajectory is called when it fails."""
    return f"copying {batch.id.label} to {target}"
