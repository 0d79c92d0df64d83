"""Stage 1: trajectories. Also hands out the rollouts of evaluations, which take what is left."""

from __future__ import annotations

from collections import defaultdict
from heapq import heappop, heappush

from digenrl.identity import MicroBatchId
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.messages import Cancel, TrajectoryRef
from digenrl.scheduling.state import CONTINUE, State
from digenrl.scheduling.units import RolloutUnit


class Rollouts:
    """Micro-batches wait in order of identity, so the first group is complete as early as possible.

    Those of the next iteration are begun when none of this one waits any more.
    A trajectory's units run in order on one worker, where its state lives. A worker begins a trajectory only when all
    units of the one before are dispatched.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._train: dict[int, list[MicroBatchId]] = defaultdict(list)  # by iteration
        self._eval: list[MicroBatchId] = []

    def queue(self, batch: Batch) -> None:
        """Wait for a worker that generates the micro-batch, unless one does already."""
        if batch.queued or batch.roller is not None:
            return
        batch.queued = True
        heappush(self._train[batch.id.iteration] if batch.id.phase == "train" else self._eval, batch.id)
        self._state.wake_all()

    def resume(self, worker: Worker) -> bool:
        """Dispatch the next unit of the trajectory this worker has begun, if there is one."""
        if worker.rolling is None:
            return False
        self._dispatch(self._state.batches[worker.rolling], worker, CONTINUE)
        return True

    def start(self, worker: Worker) -> bool:
        """Dispatch the first unit of the next trajectory, if one waits that this worker can generate."""
        for iteration in sorted(self._train):
            queue = self._train[iteration]
            if not queue:
                del self._train[iteration]
            elif worker.device and not self._may_queue_ahead(queue):
                return False
            elif self._start(queue, worker):
                return True
        return False

    def evaluate(self, worker: Worker) -> bool:
        """Dispatch the next evaluation rollout. Only to an idle device: nothing may have to wait for two of them."""
        return not worker.device and self._start(self._eval, worker)

    def finished(self, batch: Batch, unit: RolloutUnit, worker: Worker) -> bool:
        """A unit ended. Returns whether the trajectory is complete."""
        assert unit == batch.rollout[batch.finished], f"{unit.label} ended out of order"
        batch.finished += 1
        if not batch.complete:
            return False
        self._state.ledger.keep(batch.id, worker.name)
        return True

    def abandon(self, batch: Batch) -> None:
        """Withdraw what is dispatched of an unfinished trajectory; it will be generated from step 0."""
        worker = self._state.fleet.workers.get(batch.roller or "")
        if worker is not None:
            for unit in batch.rollout[batch.finished : batch.issued]:
                if self._state.fleet.take(unit, worker):
                    self._state.emit(Cancel(unit, worker.name))
            if worker.rolling == batch.id:
                worker.rolling = None
            self._state.drop(TrajectoryRef(batch.id), worker.name)
            self._state.wake(worker.name)
        batch.restart()

    def _may_queue_ahead(self, queue: list[MicroBatchId]) -> bool:
        """Whether a busy device gets a new trajectory already.

        Not while another one is idle, or soon will be: the micro-batches of a group are to spread over all of them, and
        the last ones of an iteration go to whoever is free first.
        """
        fleet = self._state.fleet
        return len(fleet.rollers) == 1 or (not fleet.idle_rollers and len(queue) > len(fleet.rollers))

    def _start(self, queue: list[MicroBatchId], worker: Worker) -> bool:
        batch = self._pop(queue, worker)
        if batch is None:
            return False
        batch.queued = False
        batch.roller = worker.name
        self._dispatch(batch, worker, self._state.urgency(batch))
        return True

    def _pop(self, queue: list[MicroBatchId], worker: Worker) -> Batch | None:
        """Take the first micro-batch that this worker holds the adapter for and has not failed before."""
        batches, ledger = self._state.batches, self._state.ledger
        passed_over: list[MicroBatchId] = []
        found = None
        while queue and found is None:
            batch = batches.get(queue[0])
            if batch is None or not batch.needed or ledger.holders(batch.id):
                # It was to be generated again, but that has become needless.
                heappop(queue)
                if batch is not None:
                    batch.queued = False
                continue
            if worker.name not in ledger.adapters(batch.theta):
                break
            heappop(queue)
            if worker.name in batch.avoid and self._others(batch):
                passed_over.append(batch.id)
            else:
                found = batch
        for micro_batch in passed_over:
            heappush(queue, micro_batch)
        return found

    def _others(self, batch: Batch) -> bool:
        """Whether some worker could generate the micro-batch that has not failed to."""
        kind = "rollout" if batch.id.phase == "train" else "evaluate"
        return any(
            kind in self._state.layout.takes(w, self._state.stage)
            for w in self._state.fleet.staying("rollout")
            if w.name not in batch.avoid
        )

    def _dispatch(self, batch: Batch, worker: Worker, priority: int) -> None:
        unit = batch.rollout[batch.issued]
        before = batch.rollout[batch.issued - 1] if batch.issued else None
        depends_on = (before,) if before is not None and before in worker.device else ()
        batch.issued += 1
        worker.rolling = batch.id if batch.issued < len(batch.rollout) else None
        self._state.run(unit, worker, batch.theta, priority, depends_on=depends_on)
