"""What a run finds of itself before it begins or goes on: its newest checkpoint, and whether that goes with it.

restore(stores) -> (iterations, TrainerState, Checkpoint) | None
check_resumable(directory, config, stores, checkpoint)
check_unused(stores)
"""

from __future__ import annotations

import logging
from typing import Any

from digenrl.config import RunConfig
from digenrl.config.changes import CHANGEABLE, forbidden_changes
from digenrl.config.data import described
from digenrl.config.errors import ConfigError
from digenrl.policy import NumberedAdapter
from digenrl.prompts import load_data
from flows.stores import Stores
from storage import checkpoints
from storage.runs import RunDirectory
from workers.listener import TrainerState

Restored = tuple[int, TrainerState, checkpoints.Checkpoint]


def restore(stores: Stores, *, level: int = logging.WARNING) -> Restored | None:
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
    _check_prompts(state, config)
    evaluated = not config.evaluates or str(config.iterations) in state["history"]["evaluations"]
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
