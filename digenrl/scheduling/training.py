"""Stage 3: train units, on the trainer chosen for their micro-batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from heapq import heapify, heappop, heappush

from digenrl.identity import MicroBatchId
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.loads import Loads
from digenrl.scheduling.state import TRAIN, State
from digenrl.scheduling.streams import Streams
from digenrl.scheduling.units import TrainUnit


class Training:
    """A micro-batch gets its trainer as soon as it is generated, so its trajectory travels while it is scored.

    The trainer with the least left to do for that update is chosen, but one that holds the trajectory already is
    preferred if it has no more than this micro-batch left on top of that. Later, a trainer that runs out of work takes
    over a micro-batch that would have to wait longer where it is.
    """

    def __init__(self, state: State, streams: Streams) -> None:
        self._state = state
        self._streams = streams
        # Per trainer a heap of (theta the unit helps to make, micro-batch, steps, unit) that may be dispatched.
        self._ready: dict[str, list[tuple[int, int, tuple[int, ...], TrainUnit]]] = {}
        self._loads = Loads(state)
        # How many entries there are, by theta; and by trainer the micro-batches it waits for only to arrive.
        self._entries: Counter[int] = Counter()
        self._due: defaultdict[str, set[MicroBatchId]] = defaultdict(set)

    def place(self, batch: Batch) -> None:
        """See that the micro-batch has a trainer, the trainer has the trajectory, and knows of its open units."""
        if not batch.open or batch.silent:
            return
        if batch.trainer is None:
            self._assign(batch, self._choose(batch))
        if batch.trainer is None:
            return
        if batch.trainer not in self._state.ledger.holders(batch.id):
            self._state.copy(batch, batch.trainer)
            if batch.closed or self._streams.eligible(batch):
                self._due[batch.trainer].add(batch.id)
            return
        self._due[batch.trainer].discard(batch.id)
        if batch.placed or not (batch.closed or self._streams.admit(batch, batch.trainer)):
            return
        batch.placed = True
        heap = self._ready.setdefault(batch.trainer, [])
        for unit in batch.open:
            if unit not in batch.running:
                heappush(heap, (batch.update, batch.id.index, unit.steps, unit))
                self._entries[batch.update] += 1
        self._state.wake(batch.trainer)
        self._state.wake_idle_trainers(len(batch.open))

    def peek(self, worker: Worker) -> TrainUnit | None:
        """The train unit that this trainer may run now, if there is one."""
        heap = self._ready.get(worker.name)
        if not heap:
            return None
        unit = heap[0][-1]
        return unit if self._may_run(self._state.batches[unit.micro_batch], worker.name) else None

    def next(self, worker: Worker) -> bool:
        """Dispatch the next train unit of this trainer, if it may run one now."""
        unit = self.peek(worker)
        if unit is None or self._better_left(unit, worker):
            return False
        self._entries[heappop(self._ready[worker.name])[0]] -= 1
        batch = self._state.batches[unit.micro_batch]
        assert not self._state.step.seals(worker.name), f"{unit.label} on {worker.name}, whose gradient is being merged"
        batch.running[unit] = worker.name
        closings, admissible = self._streams.deliver(worker.name)
        self._state.run(
            unit,
            worker,
            self._state.theta,
            TRAIN,
            batch.advantages,
            batch.theta,
            rewards=None if batch.closed else batch.rewards,
            baseline=0.0 if batch.closed else self._streams.baseline,
            closings=closings,
        )
        for waiting in admissible:
            self.place(waiting)
        if self._entries[batch.update]:
            self._state.wake_idle_trainers(self._entries[batch.update])
        return True

    def done(self, batch: Batch, unit: TrainUnit) -> None:
        """The unit is contributed."""
        del batch.open[unit]
        batch.running.pop(unit, None)
        if batch.trainer is not None:
            self._loads.add(batch.trainer, batch.update, -1)

    def expects(self, worker: Worker) -> bool:
        """Whether a micro-batch of the step in progress only has to arrive for this trainer to train on it."""
        update, batches = self._state.theta + 1, self._state.batches
        due = [batches.get(micro_batch) for micro_batch in self._due.get(worker.name, ())]
        return any(batch is not None and batch.update == update for batch in due)

    def take_over(self, worker: Worker) -> bool:
        """Move a ready micro-batch to an idle trainer from the one with the most of them, if that brings it forward."""
        state, update = self._state, self._state.theta + 1
        if worker.device or not self._entries[update] or state.step.seals(worker.name) or self.expects(worker):
            return False
        others = [w for w in state.trainers if w is not worker and self._ready.get(w.name)]
        for other in sorted(others, key=lambda w: -len(self._ready[w.name])):
            batch = self._movable(other, worker)
            if batch is not None:
                self.unassign(batch)
                self._assign(batch, worker.name)
                self.place(batch)
                return True
        return False

    def redo(self, batch: Batch, unit: TrainUnit) -> int:
        """The unit's contribution is lost, or the unit failed: it has to run again, if any of its samples takes part.

        Returns:
            By how much the number of open units has grown: 1 or 0; -1 if it turns out that the unit need not run.
        """
        before = len(batch.open)
        self._withdraw(batch)
        batch.running.pop(unit, None)
        if batch.silent:
            batch.open.pop(unit, None)
        elif unit not in batch.open:
            batch.open[unit] = None
            if batch.trainer is not None:
                self._loads.add(batch.trainer, batch.update, 1)
        return len(batch.open) - before

    def leave_out(self, batch: Batch) -> None:
        """No sample of the micro-batch takes part: what does not run already is not trained on."""
        self.unassign(batch)
        batch.open = {unit: None for unit in batch.open if unit in batch.running}

    def unassign(self, batch: Batch) -> None:
        """Take the micro-batch away from its trainer; units that are dispatched there go on."""
        self._withdraw(batch)
        if batch.trainer is not None:
            self._loads.add(batch.trainer, batch.update, -len(batch.open))
            self._due[batch.trainer].discard(batch.id)
        batch.trainer = None

    def lost(self, name: str) -> None:
        """A trainer is gone; its micro-batches have been unassigned."""
        assert not self._ready.pop(name, None), f"micro-batches are still with {name}, which is gone"
        self._due.pop(name, None)

    def forget_loads(self) -> None:
        """A new iteration begins: only what is left to do for later updates counts."""
        self._loads.forget(self._state.theta)

    def _withdraw(self, batch: Batch) -> None:
        """Its units are no longer in their trainer's line; the next `place` puts them there again."""
        if not batch.placed or batch.trainer is None:
            return
        batch.placed = False
        heap = self._ready[batch.trainer]
        kept = [entry for entry in heap if entry[-1].micro_batch != batch.id]
        if len(kept) < len(heap):
            self._entries[batch.update] -= len(heap) - len(kept)
            heapify(kept)
            self._ready[batch.trainer] = kept

    def _assign(self, batch: Batch, trainer: str | None) -> None:
        batch.trainer = trainer
        batch.placed = False
        if trainer is not None:
            self._loads.add(trainer, batch.update, len(batch.open))

    def _choose(self, batch: Batch) -> str | None:
        workers, loads = self._state.fleet.workers, self._loads
        least = self._least(batch)
        near = [workers[name] for name in (*self._state.ledger.holders(batch.id), *batch.copying)]
        fit = [
            w.name
            for w in near
            if "train" in w.roles
            and w.name not in batch.avoid
            and self._open_to(batch, w)
            and (least is None or loads.of(w.name, batch.update) <= loads.of(least, batch.update) + len(batch.open))
        ]
        return min(fit, key=lambda name: (loads.of(name, batch.update), workers[name].order), default=least)

    def _least(self, batch: Batch) -> str | None:
        name = self._loads.least(batch.update)
        if name is None or (name not in batch.avoid and self._open_to(batch, self._state.fleet.workers[name])):
            return name
        best = min(
            (w for w in self._state.trainers if self._open_to(batch, w)),
            key=lambda w: (w.name in batch.avoid, self._loads.of(w.name, batch.update), w.order),
            default=None,
        )
        return best.name if best is not None else None

    def _movable(self, other: Worker, worker: Worker) -> Batch | None:
        """The last ready micro-batch in another trainer's line, if this one may train on it and would do so earlier."""
        update = self._state.theta + 1
        line = [entry for entry in self._ready[other.name] if entry[0] == update]
        if not line:
            return None
        last = max(line)[-1].micro_batch
        batch = self._state.batches[last]
        units = [entry[-1] for entry in line if entry[-1].micro_batch == last]
        may = batch.closed and worker.name not in batch.avoid and self._may_run(batch, worker.name)
        return batch if may and self._is_earlier(units, worker, other, len(line) - len(units)) else None

    def _is_earlier(self, units: list[TrainUnit], worker: Worker, other: Worker, before: int) -> bool:
        """Whether an idle trainer ends these units earlier than another one, which has some others to run before."""
        state = self._state
        if state.foresight is None:
            return bool(other.device) or before > 0
        here = state.foresight.transfer_s(worker) + len(units) * state.foresight.unit_s(units[0], worker.kind)
        there = (before + len(units)) * state.foresight.unit_s(units[0], other.kind)
        return state.now + here < state.foresight.free_at(other, state.now) + there - 1e-9

    def _better_left(self, unit: TrainUnit, worker: Worker) -> bool:
        """Whether others would have ended all units that are ready before this trainer ended one more."""
        state, ready = self._state, self._entries[self._state.theta + 1]
        if state.foresight is None or state.stuck:
            return False
        able = [w for w in state.trainers if w.name in state.ledger.adapters(state.theta)]
        left = state.foresight.outrun(worker, able, unit, state.now, ready) >= ready
        if left:
            state.declined.add(worker.name)
        return left

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
