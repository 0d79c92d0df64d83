"""Stage 1: trajectories. Also hands out the rollouts of evaluations, which take what is left."""

from __future__ import annotations

from digenrl.identity import MicroBatchId
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.line import Line
from digenrl.scheduling.messages import Cancel, TrajectoryRef
from digenrl.scheduling.state import CONTINUE, State
from digenrl.scheduling.units import RolloutUnit


class Rollouts:
    """Micro-batches wait in order of identity, so the first group is complete as early as possible.

    Those of the next iteration are begun when none of this one waits any more.
    A trajectory's units run in order on one worker, where its state lives. A worker begins a trajectory only when all
    units of the one before are dispatched.
    """

    def __init__(self, state: State, *, gap: bool) -> None:
        """`gap`: spread each group over all workers; else one worker generates all of a group."""
        self._state = state
        self._gap = gap
        self._train: dict[int, Line] = {}  # by iteration
        self._eval = Line()
        self._reassigned = 0

    def queue(self, batch: Batch) -> None:
        """Wait for a worker that generates the micro-batch, unless one does already."""
        if batch.queued or batch.roller is not None:
            return
        batch.queued = True
        self._line(batch).add(batch.id)
        self._state.wake_all()

    def resume(self, worker: Worker) -> bool:
        """Dispatch the next unit of the trajectory this worker has begun, if there is one."""
        if worker.rolling is None:
            return False
        self._dispatch(self._state.batches[worker.rolling], worker, CONTINUE)
        return True

    def start(self, worker: Worker, *, urgent: bool = False) -> bool:
        """Dispatch the first unit of the next trajectory, if one waits that this worker can generate.

        `urgent`: only if the update in progress needs it.
        """
        self._release_groups()
        for iteration in sorted(self._train):
            line = self._train[iteration]
            if not line:
                if iteration < self._state.version:
                    del self._train[iteration]
                continue
            if worker.device and not self._may_queue_ahead(line, worker):
                return False
            skip = self._better_left(line, worker) if self._state.foresight is not None else 0
            if urgent and not self._is_urgent(line, worker, skip):
                return False
            if skip < len(line) and self._start(line, worker, skip):
                return True
            if skip:
                if not worker.device:
                    self._state.declined.add(worker.name)
                return False
        return False

    def evaluate(self, worker: Worker) -> bool:
        """Dispatch the next evaluation rollout. Only to an idle device: nothing may have to wait for two of them."""
        return bool(self._eval) and not worker.device and self._start(self._eval, worker)

    def urgent(self, worker: Worker) -> bool:
        """Whether a micro-batch waits for this worker, or for anybody, that the update in progress needs."""
        line = self._train.get(self._state.version)
        return line is not None and len(line) > 0 and self._is_urgent(line, worker)

    def _is_urgent(self, line: Line, worker: Worker, skip: int = 0) -> bool:
        """Whether the first micro-batch behind `skip` others is one the update in progress needs."""
        state, shape = self._state, self._state.shape
        first = line.first(worker.name)
        _, groups = shape.groups_of_update(state.theta + 1)
        return first is not None and (
            first.iteration == state.version and first.index + skip < groups.stop * shape.micro_batches_per_group
        )

    @property
    def ahead(self) -> bool:
        """Whether micro-batches of the next iteration wait."""
        return bool(self._train.get(self._state.version + 1))

    @property
    def waiting(self) -> int:
        """Micro-batches of the iteration in progress that nobody generates yet."""
        return len(self._train.get(self._state.version, ()))

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

    def _line(self, batch: Batch) -> Line:
        if batch.id.phase == "eval":
            return self._eval
        if batch.id.iteration not in self._train:
            self._train[batch.id.iteration] = Line(None if self._gap else self._state.shape.group_of)
        return self._train[batch.id.iteration]

    def _release_groups(self) -> None:
        """Groups that are bound to a worker which no longer rolls out are anybody's."""
        state = self._state
        if self._gap or self._reassigned == state.reassigned:
            return
        self._reassigned = state.reassigned
        for line in self._train.values():
            line.release(lambda name: name in state.fleet.rollers)
        state.wake_all()

    def _better_left(self, line: Line, worker: Worker) -> int:
        """How many of those in line others would have generated before this worker had generated one.

        Trainers that help are counted on only as long as this worker has something else to do.
        """
        state, layout = self._state, self._state.layout
        head = state.batches.get(line.first(worker.name) or MicroBatchId("train", 0, 0))
        if state.foresight is None or state.stuck or not self._gap or head is None or head.avoid:
            return 0
        fleet, busy = state.fleet, bool(worker.device)

        def takes(other: Worker) -> bool:
            helps = busy and "train" in other.roles and "rollout" in layout.takes(other, state.stage)
            return helps or "rollout" in other.roles

        without = state.without(head.theta, worker)
        if busy and state.resting:
            counted = {worker.name, *(w.name for w in without)}
            names = state.resting.difference(fleet.rollers, counted)
            resting = (fleet.workers[name] for name in names if name in fleet.workers)
            without += [other for other in resting if not other.device]
        return state.foresight.outrun(worker, None, state.now, others=takes, without=without, most=len(line))

    def _may_queue_ahead(self, line: Line, worker: Worker) -> bool:
        """Whether a busy device gets a new trajectory already.

        Not while another one is idle, or soon will be: the micro-batches of a group are to spread over all of them, and
        the last ones of an iteration go to whoever is free first.
        """
        fleet = self._state.fleet
        if len(fleet.rollers) == 1 or line.has_own(worker.name):
            return True
        return not fleet.idle_rollers and len(line) > len(fleet.rollers)

    def _start(self, line: Line, worker: Worker, skip: int = 0) -> bool:
        batch = self._pop(line, worker, skip)
        if batch is None:
            return False
        batch.queued = False
        batch.roller = worker.name
        self._dispatch(batch, worker, self._state.urgency(batch))
        return True

    def _pop(self, line: Line, worker: Worker, skip: int) -> Batch | None:
        """Take the first micro-batch behind `skip` others that this worker has the adapter for and has not failed."""
        batches, ledger = self._state.batches, self._state.ledger
        while (waiting := line.first(worker.name, skip)) is not None:
            batch = batches.get(waiting)
            if batch is None or not batch.needed or ledger.holders(batch.id):
                # It was to be generated again, but that has become needless.
                line.take(worker.name, skip)
                if batch is not None:
                    batch.queued = False
                continue
            if worker.name not in ledger.adapters(batch.theta):
                return None
            if worker.name not in batch.avoid or not self._others(batch):
                line.take(worker.name, skip)
                return batch
            if line.has_own(worker.name):
                line.unbind(worker.name, skip)
            else:
                skip += 1
        return None

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
