"""Stage 3: train units, on the trainer chosen for their micro-batch."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush

from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.state import TRAIN, State
from digenrl.scheduling.units import TrainUnit


class Training:
    """A micro-batch gets its trainer as soon as it is generated, so its trajectory travels while it is scored.

    A trainer that holds the trajectory is preferred; among equals the one with the least left to do for that update.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        # Per trainer a heap of (theta the unit helps to make, micro-batch, steps, unit). An entry may be out of date.
        self._ready: dict[str, list[tuple[int, int, tuple[int, ...], TrainUnit]]] = {}
        self._load: Counter[tuple[str, int]] = Counter()

    def place(self, batch: Batch) -> None:
        """See that the micro-batch has a trainer, the trainer has the trajectory, and knows of its open units."""
        if not batch.open:
            return
        if batch.trainer is None:
            self._assign(batch, self._choose(batch))
        if batch.trainer is None:
            return
        if batch.trainer not in self._state.ledger.holders(batch.id):
            self._state.copy(batch, batch.trainer)
        elif batch.advantages is not None and not batch.placed:
            batch.placed = True
            heap = self._ready.setdefault(batch.trainer, [])
            for unit in batch.open:
                if unit not in batch.running:
                    heappush(heap, (batch.update, batch.id.index, unit.steps, unit))
            self._state.wake(batch.trainer)

    def peek(self, worker: Worker) -> TrainUnit | None:
        """The train unit that this trainer may run now, if there is one."""
        heap = self._ready.get(worker.name)
        while heap:
            unit = heap[0][-1]
            batch = self._state.batches.get(unit.micro_batch)
            if batch is not None and batch.trainer == worker.name and unit in batch.open and unit not in batch.running:
                return unit if self._may_run(batch, worker.name) else None
            heappop(heap)
        return None

    def next(self, worker: Worker) -> bool:
        """Dispatch the next train unit of this trainer, if it may run one now."""
        unit = self.peek(worker)
        if unit is None:
            return False
        heappop(self._ready[worker.name])
        batch = self._state.batches[unit.micro_batch]
        assert batch.advantages is not None
        assert not self._state.step.seals(worker.name), f"{unit.label} on {worker.name}, whose gradient is being merged"
        batch.running[unit] = worker.name
        self._state.run(unit, worker, self._state.theta, TRAIN, batch.advantages, batch.theta)
        return True

    def done(self, batch: Batch, unit: TrainUnit) -> None:
        """The unit is contributed."""
        del batch.open[unit]
        batch.running.pop(unit, None)
        if batch.trainer is not None:
            self._load[batch.trainer, batch.update] -= 1

    def redo(self, batch: Batch, unit: TrainUnit) -> None:
        """The unit's contribution is lost, or the unit failed: it has to run again."""
        batch.running.pop(unit, None)
        batch.placed = False
        if unit not in batch.open:
            batch.open[unit] = None
            if batch.trainer is not None:
                self._load[batch.trainer, batch.update] += 1

    def leave_out(self, batch: Batch) -> None:
        """No sample of the micro-batch takes part: it is not trained on."""
        self.unassign(batch)
        batch.open.clear()

    def unassign(self, batch: Batch) -> None:
        """Take the micro-batch away from its trainer; units that are dispatched there go on."""
        if batch.trainer is not None:
            self._load[batch.trainer, batch.update] -= len(batch.open)
        batch.trainer = None
        batch.placed = False

    def lost(self, name: str) -> None:
        """A trainer is gone; its micro-batches have been unassigned."""
        self._ready.pop(name, None)

    def forget_loads(self) -> None:
        """A new iteration begins: only what is left to do for later updates counts."""
        self._load = Counter({key: units for key, units in self._load.items() if key[1] > self._state.theta})

    def _assign(self, batch: Batch, trainer: str | None) -> None:
        batch.trainer = trainer
        batch.placed = False
        if trainer is not None:
            self._load[trainer, batch.update] += len(batch.open)

    def _choose(self, batch: Batch) -> str | None:
        workers = self._state.fleet.workers
        near = [workers[name] for name in (*self._state.ledger.holders(batch.id), *batch.copying)]
        candidates = [
            w for w in near if "train" in w.roles and w.name not in batch.avoid and self._open_to(batch, w)
        ] or [w for w in self._state.trainers if self._open_to(batch, w)]
        best = min(
            candidates,
            key=lambda w: (w.name in batch.avoid, self._load[w.name, batch.update], w.order),
            default=None,
        )
        return best.name if best is not None else None

    def _open_to(self, batch: Batch, worker: Worker) -> bool:
        # What a sealed accumulator holds is on its way to the lead: another gradient would arrive twice or never.
        return batch.update != self._state.theta + 1 or not self._state.step.seals(worker.name)

    def _may_run(self, batch: Batch, trainer: str) -> bool:
        """Whether the unit belongs to the step in progress and the trainer holds both adapters it needs."""
        state, ledger = self._state, self._state.ledger
        return (
            batch.update == state.theta + 1
            and batch.id.iteration == state.version
            and state.step.phase == "collect"
            and trainer in ledger.adapters(state.theta)
            and trainer in ledger.adapters(batch.theta)
        )
