"""The line in which micro-batches wait for a worker that generates them.

With GAP everybody takes from its head, so a group is spread over all workers and the first one is complete as early as
possible. Without it, whoever takes the first micro-batch of a group gets the whole group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

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

    def add(self, micro_batch: MicroBatchId, *, bound: bool = True) -> None:
        """Join the line. `bound`: for the worker that has the rest of the group, if there is one."""
        self._length += 1
        owner = self._owner.get(self._group_of(micro_batch)) if self._group_of is not None and bound else None
        heappush(self._anybody if owner is None else self._own[owner], micro_batch)

    def has_own(self, worker: str) -> bool:
        """Whether micro-batches wait for this worker only."""
        return bool(self._own.get(worker))

    def first(self, worker: str) -> MicroBatchId | None:
        """What `take` would return."""
        heap = self._own.get(worker) or self._anybody
        return heap[0] if heap else None

    def take(self, worker: str) -> MicroBatchId | None:
        """Leave the line: the first micro-batch for a worker. The rest of a group nobody has begun is bound to it."""
        heap = self._own.get(worker) or self._anybody
        if not heap:
            return None
        self._length -= 1
        taken = heappop(heap)
        if self._group_of is not None and heap is self._anybody:
            group = self._group_of(taken)
            if group not in self._owner:
                self._owner[group] = worker
                while heap and self._group_of(heap[0]) == group:
                    heappush(self._own[worker], heappop(heap))
        return taken

    def release(self, stays: Callable[[str], bool]) -> None:
        """What is bound to workers that do not stay is anybody's again, and whoever takes it gets all of it."""
        gone = [worker for worker in dict.fromkeys(self._owner.values()) if not stays(worker)]
        for worker in gone:
            for micro_batch in self._own.pop(worker, []):
                heappush(self._anybody, micro_batch)
        self._owner = {group: worker for group, worker in self._owner.items() if worker not in gone}
