"""Stage 3: train units. They wait in a common line; a worker first takes those whose trajectory it holds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from heapq import heappop, heappush

from digenrl.identity import MicroBatchId
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.loads import Loads
from digenrl.scheduling.state import TRAIN, State, copying
from digenrl.scheduling.streams import Streams
from digenrl.scheduling.units import TrainUnit

#: The name of the line that is not one worker's.
_COMMON = ""


class Training:
    """Hands out the units of the step in progress one by one, so that fast workers take more of them.

    A micro-batch is sent to the trainer that will probably have time for it as soon as it is generated, so its
    trajectory travels while it is scored. It binds nobody: a worker that holds the trajectory of nothing that is ready
    claims the first unit of the common line, and runs it when the trajectory has arrived. At the end, units are left to
    those who end them first.
    """

    def __init__(self, state: State, streams: Streams) -> None:
        self._state = state
        self._streams = streams
        # Heaps of (theta the units help to make, index, micro-batch): the common one, and one for what each worker
        # holds. A micro-batch knows the lines it is in; entries with nothing ready are dropped when they come first.
        self._lines: defaultdict[str, list[tuple[int, int, MicroBatchId]]] = defaultdict(list)
        self._ready: Counter[int] = Counter()  # units that wait, by theta
        self._claims: defaultdict[str, dict[TrainUnit, None]] = defaultdict(dict)  # by worker
        self._loads = Loads(state)

    # --- offering ---

    def place(self, batch: Batch) -> None:
        """Send the trajectory to a likely trainer, and offer the units that may be trained to everybody."""
        if not batch.open or batch.silent:
            return
        self._send(batch)
        if batch.claims:
            self._keep_claims(batch)
        if not (batch.closed or self._streams.eligible(batch)):
            return
        taken = len(batch.running) + len(batch.claims) + len(batch.ready)
        for unit in batch.open if taken < len(batch.open) else ():
            if unit not in batch.running and unit not in batch.claims and unit not in batch.ready:
                batch.ready[unit] = None
                self._ready[batch.update] += 1
        if not batch.ready:
            return
        state = self._state
        for name in state.ledger.holders(batch.id):
            if state.fleet.workers[name].trains:
                self._list(batch, name)
                state.wake(name)
        if batch.closed:
            self._list(batch, _COMMON)
            # Not everybody may be able to take what is to be done again.
            rare = batch.avoid or state.step.merging
            state.wake_idle_trainers(len(state.fleet.workers) if rare else len(batch.ready))

    def redo(self, batch: Batch, unit: TrainUnit) -> int:
        """The unit's contribution is lost, or the unit failed: it has to run again, if any of its samples takes part.

        Returns:
            By how much the number of open units has grown: 1 or 0; -1 if it turns out that the unit need not run.
        """
        before = len(batch.open)
        batch.running.pop(unit, None)
        if batch.silent:
            self._withdraw(batch, unit)
            batch.open.pop(unit, None)
        elif unit not in batch.open:
            batch.open[unit] = None
            if batch.home is not None:
                self._loads.add(batch.home, batch.update, 1)
        return len(batch.open) - before

    def done(self, batch: Batch, unit: TrainUnit) -> None:
        """The unit is contributed."""
        del batch.open[unit]
        batch.running.pop(unit, None)
        if batch.home is not None:
            self._loads.add(batch.home, batch.update, -1)

    def leave_out(self, batch: Batch) -> None:
        """No sample of the micro-batch takes part: what does not run already is not trained on."""
        self.discard(batch)
        batch.open = {unit: None for unit in batch.open if unit in batch.running}

    def discard(self, batch: Batch) -> None:
        """Offer none of its units any more."""
        for unit in (*batch.ready, *batch.claims):
            self._withdraw(batch, unit)
        self._settle(batch, None)

    def forsake(self, batch: Batch, name: str) -> None:
        """The worker is gone, leaves, or has failed with it: others train on the micro-batch."""
        if batch.home == name:
            self._settle(batch, None)
        lost = not self._state.ledger.holders(batch.id)
        for unit, claimant in list(batch.claims.items()):
            if lost or claimant == name:
                self._withdraw(batch, unit)

    def lost(self, name: str) -> None:
        """A worker is gone; it has been forsaken by all micro-batches."""
        assert not self._claims.pop(name, None), f"train units are still claimed by {name}, which is gone"
        self._lines.pop(name, None)

    def begin(self) -> None:
        """A new iteration is in progress: only what is left to do for later updates counts."""
        self._loads.forget(self._state.theta)

    # --- taking ---

    def peek(self, worker: Worker) -> TrainUnit | None:
        """The first train unit that may run now and whose trajectory this worker holds, if there is one."""
        if not self._may_train(worker):
            return None
        for unit in self._claims.get(worker.name, ()):
            batch = self._state.batches[unit.micro_batch]
            if worker.name in self._state.ledger.holders(batch.id) and self._fits(batch, worker):
                return unit
        batch_here = self._first(worker.name, lambda batch: self._fits(batch, worker))
        return next(iter(batch_here.ready)) if batch_here is not None else None

    def next(self, worker: Worker) -> bool:
        """Dispatch the next train unit of this worker, if it may run one now; else let it claim one."""
        unit = self.peek(worker)
        if unit is None:
            return self._claim(worker) and self.next(worker)
        batch = self._state.batches[unit.micro_batch]
        if unit not in batch.claims and self._better_left(unit, worker):
            return False
        self._withdraw(batch, unit)
        batch.running[unit] = worker.name
        if not batch.closed:
            self._streams.admit(batch, worker.name)
        self._state.run(
            unit,
            worker,
            self._state.theta,
            TRAIN,
            batch.advantages,
            batch.theta,
            rewards=None if batch.closed else batch.rewards,
            baseline=0.0 if batch.closed else self._streams.baseline,
            closings=self._streams.deliver(worker.name),
        )
        return True

    def expects(self, worker: Worker) -> bool:
        """Whether a trajectory of the step in progress only has to arrive for this worker to train on it."""
        update, batches = self._state.theta + 1, self._state.batches
        return any(batches[unit.micro_batch].update == update for unit in self._claims.get(worker.name, ()))

    @property
    def waiting(self) -> int:
        """Train units of the step in progress that nobody has taken yet."""
        return self._ready[self._state.theta + 1]

    def _claim(self, worker: Worker) -> bool:
        """Let a worker with room have the first unit of the common line brought to it. Returns whether it is there."""
        state, name = self._state, worker.name
        claimed = len(worker.device) + len(self._claims.get(name, ()))
        if not self._ready[state.theta + 1] or claimed >= state.fleet.queue_depth or not self._may_train(worker):
            return False
        batch = self._first(
            _COMMON, lambda batch: copying(batch, name) not in state.postponed and self._fits(batch, worker)
        )
        if batch is None:
            return False
        unit = next(iter(batch.ready))
        if self._better_left(unit, worker):
            return False
        self._withdraw(batch, unit)
        batch.claims[unit] = name
        self._claims[name][unit] = None
        state.copy(batch, name)
        return name in state.ledger.holders(batch.id)

    def _first(self, name: str, fits: Callable[[Batch], bool]) -> Batch | None:
        """The first micro-batch in a line that has something ready for the step in progress and fits."""
        line, update, found = self._lines[name], self._state.theta + 1, None
        passed_over: list[tuple[int, int, MicroBatchId]] = []
        while found is None and line and line[0][0] <= update:
            theta, _, micro_batch = line[0]
            batch = self._state.batches.get(micro_batch)
            holders = self._state.ledger.holders(micro_batch)
            if batch is None or theta < update or not batch.ready or not (name in holders if name else holders):
                heappop(line)
                if batch is not None:
                    batch.lines.discard(name)
            elif fits(batch):
                found = batch
            else:
                passed_over.append(heappop(line))
        for entry in passed_over:
            heappush(line, entry)
        return found

    def _may_train(self, worker: Worker) -> bool:
        """Whether a worker may add to the gradient of the step in progress."""
        state = self._state
        # What a sealed accumulator holds is on its way to the lead: another gradient would arrive twice or never.
        return (
            worker.trains
            and state.step.phase == "collect"
            and not state.step.seals(worker.name)
            and worker.name in state.ledger.adapters(state.theta)
        )

    def _fits(self, batch: Batch, worker: Worker) -> bool:
        """Whether a worker that may train may train on this micro-batch."""
        state = self._state
        return (
            batch.update == state.theta + 1
            and batch.id.iteration == state.version
            and worker.name in state.ledger.adapters(batch.theta)
            and (batch.closed or self._streams.admits(batch, worker.name))
            and (worker.name not in batch.avoid or not self._others(batch))
        )

    def _others(self, batch: Batch) -> bool:
        """Whether some worker may train on the micro-batch that has not failed to."""
        return any(w.name not in batch.avoid and not self._state.step.seals(w.name) for w in self._state.able)

    def _better_left(self, unit: TrainUnit, worker: Worker) -> bool:
        """Whether others would have ended all units that are ready before this worker ended one more."""
        state, ready = self._state, self._ready[self._state.theta + 1]
        foresight = state.foresight
        if foresight is None or state.stuck:
            return False
        needs = {kind: foresight.unit_s(unit, kind) for kind in state.fleet.kinds}
        horizon = foresight.free_at(worker, state.now) + needs[worker.kind] - state.now
        most = sum(n * math.ceil(horizon / max(needs[kind], 1e-9)) for kind, n in state.fleet.kinds.items())
        if most <= ready:
            return False
        without = state.without(state.theta, worker)
        left = ready <= foresight.outrun(
            worker, unit, state.now, others=lambda w: w.trains, without=without, most=ready
        )
        if left:
            state.declined.add(worker.name)
        return left

    # --- claims, lines and homes ---

    def _keep_claims(self, batch: Batch) -> None:
        """Units are claimed by workers that have the trajectory, or to whom it is on its way."""
        for unit, name in list(batch.claims.items()):
            if name in self._state.ledger.holders(batch.id):
                self._state.wake(name)
                continue
            self._state.copy(batch, name)
            if name not in batch.copying:
                self._withdraw(batch, unit)

    def _withdraw(self, batch: Batch, unit: TrainUnit) -> None:
        """A unit neither waits nor is claimed."""
        if unit in batch.ready:
            del batch.ready[unit]
            self._ready[batch.update] -= 1
        claimant = batch.claims.pop(unit, None)
        if claimant is not None:
            del self._claims[claimant][unit]
            self._state.wake(claimant)

    def _list(self, batch: Batch, name: str) -> None:
        if name not in batch.lines:
            batch.lines.add(name)
            heappush(self._lines[name], (batch.update, batch.id.index, batch.id))

    def _send(self, batch: Batch) -> None:
        """Bring the trajectory to the trainer that would be done with it first, if no trainer has it."""
        state = self._state
        if batch.home is not None and batch.home in state.ledger.holders(batch.id):
            return
        if batch.home is None:
            near = [state.fleet.workers[name] for name in (*state.ledger.holders(batch.id), *batch.copying)]
            fit = next((w for w in near if "train" in w.roles and w.name not in batch.avoid), None)
            self._settle(batch, fit.name if fit is not None else self._likely(batch))
        if batch.home is not None and batch.home not in batch.avoid:
            state.copy(batch, batch.home)

    def _likely(self, batch: Batch) -> str | None:
        return self._loads.least(batch.update, next(iter(batch.open)), len(batch.open))

    def _settle(self, batch: Batch, home: str | None) -> None:
        for name, sign in ((batch.home, -1), (home, 1)):
            if name is not None:
                self._loads.add(name, batch.update, sign * len(batch.open))
        batch.home = home
