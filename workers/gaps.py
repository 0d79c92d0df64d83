"""How long a worker's device stands still between two units: the orchestration gap.

Measured only where nothing but orchestration can be the reason: the second unit had been sent before the first one was
known to have ended, so it waited on the worker. Both ends of a gap are read from the worker's clock.
"""

from __future__ import annotations

from collections import defaultdict

from digenrl.scheduling.units import Unit
from workers.receipts import Receipt


class Gaps:
    """Follows the device lane of every worker."""

    def __init__(self) -> None:
        self._queues: dict[str, dict[Unit, None]] = defaultdict(dict)
        self._behind: dict[tuple[Unit, str], Unit | None] = {}
        self._last: dict[str, tuple[Unit, float]] = {}

    def sent(self, unit: Unit, worker: str) -> None:
        """A unit was sent to a worker."""
        if unit.lane != "device":
            return
        queue = self._queues[worker]
        self._behind[unit, worker] = next(reversed(queue), None)
        queue[unit] = None

    def withdrawn(self, unit: Unit, worker: str) -> None:
        """A unit failed, or nobody waits for it any more."""
        self._queues[worker].pop(unit, None)
        self._behind.pop((unit, worker), None)

    def ended(self, unit: Unit, worker: str, receipt: Receipt) -> float | None:
        """A unit left its receipt.

        Returns:
            Seconds the lane stood still before it; None if it did not wait behind the unit that ran before it.
        """
        if unit.lane != "device":
            return None
        before, last = self._behind.get((unit, worker)), self._last.get(worker)
        self.withdrawn(unit, worker)
        self._last[worker] = (unit, receipt.started_at + receipt.seconds)
        if before is None or last is None or last[0] != before:
            return None
        return max(0.0, receipt.started_at - last[1])
