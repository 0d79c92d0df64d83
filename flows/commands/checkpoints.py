"""`digenrl checkpoints list|verify|prune RUN`: what is saved of a run, whether it is whole, and what may go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from flows.adoption import config_in, found_at, open_place, split_place
from flows.errors import ExpectedError
from flows.guarding import guard_of
from flows.history import History
from flows.merits import merits_of, rewards_of
from flows.stores import prefect_for, stores_of
from storage import checkpoints
from storage.checkpoints import CheckpointDamaged, CheckpointInfo, State, Survey
from storage.home import home
from storage.runs import RunDirectory
from storage.stores import Store


@dataclass(frozen=True)
class _Saved:
    """What a person named.

    Attributes:
        stores: that may hold checkpoints of the run.
        directory: of the run; None where only a place was given.
        config: likewise.
    """

    stores: Sequence[Store]
    directory: RunDirectory | None = None
    config: RunConfig | None = None


def show(run: str) -> None:
    """Print the checkpoints of a run, oldest first, with what is known of them."""
    found = {store.root: checkpoints.survey(store) for store in _saved(run).stores}
    every = [info for survey in found.values() for info in survey.committed]
    if not every:
        raise ExpectedError(f"the run {run!r} has no checkpoints in {' or '.join(found)}")
    rewards = rewards_of(_history(_newest_state(every)))
    rows = [("iterations", "saved", "size", "held-out reward", "where")]
    for info in sorted(every, key=lambda info: (info.iteration, info.saved_at_s)):
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(info.saved_at_s))
        reward = f"{rewards[info.iteration]:.3f}" if info.iteration in rewards else ""
        rows.append((str(info.iteration), saved, _size(info.size_bytes), reward, info.url))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        # Never cut: addresses are there to be copied.
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for survey in found.values():
        _print_rest(survey)


def verify(run: str) -> None:
    """Read everything and compare it with the manifests.

    Raises:
        ExpectedError: a checkpoint is damaged, or there is none.
    """
    whole, problems = 0, list[str]()
    for store in _saved(run).stores:
        survey = checkpoints.survey(store)
        problems += survey.damaged
        for info in reversed(survey.committed):
            try:
                checkpoints.load(info)
            except CheckpointDamaged as error:
                problems.append(str(error))
            else:
                whole += 1
                typer.echo(f"whole  {info.url}  {_size(info.size_bytes)}")
    for problem in problems:
        typer.echo(f"damaged  {problem}")
    if problems:
        raise ExpectedError(f"{len(problems)} of {whole + len(problems)} checkpoints are damaged")
    if not whole:
        raise ExpectedError(f"the run {run!r} has no checkpoints")


def prune(run: str) -> None:
    """Apply checkpoint.keep, and remove what interrupted saves left; what the guard may go back to stays.

    Raises:
        ConfigError: the run is being trained.
    """
    saved = _saved(run)
    if saved.directory is not None and saved.directory.is_held:
        raise ConfigError(f"the run {run!r} is being trained, and removes its old checkpoints itself")
    state = _newest_state([info for store in saved.stores for info in checkpoints.committed(store)])
    for store in saved.stores:
        config = saved.config or config_in(found_at(store, run), split_place(run)[0])
        merits = merits_of(_history(state), config, guard_of(config, state.get("guard")))
        removed = checkpoints.prune(store, config.checkpoint.keep, merits)
        if removed or store is saved.stores[0]:
            typer.echo("  ".join([f"{store.root}: {len(removed)} removed", *removed]))


def _saved(run: str) -> _Saved:
    if "/" in run:
        split_place(run)
        return _Saved([open_place(run)])
    directory = RunDirectory.open(home(), run)
    config = directory.read_config()
    with prefect_for(config):
        return _Saved(stores_of(directory, config).distinct, directory, config)


def _newest_state(infos: Sequence[CheckpointInfo]) -> State:
    """Of the newest checkpoint that can be read; empty if there is none."""
    for info in sorted(infos, key=lambda info: (info.iteration, info.saved_at_s), reverse=True):
        try:
            return checkpoints.load_state(info)
        except CheckpointDamaged:
            continue
    return {}


def _history(state: State) -> History:
    return History.from_state(state["history"]) if "history" in state else History()


def _print_rest(survey: Survey) -> None:
    for problem in survey.damaged:
        typer.echo(f"damaged: {problem}")
    if survey.unfinished:
        typer.echo(
            f"{len(survey.unfinished)} saves were interrupted or go on: {', '.join(survey.unfinished)}; "
            "`digenrl checkpoints prune` removes what is left of them"
        )


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes >= 2**19 else f"{size_bytes / 2**10:.1f} KiB"
