"""When devices will be free: workers of a kind with equal roles and capabilities side by side, in order of time.

Whether a worker should leave a unit to others is asked at every decision, about every one of them. How many units the
others would end before a moment is a sum over workers of whole numbers, so it is counted by rank instead of by worker:
how many of them end a first unit by then, how many a second one, and so on.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.messages import Capability
from digenrl.scheduling.policies import Role

#: A share of a unit's seconds: units that end at the same moment, but for rounding, are not ended before each other.
_TIE = 1e-9


@dataclass(slots=True)
class _Alike:
    """Workers of one kind, with the same roles and capabilities.

    Attributes:
        workers: by name.
        until: when each will be free, in order. A time that is past means now.
    """

    workers: dict[str, Worker] = field(default_factory=dict)
    until: list[float] = field(default_factory=list)

    @property
    def sample(self) -> Worker:
        """One of them."""
        return next(iter(self.workers.values()))


_Key = tuple[str, frozenset[Role], frozenset[Capability]]


class FreeTimes:
    """`Worker.until` of all workers, in order."""

    def __init__(self) -> None:
        self._alike: dict[_Key, _Alike] = {}
        self._noted: dict[str, tuple[_Key, float]] = {}

    def note(self, worker: Worker) -> None:
        """A worker is there, or its roles or its time are others than before."""
        self.forget(worker.name)
        key = (worker.kind, worker.roles, worker.capabilities)
        alike = self._alike.setdefault(key, _Alike())
        alike.workers[worker.name] = worker
        insort(alike.until, worker.until)
        self._noted[worker.name] = key, worker.until

    def forget(self, name: str) -> None:
        """A worker is gone."""
        if name not in self._noted:
            return
        key, until = self._noted.pop(name)
        alike = self._alike[key]
        del alike.workers[name]
        del alike.until[bisect_left(alike.until, until)]
        if not alike.workers:
            del self._alike[key]

    def ended_before(
        self,
        end: float,
        now: float,
        seconds: Callable[[str], float],
        counts: Callable[[Worker], bool],
        without: Iterable[Worker],
        most: int,
    ) -> int:
        """How many units would be ended before `end`.

        Args:
            end: the moment.
            now: the driver's clock.
            seconds: of a unit on a kind of worker.
            counts: whether a worker takes such units; must depend on its kind, roles and capabilities only.
            without: workers among those that take no such unit now. None twice.
            most: counting stops there.
        """
        missing = sum(
            _ended(end - max(now, worker.until), seconds(worker.kind)) for worker in without if counts(worker)
        )
        count = -missing
        for alike in self._alike.values():
            sample = alike.sample
            each = seconds(sample.kind)
            if each <= 0 or end - now <= each or not counts(sample):
                continue
            times, latest = alike.until, end - (1 + _TIE) * each
            # A device that is free now begins at once: it counts for as long as a unit more ends in time.
            while latest > now and count < most and (by_then := bisect_left(times, latest)):
                count += by_then
                latest -= each
        return min(count, most)


def _ended(left: float, each: float) -> int:
    """Units of `each` seconds that are ended, one after another, before `left` seconds are over."""
    ended = 0
    while each > 0 and left > (ended + 1 + _TIE) * each:
        ended += 1
    return ended
