"""Saves checkpoints while a run goes on, without holding it up, and looks at them before it is resumed."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

from digenrl.config import RunConfig
from digenrl.config.changes import CHANGEABLE, forbidden_changes
from digenrl.config.data import described
from digenrl.config.errors import ConfigError
from digenrl.guard.watch import Guard
from digenrl.policy import NumberedAdapter
from digenrl.prompts import PromptSet, load_data, taken_before
from flows.history import History
from storage import checkpoints
from storage.runs import RunDirectory
from workers.listener import IterationReport, Listener, TrainerState

logger = logging.getLogger(__name__)


class Checkpointer(Listener):
    """Saves the published state every n iterations, one save at a time, in a thread.

    With a guard that may stop the run, it also saves what is evaluated: to that the run may have to go back.

    Args:
        root: where checkpoints go.
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
        self, root: Path | str, config: RunConfig, history: History, prompts: PromptSet, guard: Guard | None = None
    ) -> None:
        self._root = root
        self._prompts = prompts
        self._guard = guard
        self._config = config
        self._history = history
        self._state: TrainerState | None = None
        self._closed = 0
        self._saved: int | None = None
        self._saving: asyncio.Task[None] | None = None
        self.extra: dict[str, Any] = {}
        self.last: checkpoints.CheckpointInfo | None = None

    def published(self, version: int, state: TrainerState) -> None:
        """See Listener."""
        self._state = state
        self._save_if_due()

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._closed = report.iteration + 1
        self._save_if_due()

    async def finish(self, good: int | None = None) -> checkpoints.CheckpointInfo | None:
        """Save the last published state if that has not been done, and wait for it.

        Args:
            good: iterations to go back to instead: newer checkpoints are removed.

        Returns:
            The newest checkpoint, None if there is none.
        """
        if self._saving is not None:
            await self._saving
        if good is not None:
            removed = await asyncio.to_thread(checkpoints.rewind, self._root, good)
            logger.info("back to iteration %d: removed %s", good, ", ".join(removed) or "nothing")
            self.last = await asyncio.to_thread(checkpoints.latest, self._root)
            return self.last
        if self._state is not None and self._saved != self._trained(self._state):
            await self._save(self._state)
        return self.last

    def _trained(self, state: TrainerState) -> int:
        """Iterations that made `state`."""
        return state.theta // self._config.algorithm.updates_per_iteration

    def _may_return_to(self, iterations: int) -> bool:
        every = self._config.evaluation.every
        return self._guard is not None and self._guard.may_stop and every > 0 and iterations % every == 0

    def _save_if_due(self) -> None:
        every = self._config.checkpoint.every
        due = (every and self._closed % every == 0) or self._may_return_to(self._closed)
        # An iteration's state is published before or after the iteration closes; the history must have both.
        if self._state is None or self._trained(self._state) != self._closed or not due:
            return
        if self._closed == self._config.iterations:
            return  # `finish` saves it
        if self._saving is not None and not self._saving.done():
            logger.info("no checkpoint after %d iterations: the one before is still being saved", self._closed)
            return
        self._saving = asyncio.create_task(self._save_or_warn(self._state))

    async def _save_or_warn(self, state: TrainerState) -> None:
        """Storage that fails does not end the run: later checkpoints may succeed, and the last one must."""
        try:
            await self._save(state)
        except Exception as error:
            logger.info("saving failed", exc_info=True)
            logger.warning("the checkpoint after %d iterations was not saved: %s", self._trained(state), error)

    async def _save(self, state: TrainerState) -> None:
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
        self.last = await asyncio.to_thread(checkpoints.save, self._root, complete, tensors, content)
        self._saved = complete
        logger.info("saved %s", self.last.url)
        needed = self._guard.needed if self._guard is not None else ()
        await asyncio.to_thread(checkpoints.prune, self._root, self._config.checkpoint.keep, needed)


def cursor(prompts: PromptSet, config: RunConfig, iterations: int) -> dict[str, Any]:
    """Which prompts a run has, and how many of each source it has taken after so many iterations."""
    taken = taken_before(prompts, iterations, config.algorithm.prompts_per_iteration)
    return {"prompts": len(prompts), "sha256": prompts.fingerprint, "taken": taken}


def restore(root: Path | str) -> tuple[int, TrainerState, checkpoints.Checkpoint] | None:
    """The newest whole checkpoint as (iterations complete, trainer state, checkpoint); None if there is none.

    With stale groups it holds the weights of the version before too, under which some of the next samples are made.
    """
    info = checkpoints.latest(root)
    if info is None:
        return None
    checkpoint = checkpoints.load(info)
    tensors, state = checkpoint.tensors, checkpoint.state
    previous = None
    if "previous_adapter" in tensors:
        previous = NumberedAdapter(state["previous_theta"], tensors["previous_adapter"])
    trainer = TrainerState(
        state["theta"],
        tensors["adapter"],
        tensors["optimizer"],
        state["adapter_hash"],
        previous,
        tensors.get("behaviour"),
    )
    return info.iteration, trainer, checkpoint


def check_resumable(directory: RunDirectory, config: RunConfig) -> None:
    """Whether the newest whole checkpoint of a run leaves something to do, and goes with the configuration.

    Args:
        directory: of the run.
        config: as it is now.

    Raises:
        ConfigError: the run is complete, or a setting was changed that makes another run of it.
    """
    info = checkpoints.latest(directory.checkpoints, level=logging.INFO)  # `restore` says it aloud
    if info is None:
        return
    state = checkpoints.load(info).state
    if changes := forbidden_changes(state["config"], config):
        raise ConfigError(
            *(f"{change}; set it back in {directory.config_path}, or train a new run" for change in changes),
            *([f"what may change on resume: {', '.join(CHANGEABLE)}"] if len(changes) > 1 else []),
        )
    _check_prompts(state, config)
    evaluates = config.evaluation.every and config.evaluation.prompts and config.data.holds_out
    evaluated = not evaluates or str(config.iterations) in state["history"]["evaluations"]
    if info.iteration > config.iterations or (info.iteration == config.iterations and evaluated):
        raise ConfigError(
            f"the run {directory.name!r} is complete: {info.url} has {info.iteration} iterations, and "
            f"iterations={config.iterations}; nothing is left to resume"
        )


def _check_prompts(state: dict[str, Any], config: RunConfig) -> None:
    """The next iteration's prompts follow from the number and order of all: others would make another run of it."""
    before, prompts = state.get("data"), load_data(config.data).train
    if before is None or before["sha256"] == prompts.fingerprint:
        return
    counts = f"{before['prompts']} then, {len(prompts)} now"
    raise ConfigError(
        f"data.prompts={described(config.data.prompts)} no longer holds the prompts that the checkpoint was made with "
        f"({counts}); put the file back as it was, or train a new run"
    )
