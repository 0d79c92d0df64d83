"""Gold rewards: they say what the trained reward was to stand for, and are never trained on.

gold_names(config)      of a run, with null resolved for this machine
make_gold(names)        ready to use
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from digenrl.config import RunConfig
from digenrl.rewards import ocr_ddddocr
from digenrl.rewards.base import Reward
from digenrl.rewards.registry import make_reward

#: Trained reward -> (the same by another engine, whether that engine is installed).
COUNTERPARTS: dict[str, tuple[str, Callable[[], bool]]] = {"ocr": ("ocr_ddddocr", ocr_ddddocr.installed)}


def gold_names(config: RunConfig) -> tuple[str, ...]:
    """Gold rewards of a run; none if the guard is off."""
    if config.guard.mode == "off":
        return ()
    if config.guard.gold is not None:
        return config.guard.gold
    trained = [reward.name for reward in config.rewards]
    found = [COUNTERPARTS[name] for name in trained if name in COUNTERPARTS]
    return tuple(gold for gold, installed in found if gold not in trained and installed())


def make_gold(names: Sequence[str]) -> tuple[Reward, ...]:
    """Load gold rewards.

    Raises:
        ValueError: a name is not registered.
        ModuleNotFoundError: its engine is not installed.
    """
    return tuple(make_reward(name) for name in names)
