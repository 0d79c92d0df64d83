"""Drops, as a worker carries them out: once each, in order, and with what they void.

Every message to a worker repeats the drops that the engine does not know to be done, so that a drop takes effect before
whatever the scheduler ordered after it, whichever message arrives first.
"""

from __future__ import annotations

from collections.abc import Iterator

from digenrl.scheduling.messages import AccumulatorRef, Ref
from digenrl.scheduling.units import TrainUnit
from workers.receipts import Assignment, Drops


class Forgetting:
    """Which drops were carried out. Not thread-safe: its owner has a lock."""

    def __init__(self) -> None:
        self._last = 0
        self._voided: dict[int, int] = {}

    def new(self, drops: Drops) -> Iterator[Ref]:
        """What is to be forgotten and was not yet."""
        for number, ref in drops:
            if number > self._last:
                self._last = number
                if isinstance(ref, AccumulatorRef):
                    self._voided[ref.theta] = number
                yield ref

    def voids(self, assignment: Assignment) -> bool:
        """Whether a train unit was to add to an accumulator that was dropped after the unit had been sent."""
        run = assignment.run
        return isinstance(run.unit, TrainUnit) and self._voided.get(run.theta + 1, 0) > assignment.sent_after
