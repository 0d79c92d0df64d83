"""Saves checkpoints while a run goes on, without holding it up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from digenrl.config import RunConfig
from flows.history import History
from storage import checkpoints
from workers.listener import IterationReport, Listener, TrainerState


class Checkpointer(Listener):
    """Saves the published state every n iterations, one save at a time, in a thread.

    Args:
        root: where checkpoints go.
        config: the run's configuration.
        history: goes into each checkpoint; must hear of an iteration before this listener does.
        extra: more state for each checkpoint, e.g. the MLflow run id.
    """

    def __init__(self, root: Path | str, config: RunConfig, history: History, extra: dict[str, Any]) -> None:
        self._root = root
        self._config = config
        self._history = history
        self._extra = extra
        self._state: TrainerState | None = None
        self._complete = 0
        self._due: int | None = None
        self._saved: int | None = None
        self._saving: asyncio.Task[None] | None = None
        self.last: checkpoints.CheckpointInfo | None = None

    def published(self, version: int, state: TrainerState) -> None:
        """See Listener."""
        self._state = state
        self._start_if_due()

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._complete = report.iteration + 1
        every = self._config.checkpoint.every
        if every and self._complete % every == 0 and self._complete < self._config.iterations:
            self._due = self._complete
            self._start_if_due()

    async def finish(self) -> checkpoints.CheckpointInfo | None:
        """Save the last published state if that has not been done, and wait for it.

        Returns:
            The newest checkpoint, None if nothing was published yet.
        """
        if self._saving is not None:
            await self._saving
        if self._state is not None and self._saved != self._complete:
            await self._save(self._complete, self._state)
        return self.last

    def _start_if_due(self) -> None:
        updates = self._config.algorithm.updates_per_iteration
        if self._due is None or self._state is None or self._state.theta != self._due * updates:
            return
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save(self._due, self._state))
            self._due = None

    async def _save(self, complete: int, state: TrainerState) -> None:
        tensors = {"adapter": state.adapter, "optimizer": state.optimizer}
        content = {
            **self._extra,
            "theta": state.theta,
            "adapter_hash": state.adapter_hash,
            "config": self._config.model_dump(mode="json"),
            "history": self._history.to_state(),
        }
        self.last = await asyncio.to_thread(checkpoints.save, self._root, complete, tensors, content)
        self._saved = complete
        await asyncio.to_thread(checkpoints.prune, self._root, self._config.checkpoint.keep)


def restore(root: Path | str) -> tuple[int, TrainerState, checkpoints.Checkpoint] | None:
    """The newest whole checkpoint as (iterations complete, trainer state, checkpoint); None if there is none."""
    info = checkpoints.latest(root)
    if info is None:
        return None
    checkpoint = checkpoints.load(info)
    tensors, state = checkpoint.tensors, checkpoint.state
    trainer = TrainerState(state["theta"], tensors["adapter"], tensors["optimizer"], state["adapter_hash"])
    return info.iteration, trainer, checkpoint
