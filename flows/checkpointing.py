"""Saves checkpoints while a run goes on, without holding it up, and goes back to an earlier one if it must."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from digenrl.config import RunConfig
from digenrl.guard.watch import Guard
from digenrl.prompts import PromptSet, taken_before
from flows.history import History
from flows.merits import merits_of
from flows.patience import Patience
from flows.resuming import Restored, restore
from flows.stores import Stores
from storage import checkpoints
from storage.outages import Outage
from storage.retention import Merits
from storage.stores import Store
from workers.listener import IterationReport, Listener, TrainerState

logger = logging.getLogger(__name__)

#: How long the end of a run waits for storage that cannot be reached, before it saves in the run's own directory.
PATIENCE_S = 60.0


class Checkpointer(Listener):
    """Saves the published state every n iterations, one save at a time, in a thread.

    With a guard that may stop the run, it also saves what is evaluated: to that the run may have to go back.

    While the storage fails, the newest state that is due and those to which the guard may go back are kept, and tried
    again. A state is that between two iterations, when every pair before it is trained or excluded: its number says
    where to go on, and samples made ahead of it are made again by identity, which costs less than to move and to keep
    them.

    Args:
        stores: where checkpoints go.
        config: the run's configuration.
        history: goes into each checkpoint; must hear of an iteration before this listener does.
        prompts: that the run trains on.
        guard: what it knows goes into each checkpoint; None if nothing is watched. It may hear of an iteration after
            this listener, since a save begins when all have.

    Attributes:
        extra: more state for each checkpoint, e.g. the MLflow run id.
        last: the newest checkpoint, None if there is none.
    """

    def __init__(
        self, stores: Stores, config: RunConfig, history: History, prompts: PromptSet, guard: Guard | None = None
    ) -> None:
        self._stores = stores
        self._prompts = prompts
        self._guard = guard
        self._config = config
        self._history = history
        self._state: TrainerState | None = None
        self._due: dict[int, TrainerState] = {}
        self._closed = 0
        self._saved: int | None = None
        self._saving: asyncio.Task[None] | None = None
        self._outage = Outage()
        self._patience = Patience()
        self.extra: dict[str, Any] = {}
        self.last: checkpoints.CheckpointInfo | None = None

    @property
    def degraded_s(self) -> float:
        """Seconds that checkpoints could not be saved so far."""
        return self._outage.seconds

    def published(self, version: int, state: TrainerState) -> None:
        """See Listener."""
        self._state = state
        self._save_if_due()

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._closed = report.iteration + 1
        self._save_if_due()

    async def finish(self, patience_s: float = PATIENCE_S) -> checkpoints.CheckpointInfo | None:
        """Save the last published state if that has not been done, and wait for it.

        Args:
            patience_s: how long storage elsewhere may fail; then the state goes into the run's own directory.

        Returns:
            The newest checkpoint, None if nothing was published yet.

        Raises:
            OSError: it cannot be saved there either.
        """
        if self._state is not None and self._saved != self._trained(self._state):
            self._begin(self._state)
        await self._end_saves(patience_s)
        return self.last

    async def go_back(self, good: int, patience_s: float = PATIENCE_S) -> Restored | None:
        """Instead of `finish`: end with the state after `good` iterations, and remove newer checkpoints.

        Args:
            good: iterations; if no state after so many was saved, the newest before it is meant.
            patience_s: how long storage elsewhere may fail.

        Returns:
            What the run ends with, None if that is the base model.

        Raises:
            OSError: the storage does not answer; newer checkpoints may still be there.
        """
        self._due = {complete: state for complete, state in self._due.items() if complete <= good}
        try:
            await self._end_saves(patience_s)
        except OSError as error:
            logger.warning("the state after %d iterations cannot be saved: %s", max(self._due), error)
        while True:
            try:
                removed = [
                    folder
                    for store in self._stores.distinct
                    for folder in await asyncio.to_thread(checkpoints.rewind, store, good)
                ]
                logger.info("back to iteration %d: removed %s", good, ", ".join(removed) or "nothing")
                left = await asyncio.to_thread(restore, self._stores)
            except OSError:
                logger.info("going back failed", exc_info=True)
                if not await self._patience.pause():
                    raise
            else:
                self.last = left[2].info if left is not None else None
                return left

    async def _end_saves(self, patience_s: float) -> None:
        """Wait for what is due; what storage elsewhere does not take goes into the run's own directory."""
        elsewhere = self._stores.main is not self._stores.local
        self._patience.ends_after(patience_s if elsewhere else 0.0)
        if self._saving is not None:
            await self._saving
        if not self._due:
            return
        for complete in sorted(self._due):
            await self._save(self._due[complete], self._stores.local)
        if elsewhere:
            where = f"the last checkpoint is in {self._stores.local.root}, from where the run can be resumed"
            logger.warning("%s cannot take checkpoints yet: %s", self._stores.main.root, where)

    def _trained(self, state: TrainerState) -> int:
        """Iterations that made `state`."""
        return state.theta // self._config.algorithm.updates_per_iteration

    def _may_return_to(self, iterations: int) -> bool:
        """Whether the guard will judge the weights after so many iterations, and may go back to them."""
        may_stop = self._guard is not None and self._guard.may_stop
        return may_stop and self._config.evaluates and iterations % self._config.evaluation.every == 0

    def _save_if_due(self) -> None:
        every = self._config.checkpoint.every
        due = (every and self._closed % every == 0) or self._may_return_to(self._closed)
        # An iteration's state is published before or after the iteration closes; the history must have both.
        if self._state is None or self._trained(self._state) != self._closed or not due:
            return
        if self._closed != self._config.iterations:  # `finish` saves it
            self._begin(self._state)

    def _begin(self, state: TrainerState) -> None:
        """Save a state, as soon as the save before it has ended."""
        complete = self._trained(state)
        if waiting := self._due.keys() - {complete}:
            logger.info("after %d iterations the state after %d is not saved yet", complete, max(waiting))
        needed = self._merits.needed
        self._due = {n: due for n, due in self._due.items() if n in needed} | {complete: state}
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_what_is_due())

    @property
    def _merits(self) -> Merits:
        return merits_of(self._history, self._config, self._guard)

    async def _save_what_is_due(self) -> None:
        """The newest first. Storage that fails does not end the run: it may answer again."""
        while self._due:
            complete = max(self._due)
            state = self._due[complete]
            try:
                await self._save(state, self._stores.main)
            except Exception as error:
                logger.info("saving failed", exc_info=True)
                if self._outage.begin():
                    said = str(error) or type(error).__name__
                    logger.warning(
                        "checkpoints cannot be saved in %s (%s); the run goes on, and it is tried again",
                        *(self._stores.main.root, said),
                    )
                if not await self._patience.pause():
                    return
            else:
                self._patience.renew()
                if self._due.get(complete) is state:
                    del self._due[complete]
                if (outage_s := self._outage.end()) is not None:
                    logger.warning(
                        "checkpoints are saved in %s again after %.0f s; the newest has %d iterations",
                        *(self._stores.main.root, outage_s, complete),
                    )

    async def _save(self, state: TrainerState, store: Store) -> None:
        complete = self._trained(state)
        tensors = {"adapter": state.adapter, "optimizer": state.optimizer}
        if state.previous is not None:
            tensors["previous_adapter"] = state.previous.weights
        if state.behaviour is not None:
            tensors["behaviour"] = state.behaviour
        content = {
            **self.extra,
            "theta": state.theta,
            "adapter_hash": state.adapter_hash,
            "previous_theta": state.previous.theta if state.previous is not None else None,
            "config": self._config.model_dump(mode="json"),
            "data": cursor(self._prompts, self._config, complete),
            "history": self._history.until(complete).to_state(),
        }
        if self._guard is not None:
            content["guard"] = self._guard.until(complete)
        info = await asyncio.to_thread(checkpoints.save, store, complete, tensors, content)
        logger.info("saved %s", info.url)
        if self._saved is None or complete >= self._saved:
            self._saved, self.last = complete, info
        await asyncio.to_thread(checkpoints.prune, store, self._config.checkpoint.keep, self._merits)


def cursor(prompts: PromptSet, config: RunConfig, iterations: int) -> dict[str, Any]:
    """Which prompts a run has, and how many of each source it has taken after so many iterations."""
    taken = taken_before(prompts, iterations, config.algorithm.prompts_per_iteration)
    return {"prompts": len(prompts), "sha256": prompts.fingerprint, "taken": taken}
