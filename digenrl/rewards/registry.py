"""Rewards by name. A new reward is one file and one line here.

reward_names()      every registered name
make_reward(name)   the reward, ready to use
"""

from __future__ import annotations

from importlib import import_module

from digenrl.config.errors import did_you_mean
from digenrl.rewards.base import Reward

#: Name -> module:class. Imported on use, so that a run loads only the models of the rewards it names.
REWARDS: dict[str, str] = {
    "ocr": "digenrl.rewards.ocr:OcrReward",
    "ocr_ddddocr": "digenrl.rewards.ocr_ddddocr:DdddocrReward",
    "jpeg_compressibility": "digenrl.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "digenrl.rewards.jpeg:JpegIncompressibility",
}


def reward_names() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(REWARDS))


def make_reward(name: str) -> Reward:
    """Load one reward.

    Raises:
        ValueError: the name is not registered; says which is nearest.
    """
    if name not in REWARDS:
        raise ValueError(f"{name!r} is not a registered reward{did_you_mean(name, reward_names(), 'rewards')}")
    module, _, attribute = REWARDS[name].partition(":")
    reward: Reward = getattr(import_module(module), attribute)()
    return reward
