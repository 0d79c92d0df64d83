"""Iterations: opened with their version, closed by publishing the next one. With stale groups two of them are open."""

from __future__ import annotations

from digenrl.scheduling.adapters import Adapters
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.evaluation import Evaluations
from digenrl.scheduling.messages import CloseIteration, Publish
from digenrl.scheduling.pipeline import Pipeline
from digenrl.scheduling.scopes import Scopes
from digenrl.scheduling.state import State
from digenrl.scheduling.streams import Streams
from digenrl.scheduling.training import Training
from digenrl.scheduling.updates import Updates


class Iterations:
    """Begins and ends them.

    Attributes:
        last: the run ends after this one.
    """

    def __init__(
        self,
        state: State,
        scopes: Scopes,
        streams: Streams,
        training: Training,
        updates: Updates,
        adapters: Adapters,
        evaluations: Evaluations,
        pipeline: Pipeline,
    ) -> None:
        self._state = state
        self._scopes = scopes
        self._streams = streams
        self._training = training
        self._updates = updates
        self._adapters = adapters
        self._evaluations = evaluations
        self._pipeline = pipeline
        self.last = state.shape.iterations - 1
        # The last iteration in the books, and its micro-batches that have to wait for its version.
        self._foreseen = self.last
        self._fresh: dict[int, list[Batch]] = {}

    def begin(self) -> None:
        """Open the iteration of the current version, if there is one, and the version's evaluation.

        Stale groups of the iteration after it are opened as well: they need nothing but the current version.
        """
        state = self._state
        opened = self._evaluations.begin()
        if state.version <= self.last:
            if state.version not in self._fresh:
                opened += self._foresee(state.version)
            opened += self._fresh.pop(state.version)
            if state.shape.stale_groups and state.version < self.last:
                opened += self._foresee(state.version + 1)
            self._training.begin()
            self._updates.begin()
        self._pipeline.open(opened)
        if state.version <= self.last:
            self._pipeline.begin()

    def all_committed(self) -> None:
        """The last update of the iteration in progress is committed: its trajectories have served."""
        state = self._state
        state.stage = "publish"
        for batch in [b for b in state.batches.values() if b.id.phase == "train" and b.id.iteration == state.version]:
            state.release(batch)
        state.wake_all()

    def advance(self) -> None:
        """Do what can be done now: give up what nobody wants any more, publish."""
        if self._foreseen > self.last:
            self._discard_excess()
        if self._may_publish:
            self._publish()

    @property
    def finished(self) -> bool:
        """Whether the last one is over, and its version evaluated."""
        return self._state.version > self.last and not self._evaluations.running

    @property
    def _may_publish(self) -> bool:
        return (
            self._state.version <= self.last
            and self._updates.finished
            and not self._evaluations.running
            and self._state.lead in self._state.ledger.adapters(self._state.theta)
        )

    def _publish(self) -> None:
        """Close the iteration in progress, and go on with the next version."""
        state = self._state
        assert state.lead is not None
        iteration = state.version
        state.version += 1
        state.emit(Publish(state.version, state.theta, state.lead))
        self._streams.begin(self._scopes.mean_reward(iteration))
        trained, excluded, skipped = self._updates.accounts.pop(iteration).close()
        state.emit(CloseIteration(iteration, trained, excluded, skipped))
        self._scopes.forget(iteration)
        oldest = min(state.version_thetas)
        state.ledger.driver = {theta for theta in state.ledger.driver if theta >= oldest}
        self._adapters.retire()
        self.begin()
        if not self.finished:
            self._adapters.provide_all()

    def _foresee(self, iteration: int) -> list[Batch]:
        """Take an iteration into the books. Returns its stale micro-batches; the others wait in `_fresh`."""
        shape = self._state.shape
        batches = [Batch.of(shape, micro_batch) for micro_batch in shape.micro_batches(iteration)]
        self._scopes.open(batches)
        self._updates.open(iteration, batches)
        self._foreseen = iteration
        self._fresh[iteration] = [batch for batch in batches if not shape.staleness(batch.id)]
        return [batch for batch in batches if shape.staleness(batch.id)]

    def _discard_excess(self) -> None:
        """The run is to stop before an iteration of which stale groups have been begun."""
        for batch in [b for b in self._state.batches.values() if b.id.phase == "train" and b.id.iteration > self.last]:
            self._pipeline.discard(batch)
        self._foreseen = self.last
