"""What speaks for keeping a checkpoint: its held-out reward, and that the guard may have to go back to it."""

from __future__ import annotations

import numpy as np

from digenrl.config import RunConfig
from digenrl.guard.watch import Guard
from flows.history import History
from storage.retention import Merits


def merits_of(history: History, config: RunConfig, guard: Guard | None) -> Merits:
    """What is known of a run's versions so far.

    Args:
        history: of the run.
        config: tells which versions are still to be evaluated.
        guard: of the run; None if nothing is watched.
    """
    return Merits(rewards_of(history), awaited := _awaited(history, config), _needed(guard, awaited))


def rewards_of(history: History) -> dict[int, float]:
    """Mean held-out reward by version."""
    return {version: float(np.mean(list(of.values()))) for version, of in history.evaluations.items() if of}


def _awaited(history: History, config: RunConfig) -> list[int]:
    if not config.evaluates:
        return []
    return [n for n in range(0, history.iterations + 1, config.evaluation.every) if n not in history.evaluations]


def _needed(guard: Guard | None, awaited: list[int]) -> set[int]:
    """To what the guard may go back, also if that is not judged yet."""
    if guard is None or not guard.may_stop:
        return set()
    judged = guard.last.version if guard.last is not None else -1
    return {*guard.needed, *(version for version in awaited if version > judged)}
