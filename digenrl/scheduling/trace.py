"""The record a timeline is drawn from: which unit ran where and when, under which adapter, on data of which version.

    TracedUnit     one unit on one lane
    traced         from a log of events and commands: the simulator's, or an engine's that keeps one
    from_records   from what a run's meter keeps per unit

Times are seconds since the first record, so that simulated and real runs look the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from digenrl.identity import MicroBatchId
from digenrl.scheduling.messages import Command, Event, Run, UnitFinished
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.timeline import Span
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit

#: What a worker does while a unit runs, for colours and sums.
Activity = Literal["rollout", "evaluate", "score", "train", "update"]

ACTIVITIES: tuple[Activity, ...] = ("rollout", "evaluate", "score", "train", "update")


@dataclass(frozen=True)
class TracedUnit(Span):
    """A span with what explains it.

    Attributes:
        theta: the adapter a rollout used or a train unit differentiated; an update unit: the one it started from.
        version: the version that generated the samples at hand; an update unit: that of its iteration.
    """

    theta: int
    version: int

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s

    @property
    def activity(self) -> Activity:
        """What the worker did."""
        return activity_of(self.unit)


class Record(Protocol):
    """What a meter keeps of one unit; `started_at` may be on any clock that all workers share."""

    @property
    def unit(self) -> Unit:
        """What ran."""

    @property
    def worker(self) -> str:
        """Where."""

    @property
    def theta(self) -> int:
        """Under which adapter."""

    @property
    def started_at(self) -> float:
        """When, in seconds."""

    @property
    def seconds(self) -> float:
        """For how long."""


def activity_of(unit: Unit) -> Activity:
    """What a worker does when it runs this unit."""
    match unit:
        case RolloutUnit(micro_batch):
            return "evaluate" if micro_batch.phase == "eval" else "rollout"
        case ScoreUnit():
            return "score"
        case TrainUnit():
            return "train"
        case UpdateUnit():
            return "update"


def traced(
    shape: RunShape, events: Iterable[tuple[float, Event]], commands: Sequence[tuple[float, Command]]
) -> list[TracedUnit]:
    """Units that finished, in order of the log, on the clock of the log.

    Args:
        shape: the run's.
        events: (time, event), in order.
        commands: (time, command), in order.
    """
    theta: dict[tuple[Unit, str], int] = {}
    found, issued = [], 0
    for now, event in events:
        while issued < len(commands) and commands[issued][0] <= now:
            command = commands[issued][1]
            issued += 1
            if isinstance(command, Run):
                theta[command.unit, command.worker] = command.theta
        if isinstance(event, UnitFinished):
            found.append((event.unit, event.worker, now - event.seconds, now, theta[event.unit, event.worker]))
    return _assemble(shape, found)


def from_records(shape: RunShape, records: Iterable[Record]) -> list[TracedUnit]:
    """Units of a real run, on a clock that is 0 when the first one began."""
    kept = list(records)
    origin = min((record.started_at for record in kept), default=0.0)
    begun = [(r.unit, r.worker, r.started_at - origin, r.theta, r.seconds) for r in kept]
    return _assemble(shape, [(unit, w, start, start + seconds, theta) for unit, w, start, theta, seconds in begun])


def _assemble(shape: RunShape, found: Sequence[tuple[Unit, str, float, float, int]]) -> list[TracedUnit]:
    # Only a rollout's adapter tells the version of its samples; score and train units take over theirs.
    versions: dict[MicroBatchId, int] = {
        unit.micro_batch: theta // shape.updates for unit, _, _, _, theta in found if isinstance(unit, RolloutUnit)
    }
    units = []
    for unit, worker, start_s, end_s, theta in found:
        if isinstance(unit, UpdateUnit):
            version = (unit.theta - 1) // shape.updates
        else:
            version = versions.get(unit.micro_batch, unit.micro_batch.iteration)
        units.append(TracedUnit(worker, unit.lane, unit, start_s, end_s, theta, version))
    return units
