"""Stage 4: optimiser steps. Each collects its contributions, merges them on the lead, steps, and is committed.

    collect  train units end on the trainers; when none is left, the lead pulls the other accumulators (Reduce)
    update   the lead takes the step
    commit   the result is copied to a standby trainer, or to the driver; an iteration's last one always to the driver

Nothing is final before Committed. Until then the sources keep their accumulators, so that another lead can pull them
again; what only lost workers held is computed again. If adapter and optimiser state of the committed theta are lost
with all who had them, the run falls back to what the driver has, at worst the start of the iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from digenrl.scheduling.adapters import Adapters
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.ledger import Account, Contribution
from digenrl.scheduling.messages import AccumulatorRef, Cancel, Commit, Reduce, Trained, Updated
from digenrl.scheduling.state import UPDATE, RunOver, State, Step
from digenrl.scheduling.streams import Streams
from digenrl.scheduling.training import Training
from digenrl.scheduling.units import TrainUnit, UpdateUnit


class Updates:
    """The optimiser steps of the iteration in progress.

    Attributes:
        accounts: what became of the pairs of each open iteration.
    """

    def __init__(
        self, state: State, adapters: Adapters, training: Training, streams: Streams, *, max_bad_updates: int
    ) -> None:
        self._state = state
        self._adapters = adapters
        self._training = training
        self._streams = streams
        self._max_bad_updates = max_bad_updates
        self._target = state.theta
        self._bad: set[int] = set()
        self._skipped = False
        # By the theta they help to make: micro-batches without advantages yet, and train units without contribution.
        self._unclosed: Counter[int] = Counter()
        self._units: Counter[int] = Counter()
        self.accounts: dict[int, Account] = {}

    # --- what is to be done ---

    def open(self, iteration: int, batches: Sequence[Batch]) -> None:
        """Expect an iteration's contributions. These are all of its micro-batches."""
        shape = self._state.shape
        self._unclosed.update(batch.update for batch in batches)
        self.accounts[iteration] = Account(shape.groups * shape.group_size * len(shape.trained_steps(iteration)))

    def begin(self) -> None:
        """The iteration of the current version is in progress: its steps may be taken."""
        self._target = self._state.version_theta + self._state.shape.updates

    def close(self, batch: Batch) -> None:
        """The advantages of a micro-batch are known, and with them its train units."""
        self._unclosed[batch.update] -= 1
        self._units[batch.update] += len(batch.open)
        if batch.silent:
            for unit in self._state.shape.train_units(batch.id):
                self._state.ledger.void(unit)

    @property
    def finished(self) -> bool:
        """Whether all steps of the iteration in progress are committed."""
        return self._state.theta == self._target

    @property
    def drained(self) -> bool:
        """Whether nothing of the iteration in progress waits any more: its last step only has to be taken."""
        theta = self._state.theta + 1
        return theta >= self._target and not self._unclosed[theta] and not self._training.waiting

    @property
    def lacking(self) -> tuple[int, int]:
        """Of the step in progress: micro-batches without advantages, and train units without contribution."""
        return self._unclosed[self._state.theta + 1], self._units[self._state.theta + 1]

    # --- going on ---

    def choose_lead(self) -> None:
        """See that there is a lead if there is a trainer. One that is leaving finishes the merge it has begun."""
        state, step = self._state, self._state.step
        lead = state.fleet.workers.get(state.lead or "")
        if not state.trainers or (lead is not None and not lead.draining):
            return
        if lead is not None and (step.phase != "collect" or step.merging):
            if step.phase != "collect" or not any(self.lacking):
                return
            # What is lacking again cannot be added to accumulators that are sealed: begin the merge anew elsewhere.
            self._spoil(lead.name)
        ledger = state.ledger
        chosen = max(
            state.trainers,
            key=lambda w: (
                w.name in ledger.optimizers(state.theta),
                len(ledger.contributed(w.name)),
                w.name in ledger.adapters(state.theta),
                -w.order,
            ),
        )
        state.lead = chosen.name
        self._adapters.provide(chosen)

    def advance(self) -> None:
        """Do what can be done now: merge, step."""
        self.choose_lead()
        step = self._state.step
        lead = self._state.fleet.workers.get(self._state.lead or "")
        if step.phase != "collect" or self.finished or any(self.lacking) or lead is None:
            return
        if lead.name not in self._state.ledger.optimizers(self._state.theta):
            return
        ledger = self._state.ledger
        theta = self._state.theta + 1
        separate: list[str] = []
        if ledger.contributors_beside(lead.name) > step.sealed:  # else all is merged, or on its way
            separate = [w for w in ledger.contributors() if w != lead.name and not step.seals(w)]
        sources = [w for w in separate if _merging(w, theta) not in self._state.postponed]
        if sources:
            step.awaited.update(sources)
            contributions = {w: frozenset(ledger.contributed(w)) for w in sources}
            closings = self._streams.closings_of(theta)
            self._state.emit(Reduce(theta, lead.name, tuple(sources), contributions, closings))
        elif not separate and not step.awaited and self._state.fleet.has_room(lead):
            step.phase = "update"
            closings = self._streams.closings_of(theta)
            self._state.run(UpdateUnit(theta), lead, self._state.theta, UPDATE, closings=closings)

    def contributed(self, batch: Batch, unit: TrainUnit, worker: Worker, outcome: Trained) -> None:
        """A train unit ended on a worker that was meant to run it."""
        assert outcome.contributions == (unit,), f"{unit.label} reported other units than itself"
        excluded = {pair: reason for pair, reason in outcome.excluded.items() if pair[0] in batch.taking_part}
        pairs = frozenset((s, t) for s in batch.taking_part for t in unit.steps) - excluded.keys()
        self._state.ledger.contribute(unit, worker.name, Contribution(pairs, excluded))
        self._training.done(batch, unit)
        if batch.closed:
            self._units[batch.update] -= 1

    def redo(self, batch: Batch, unit: TrainUnit) -> None:
        """A train unit has to run again, if it is still wanted."""
        more = self._training.redo(batch, unit)
        if batch.closed:
            self._units[batch.update] += more

    def merged(self, source: str, target: str, theta: int) -> None:
        """A source's accumulator is in the lead's."""
        if self._current(source, target, theta):
            self._state.succeeded(_merging(source, theta))
            self._state.step.awaited.discard(source)
            self._state.step.merged.add(source)

    def merge_failed(self, source: str, target: str, theta: int, reason: str) -> None:
        """A source's accumulator did not reach the lead: pull again, or compute again what is lost with it."""
        if not self._current(source, target, theta):
            return
        self._state.step.awaited.discard(source)
        if self._state.fleet.alive(source):
            self._state.postpone(_merging(source, theta), target, reason)
        else:
            self._redo(source)

    def stepped(self, outcome: Updated) -> None:
        """The lead has taken the step."""
        assert self._state.lead is not None
        self._state.ledger.install(outcome.theta, self._state.lead, with_optimizer=True)
        self._skipped = outcome.skipped
        self._commit()

    def step_failed(self) -> None:
        """The lead could not take the step: it tries again."""
        self._state.step.phase = "collect"

    def committed(self, theta: int) -> bool:
        """The result is safe. Returns False if the news is stale."""
        state, step = self._state, self._state.step
        if step.phase != "commit" or theta != state.theta + 1:
            return False
        if step.standby is None:
            state.ledger.driver.add(theta)
        else:
            state.ledger.install(theta, step.standby, with_optimizer=True)
        settled = state.ledger.settle()
        contributions = [c for units in settled.values() for c in units.values() if c.pairs or c.excluded]
        self.accounts[state.version].enter(theta, contributions, skipped=self._skipped and bool(contributions))
        if self._skipped and contributions:
            self._count_bad(theta)
        for worker in dict.fromkeys([*settled, state.lead or ""]):
            state.drop(AccumulatorRef(theta, worker), worker)
        state.theta = theta
        state.step = Step()
        self._adapters.retire()
        self._adapters.provide_all()
        state.wake_all()
        return True

    # --- loss ---

    def lost(self, name: str) -> None:
        """A worker is gone. What was in its accumulator is computed again, unless the lead has it or may have it."""
        step = self._state.step
        if name == self._state.lead:
            self._state.lead = None
            self._unmerge()
        elif not step.seals(name):
            # An awaited accumulator may have been merged before its source died: the answer will tell.
            self._redo(name)
        if step is self._state.step and step.phase == "commit" and name == step.standby:
            self._commit()
        if not self._state.ledger.optimizers(self._state.theta) and self._state.theta not in self._state.ledger.driver:
            self._fall_back(max(self._state.ledger.driver))

    def unexpected(self, unit: TrainUnit, worker: Worker) -> None:
        """A train unit ended that was not, or no longer, meant to run there: its gradient must not count twice."""
        state, shape = self._state, self._state.shape
        if unit in state.ledger.contributed(worker.name) or state.step.seals(worker.name):
            return
        theta = shape.update_of_group(unit.micro_batch.iteration, shape.group_of(unit.micro_batch))
        if theta == state.theta + 1 and state.step.phase == "collect":
            self._spoil(worker.name)
        else:
            state.drop(AccumulatorRef(theta, worker.name), worker.name)

    # --- helpers ---

    def _current(self, source: str, target: str, theta: int) -> bool:
        state = self._state
        return target == state.lead and theta == state.theta + 1 and source in state.step.awaited

    def _commit(self) -> None:
        """Copy the lead's result to a second place. At an iteration's end that is the driver, who publishes it."""
        state, step = self._state, self._state.step
        assert state.lead is not None
        theta = state.theta + 1
        others = [w.name for w in state.trainers if w.name != state.lead]
        step.phase = "commit"
        step.standby = None if theta == self._target or not others else others[0]
        state.emit(Commit(theta, state.lead, step.standby))

    def _spoil(self, worker: str) -> None:
        """A worker's accumulator for the step in progress is of no use: compute again what is or would be in it."""
        state = self._state
        for batch in state.batches.values():
            for unit in [unit for unit, name in batch.running.items() if name == worker]:
                self._recall(batch, unit)
                self.redo(batch, unit)
        state.drop(AccumulatorRef(state.theta + 1, worker), worker)
        if worker == self._state.lead:
            self._unmerge()
        self._redo(worker)

    def _unmerge(self) -> None:
        """The lead's accumulator is gone. The others have kept theirs, except those who are gone themselves."""
        self._state.step = Step()
        for worker in self._state.ledger.contributors():
            if not self._state.fleet.alive(worker):
                self._redo(worker)

    def _redo(self, worker: str) -> None:
        for unit in self._state.ledger.disown(worker):
            self._state.disturbed = True
            batch = self._state.batches[unit.micro_batch]
            self.redo(batch, unit)

    def _count_bad(self, theta: int) -> None:
        self._bad.add(theta)
        if len(self._bad) > self._max_bad_updates:
            raise RunOver(
                f"{len(self._bad)} optimiser steps were skipped because their gradient was not finite "
                f"(the last one would have made theta {theta}); max_bad_updates={self._max_bad_updates} are allowed"
            )

    def _fall_back(self, theta: int) -> None:
        """Undo the steps after `theta`: nobody has the state they led to."""
        state = self._state
        undone, spoilt = state.theta + 1, dict.fromkeys(state.ledger.contributors())
        for worker in spoilt:
            state.ledger.disown(worker)
        state.theta = theta
        state.lead = None
        state.step = Step()
        self._bad = {bad for bad in self._bad if bad <= theta}
        self.accounts[state.version].take_back(theta)
        for batch in state.batches.values():
            if batch.update > theta:
                spoilt |= dict.fromkeys(batch.running.values())
                self._reopen(batch)
        for worker in spoilt:
            state.drop(AccumulatorRef(undone, worker), worker)
        self._adapters.retire()

    def _reopen(self, batch: Batch) -> None:
        for unit in batch.running:
            self._recall(batch, unit)
        for unit in self._state.shape.train_units(batch.id):
            self.redo(batch, unit)

    def _recall(self, batch: Batch, unit: TrainUnit) -> None:
        """Take a train unit back from its worker, whose accumulator is to be dropped next."""
        name = batch.running[unit]
        worker = self._state.fleet.workers.get(name)
        if worker is not None and self._state.fleet.take(unit, worker):
            self._state.emit(Cancel(unit, name))


def _merging(source: str, theta: int) -> str:
    return f"merging the gradient of {source} for theta {theta}"
