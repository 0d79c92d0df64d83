"""How much each trainer has left to do, for each optimiser step."""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush, heapreplace

from digenrl.scheduling.state import State


class Loads:
    """Train units by (trainer, theta they help to make); knows the least loaded trainer without looking at all."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._units: Counter[tuple[str, int]] = Counter()
        # Per theta a heap of (units, order, name). An entry is out of date if the trainer has more units than it says;
        # if it has fewer, there is another entry that says so.
        self._heaps: dict[int, list[tuple[int, int, str]]] = {}
        self._trainers = state.trainers

    def of(self, trainer: str, theta: int) -> int:
        """Units a trainer has left for one step."""
        return self._units[trainer, theta]

    def add(self, trainer: str, theta: int, units: int) -> None:
        """A trainer has more (or fewer) units left for one step."""
        self._units[trainer, theta] += units
        heap = self._heaps.get(theta)
        worker = self._state.fleet.workers.get(trainer)
        if units < 0 and heap is not None and worker is not None and "train" in worker.roles:
            heappush(heap, (self._units[trainer, theta], worker.order, trainer))

    def least(self, theta: int) -> str | None:
        """The trainer with the least left for one step, among equals the one that joined first."""
        if self._trainers is not self._state.trainers:
            self._trainers = self._state.trainers
            self._heaps.clear()
        heap = self._heaps.get(theta)
        if heap is None:
            heap = [(self._units[w.name, theta], w.order, w.name) for w in self._trainers]
            heapify(heap)
            self._heaps[theta] = heap
        while heap:
            units, order, name = heap[0]
            actual = self._units[name, theta]
            if actual == units:
                return name
            if actual > units:
                heapreplace(heap, (actual, order, name))
            else:
                heappop(heap)
        return None

    def forget(self, theta: int) -> None:
        """Steps up to `theta` are done."""
        self._units = Counter({key: units for key, units in self._units.items() if key[1] > theta})
        self._heaps = {t: heap for t, heap in self._heaps.items() if t > theta}
