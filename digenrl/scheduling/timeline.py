"""Who ran what when: spans of device and cpu lanes, taken from a log of events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from digenrl.scheduling.messages import Event, UnitFinished
from digenrl.scheduling.units import Lane, Unit


@dataclass(frozen=True)
class Span:
    """One unit on one lane.

    Attributes:
        worker: where it ran.
        lane: on which lane.
        unit: what ran.
        start_s: when it began, on the clock of the log.
        end_s: when its end was reported.
    """

    worker: str
    lane: Lane
    unit: Unit
    start_s: float
    end_s: float


def spans(log: Iterable[tuple[float, Event]]) -> list[Span]:
    """Spans of all units that finished, in the order of the log."""
    return [
        Span(event.worker, event.unit.lane, event.unit, now - event.seconds, now)
        for now, event in log
        if isinstance(event, UnitFinished)
    ]


def busy_s(found: Iterable[Span]) -> dict[tuple[str, Lane], float]:
    """Seconds each lane of each worker was running units."""
    total: dict[tuple[str, Lane], float] = {}
    for span in found:
        key = (span.worker, span.lane)
        total[key] = total.get(key, 0.0) + span.end_s - span.start_s
    return total
