"""Rewards by name. A new reward is one file and one line here.

reward_names()        every registered name
reward_class(name)    the class behind a name
make_reward(config)   the reward with its settings, not loaded yet
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from digenrl.config.errors import did_you_mean, shown
from digenrl.config.rewards import PYTHON_PREFIX, RewardConfig
from digenrl.rewards.base import Reward, RewardError

#: Name -> module:class. Imported on use, so that a run loads only the models of the rewards it names.
REWARDS: dict[str, str] = {
    "aesthetic_predictor": "digenrl.rewards.aesthetic_predictor:AestheticPredictor",
    "classifier": "digenrl.rewards.classifier:Classifier",
    "clip_score": "digenrl.rewards.clip:ClipScore",
    "http": "digenrl.rewards.http:HttpReward",
    "jpeg_compressibility": "digenrl.rewards.jpeg:JpegCompressibility",
    "jpeg_incompressibility": "digenrl.rewards.jpeg:JpegIncompressibility",
    "ocr": "digenrl.rewards.ocr:OcrReward",
    "ocr_ddddocr": "digenrl.rewards.ocr_ddddocr:DdddocrReward",
    "pickscore": "digenrl.rewards.clip:PickScore",
    "vlm_judge": "digenrl.rewards.vlm_judge:VlmJudge",
}

#: Settings that say something of the term in the mix, not of the reward.
_OF_THE_TERM = {"name", "weight", "normalise", "label", "frames"}


def reward_names() -> tuple[str, ...]:
    """Registered names, sorted."""
    return tuple(sorted(REWARDS))


def reward_class(name: str) -> type[Reward]:
    """The class of a registered reward.

    Raises:
        RewardError: the name is not registered; says which is nearest.
    """
    if name not in REWARDS:
        known = [*reward_names(), f"{PYTHON_PREFIX}MODULE:FUNCTION for one of your own"]
        raise RewardError(f"{shown(name)} is not a registered reward{did_you_mean(name, known, 'rewards')}")
    module, _, attribute = REWARDS[name].partition(":")
    found: type[Reward] = getattr(import_module(module), attribute)
    return found


def make_reward(config: RewardConfig) -> Reward:
    """A reward with its settings; `Reward.load` loads its weights.

    Raises:
        RewardError: the name is not registered, or a setting is missing, wrong, or of no use to this reward.
    """
    if config.name.startswith(PYTHON_PREFIX):
        from digenrl.rewards.python import PythonReward

        _settings(config, {})
        reward: Reward = PythonReward(config.name.removeprefix(PYTHON_PREFIX))
    else:
        found = reward_class(config.name)
        reward = found(**_settings(config, inspect.signature(found).parameters))
    reward.name = config.called
    return reward


def _settings(config: RewardConfig, parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The settings a reward takes, checked."""
    fields = RewardConfig.model_fields
    given = {
        key: getattr(config, key)
        for key in fields
        if key not in _OF_THE_TERM and getattr(config, key) != fields[key].get_default(call_default_factory=True)
    }
    if useless := [key for key in given if key not in parameters]:
        takes = ", ".join(parameters) or "none"
        raise RewardError(
            f"{config.name} has no use for {', '.join(useless)}; delete {'it' if len(useless) == 1 else 'them'} "
            f"(settings it takes: {takes})"
        )
    missing = [name for name, p in parameters.items() if p.default is p.empty and name not in given]
    if missing:
        meaning = "; ".join(f"{name}: {(fields[name].description or '').rstrip('.')}" for name in missing)
        raise RewardError(f"{config.name} needs {' and '.join(missing)} ({meaning})")
    return given
