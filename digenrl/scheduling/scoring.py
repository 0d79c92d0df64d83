"""Stage 2: scores, on the cpu lanes, beside the devices."""

from __future__ import annotations

from heapq import heappop, heappush

from digenrl.identity import MicroBatchId
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.messages import Run
from digenrl.scheduling.state import State
from digenrl.scheduling.units import ScoreUnit


class Scoring:
    """Each micro-batch goes to the worker with the least to do on both lanes; among equals to one that has it.

    The slot is taken at once, the unit is dispatched when the trajectory is there.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._queue: list[tuple[int, MicroBatchId]] = []

    def queue(self, batch: Batch) -> None:
        """Wait for a worker that scores the micro-batch."""
        if batch.scorer is not None or batch.waits_for_score:
            return
        batch.waits_for_score = True
        heappush(self._queue, (-self._state.urgency(batch), batch.id))

    def proceed(self, batch: Batch) -> None:
        """Dispatch the unit if the trajectory has reached the scorer; else see that it is on its way."""
        if batch.scorer is None or batch.scoring:
            return
        if batch.scorer in self._state.ledger.holders(batch.id):
            batch.scoring = True
            self._state.emit(Run(ScoreUnit(batch.id), batch.scorer, batch.theta, self._state.urgency(batch)))
        else:
            self._state.copy(batch, batch.scorer)

    def assign(self) -> None:
        """Give waiting micro-batches to cpu lanes with room."""
        while self._queue:
            batch = self._state.batches.get(self._queue[0][1])
            # A trajectory that was lost meanwhile comes back here when it is generated again.
            if batch is not None and self._state.ledger.holders(batch.id):
                name = self._choose(batch)
                if name is None:
                    return
                batch.scorer = name
                self._state.fleet.give(ScoreUnit(batch.id), self._state.fleet.workers[name])
                self.proceed(batch)
            heappop(self._queue)
            if batch is not None:
                batch.waits_for_score = False

    def release(self, batch: Batch) -> None:
        """The scorer is lost, leaves or failed: somebody else scores the micro-batch."""
        worker = self._state.fleet.workers.get(batch.scorer or "")
        if worker is not None:
            self._state.fleet.take(ScoreUnit(batch.id), worker)
        batch.scorer = None
        batch.scoring = False

    def _choose(self, batch: Batch) -> str | None:
        scorers = self._state.fleet.scorers
        if batch.avoid:
            fresh = next((name for name in scorers if name not in batch.avoid), None)
            if fresh is not None:
                return fresh
        least = scorers.least()
        near = [*self._state.ledger.holders(batch.id), *batch.copying]
        return next((name for name in near if name in least), next(iter(least), None))
