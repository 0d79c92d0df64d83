"""Gold rewards: they say what the trained reward was to stand for, and are never trained on.

gold_rewards(config)    of a run, with null resolved for this machine
load_gold(rewards)      ready to use
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from digenrl.config import RewardConfig, RunConfig
from digenrl.rewards import ocr_ddddocr
from digenrl.rewards.base import Reward
from digenrl.rewards.registry import make_reward

#: Trained reward -> (the same by another engine, whether that engine is installed).
COUNTERPARTS: dict[str, tuple[str, Callable[[], bool]]] = {"ocr": ("ocr_ddddocr", ocr_ddddocr.installed)}


def gold_rewards(config: RunConfig) -> tuple[RewardConfig, ...]:
    """Gold rewards of a run; none if the guard is off."""
    if config.guard.mode == "off":
        return ()
    if config.guard.gold is not None:
        return config.guard.gold
    trained = {reward.name for reward in config.rewards}
    terms = [reward for reward in config.rewards if reward.name in COUNTERPARTS]
    found = {COUNTERPARTS[term.name]: term.field for term in terms}
    return tuple(
        RewardConfig(name=gold, field=field)
        for (gold, installed), field in found.items()
        if gold not in trained and installed()
    )


def load_gold(rewards: Sequence[RewardConfig]) -> tuple[Reward, ...]:
    """Load gold rewards.

    Raises:
        RewardError: one of them cannot be loaded.
    """
    loaded = tuple(make_reward(reward) for reward in rewards)
    for reward in loaded:
        reward.load()
    return loaded
