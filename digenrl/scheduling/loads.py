"""How much each trainer is expected to do, for each optimiser step."""

from __future__ import annotations

from collections import Counter, defaultdict
from heapq import heapify, heappop, heappush, heapreplace

from digenrl.scheduling.state import State
from digenrl.scheduling.units import TrainUnit


class Loads:
    """Train units by (trainer, theta they help to make); knows who would be done first without looking at all."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._units: Counter[tuple[str, int]] = Counter()
        # Per theta and kind of worker a heap of (units, order, name). An entry is out of date if the trainer has more
        # units than it says; if it has fewer, there is another entry that says so.
        self._heaps: dict[int, dict[str, list[tuple[int, int, str]]]] = {}
        self._trainers = state.trainers

    def add(self, trainer: str, theta: int, units: int) -> None:
        """A trainer has more (or fewer) units to do for one step."""
        self._units[trainer, theta] += units
        worker = self._state.fleet.workers.get(trainer)
        heaps = self._heaps.get(theta)
        if units < 0 and heaps is not None and worker is not None and worker.kind in heaps and "train" in worker.roles:
            heappush(heaps[worker.kind], (self._units[trainer, theta], worker.order, trainer))

    def least(self, theta: int, unit: TrainUnit, units: int) -> str | None:
        """The trainer that would be done first with so many more units for one step, among equals the first joined."""
        if self._trainers is not self._state.trainers:
            self._trainers = self._state.trainers
            self._heaps.clear()
        if theta not in self._heaps:
            self._heaps[theta] = self._build(theta)
        foresight = self._state.foresight
        best: tuple[float, int, str] | None = None
        for kind, heap in self._heaps[theta].items():
            found = self._head(heap, theta)
            if found is not None:
                seconds = foresight.unit_s(unit, kind) if foresight is not None else 1.0
                ends = ((found[0] + units) * seconds, *found[1:])
                best = ends if best is None else min(best, ends)
        return best[-1] if best is not None else None

    def forget(self, theta: int) -> None:
        """Steps up to `theta` are done."""
        self._units = Counter({key: units for key, units in self._units.items() if key[1] > theta})
        self._heaps = {t: heaps for t, heaps in self._heaps.items() if t > theta}

    def _build(self, theta: int) -> dict[str, list[tuple[int, int, str]]]:
        heaps: defaultdict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for worker in self._trainers:
            heaps[worker.kind].append((self._units[worker.name, theta], worker.order, worker.name))
        for heap in heaps.values():
            heapify(heap)
        return dict(heaps)

    def _head(self, heap: list[tuple[int, int, str]], theta: int) -> tuple[int, int, str] | None:
        while heap:
            units, order, name = heap[0]
            actual = self._units[name, theta]
            if actual == units:
                return heap[0]
            if actual > units:
                heapreplace(heap, (actual, order, name))
            else:
                heappop(heap)
        return None
