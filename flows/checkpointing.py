"""Saves checkpoints while a run goes on, without holding it up, and looks at them before it is resumed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from typing import Any

import numpy as np

from digenrl.config import EvaluationConfig, RunConfig
from digenrl.config.changes import CHANGEABLE, forbidden_changes
from digenrl.config.errors import ConfigError
from digenrl.policy import NumberedAdapter
from flows.history import History
from flows.stores import Stores
from storage import checkpoints
from storage.outages import Outage
from storage.retention import Merits
from storage.runs import RunDirectory
from storage.stores import Store
from workers.listener import IterationReport, Listener, TrainerState

logger = logging.getLogger(__name__)

#: Pauses before a save that failed is tried again, each up to half shorter by chance.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0
#: How long the end of a run waits for storage that cannot be reached, before it saves in the run's own directory.
PATIENCE_S = 60.0


class Checkpointer(Listener):
    """Saves the published state every n iterations, one save at a time, in a thread.

    While the storage fails the newest state that is due is kept, and tried again. A state is that between two
    iterations, when every pair before it is trained or excluded: its number says where to go on, and samples made ahead
    of it are made again by identity, which costs less than to move and to keep them.

    Args:
        stores: where checkpoints go.
        config: the run's configuration.
        history: goes into each checkpoint; must hear of an iteration before this listener does.

    Attributes:
        extra: more state for each checkpoint, e.g. the MLflow run id.
        last: the newest checkpoint, None if there is none.
    """

    def __init__(self, stores: Stores, config: RunConfig, history: History) -> None:
        self._stores = stores
        self._config = config
        self._history = history
        self._state: TrainerState | None = None
        self._due: TrainerState | None = None
        self._closed = 0
        self._saved: int | None = None
        self._saving: asyncio.Task[None] | None = None
        self._outage = Outage()
        self._gives_up_at = math.inf
        self._hurry = asyncio.Event()
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
        elsewhere = self._stores.main is not self._stores.local
        if self._state is not None and self._saved != self._trained(self._state):
            self._begin(self._state)
        self._gives_up_at = time.monotonic() + (patience_s if elsewhere else 0.0)
        self._hurry.set()
        if self._saving is not None:
            await self._saving
        if self._due is not None:
            await self._save(self._due, self._stores.local)
            if elsewhere:
                where = f"the last checkpoint is in {self._stores.local.root}, from where the run can be resumed"
                logger.warning("%s cannot take checkpoints yet: %s", self._stores.main.root, where)
        return self.last

    def _trained(self, state: TrainerState) -> int:
        """Iterations that made `state`."""
        return state.theta // self._config.algorithm.updates_per_iteration

    def _save_if_due(self) -> None:
        every = self._config.checkpoint.every
        # An iteration's state is published before or after the iteration closes; the history must have both.
        if self._state is None or self._trained(self._state) != self._closed or not every or self._closed % every:
            return
        if self._closed != self._config.iterations:  # `finish` saves it
            self._begin(self._state)

    def _begin(self, state: TrainerState) -> None:
        """Save a state, as soon as the save before it has ended."""
        if self._due is not None and self._due is not state:
            logger.info("after %d iterations the save before is not done", self._trained(state))
        self._due = state
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._save_what_is_due())

    async def _save_what_is_due(self) -> None:
        """Storage that fails does not end the run: it may answer again."""
        pause_s = FIRST_PAUSE_S
        while (state := self._due) is not None:
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
                if time.monotonic() >= self._gives_up_at:
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), pause_s * random.uniform(0.5, 1.0))
                self._hurry.clear()
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                pause_s = FIRST_PAUSE_S
                if self._due is state:
                    self._due = None
                if (outage_s := self._outage.end()) is not None:
                    logger.warning(
                        "checkpoints are saved in %s again after %.0f s; the newest has %d iterations",
                        *(self._stores.main.root, outage_s, self._trained(state)),
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
            "history": self._history.until(complete).to_state(),
        }
        self.last = await asyncio.to_thread(checkpoints.save, store, complete, tensors, content)
        self._saved = complete
        logger.info("saved %s", self.last.url)
        merits = merits_of(self._history, self._config.evaluation)
        await asyncio.to_thread(checkpoints.prune, store, self._config.checkpoint.keep, merits)


def merits_of(history: History, evaluation: EvaluationConfig | None) -> Merits:
    """What held-out samples say of a run's versions so far.

    Args:
        history: of the run.
        evaluation: tells which versions are still to be evaluated; None: none is.
    """
    rewards = {version: float(np.mean(list(of.values()))) for version, of in history.evaluations.items() if of}
    every, known = evaluation.every if evaluation is not None else 0, history.evaluations
    awaited = [n for n in range(0, history.iterations + 1, every) if n not in known] if every else []
    return Merits(rewards, awaited)


def restore(stores: Stores, *, level: int = logging.WARNING) -> tuple[int, TrainerState, checkpoints.Checkpoint] | None:
    """The newest whole checkpoint as (iterations complete, trainer state, checkpoint); None if there is none.

    With stale groups it holds the weights of the version before too, under which some of the next samples are made.

    Args:
        stores: of the run.
        level: at which a damaged checkpoint is logged.
    """
    checkpoint = checkpoints.newest(*stores.distinct, level=level)
    if checkpoint is None:
        return None
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
    return checkpoint.info.iteration, trainer, checkpoint


def check_resumable(
    directory: RunDirectory, config: RunConfig, stores: Stores, checkpoint: checkpoints.Checkpoint | None
) -> None:
    """Whether the newest whole checkpoint of a run leaves something to do, and goes with the configuration.

    Args:
        directory: of the run.
        config: as it is now.
        stores: of the run.
        checkpoint: what was found there.

    Raises:
        ConfigError: the run is complete, or a setting was changed that makes another run of it.
    """
    if checkpoint is None:
        _check_not_elsewhere(directory, stores)
        return
    info, state = checkpoint.info, checkpoint.state
    if changes := forbidden_changes(state["config"], config):
        raise ConfigError(
            *(f"{change}; set it back in {directory.config_path}, or train a new run" for change in changes),
            *([f"what may change on resume: {', '.join(CHANGEABLE)}"] if len(changes) > 1 else []),
        )
    evaluates = config.evaluation.every and config.evaluation.prompts and config.data.held_out is not None
    evaluated = not evaluates or str(config.iterations) in state["history"]["evaluations"]
    if info.iteration > config.iterations or (info.iteration == config.iterations and evaluated):
        raise ConfigError(
            f"the run {directory.name!r} is complete: {info.url} has {info.iteration} iterations, and "
            f"iterations={config.iterations}; nothing is left to resume"
        )


def _check_not_elsewhere(directory: RunDirectory, stores: Stores) -> None:
    """A run whose checkpoints are not looked for where they are would begin again."""
    last = str(directory.summary_if_whole().get("checkpoint") or "")
    if last.startswith("file:") and stores.main is stores.local:
        return  # they were removed
    if last and not any(last.startswith(store.url("")) for store in stores.distinct):
        raise ConfigError(
            f"the newest checkpoint of the run {directory.name!r} is {last}, and none is in {stores.main.root}: set "
            f"checkpoint.url back in {directory.config_path}"
        )


def check_unused(stores: Stores) -> None:
    """Whether a run that begins has its place for checkpoints for itself.

    Raises:
        ConfigError: another one of its name has saved there.
    """
    if any(info.iteration > 0 for info in checkpoints.committed(stores.main)):
        raise ConfigError(
            f"{stores.main.root} holds checkpoints of another run: continue it with `digenrl resume "
            f"{stores.main.root}`, or choose another --name"
        )
