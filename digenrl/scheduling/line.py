"""The line in which micro-batches wait for a worker that generates them.

With GAP everybody takes from its head, so a group is spread over all workers and the first one is complete as early as
possible. Without it, whoever takes the first micro-batch of a group gets the whole group.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Callable

from digenrl.identity import MicroBatchId


class Line:
    """Micro-batches in order of identity."""

    def __init__(self, group_of: Callable[[MicroBatchId], int] | None = None) -> None:
        """`group_of`: the group of a micro-batch if groups are to stay whole; None: they are spread (GAP)."""
        self._group_of = group_of
        self._anybody: list[MicroBatchId] = []
        self._own: defaultdict[str, list[MicroBatchId]] = defaultdict(list)
        self._owner: dict[int, str] = {}
        self._length = 0

    def __len__(self) -> int:
        """How many wait, for whomever."""
        return self._length

    def add(self, micro_batch: MicroBatchId) -> None:
        """Join the line: that of the worker which has the rest of the group, if there is one."""
        self._length += 1
        owner = self._owner.get(self._group_of(micro_batch)) if self._group_of is not None else None
        insort(self._anybody if owner is None else self._own[owner], micro_batch)

    def has_own(self, worker: str) -> bool:
        """Whether micro-batches wait for this worker only."""
        return bool(self._own.get(worker))

    def first(self, worker: str, skip: int = 0) -> MicroBatchId | None:
        """The first micro-batch for a worker, behind `skip` others."""
        waiting = self._own.get(worker) or self._anybody
        return waiting[skip] if skip < len(waiting) else None

    def take(self, worker: str, skip: int = 0) -> None:
        """`first` leaves the line. What follows of a group nobody has begun is bound to the worker."""
        waiting = self._own.get(worker) or self._anybody
        self._length -= 1
        taken = waiting.pop(skip)
        if self._group_of is None or waiting is not self._anybody:
            return
        group = self._group_of(taken)
        if group not in self._owner:
            self._owner[group] = worker
            end = skip
            while end < len(waiting) and self._group_of(waiting[end]) == group:
                end += 1
            self._own[worker] += waiting[skip:end]
            del waiting[skip:end]

    def unbind(self, worker: str, skip: int) -> None:
        """`first`, which waits for this worker only, is anybody's."""
        insort(self._anybody, self._own[worker].pop(skip))

    def release(self, stays: Callable[[str], bool]) -> None:
        """What is bound to workers that do not stay is anybody's again, and whoever takes it gets all of it."""
        gone = {worker for worker in self._owner.values() if not stays(worker)}
        for worker in gone:
            self._anybody += self._own.pop(worker, [])
        self._anybody.sort()
        self._owner = {group: worker for group, worker in self._owner.items() if worker not in gone}
