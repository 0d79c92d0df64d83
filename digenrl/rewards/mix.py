"""Several rewards as one: a weighted sum that has a value only where every part has one.

RewardMix        the rewards of a run with their weights
Mixed            what it returns: the sums, and every part for the metrics
sampled_frames   which frames of a video are looked at
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from digenrl.config.rewards import RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, Reward, Score, Scored, score_of
from digenrl.rewards.registry import make_reward


@dataclass(frozen=True)
class Mixed:
    """Scores of B samples.

    Attributes:
        scores: B weighted sums with their parts; Failed where any part failed.
        parts: for every reward by name, its B scores before weighting.
    """

    scores: tuple[Score, ...]
    parts: Mapping[str, tuple[Score, ...]]


class RewardMix:
    """Weighted sum of rewards.

    Args:
        terms: rewards with their weights; at least one, and no name twice.
        frames: by reward name, how many frames of a video it sees; all, where it is not named.

    Raises:
        ValueError: no terms, or a name appears twice.
    """

    def __init__(self, terms: Iterable[tuple[Reward, float]], frames: Mapping[str, int] | None = None) -> None:
        self.terms = tuple(terms)
        self.frames = dict(frames or {})
        names = [reward.name for reward, _ in self.terms]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a mix needs at least one reward and each name once, got {names}")

    @classmethod
    def of(cls, rewards: Sequence[RewardConfig]) -> RewardMix:
        """The rewards of a configuration, not loaded yet.

        Raises:
            RewardError: a setting is missing, wrong or of no use.
        """
        frames = {reward.called: reward.frames for reward in rewards if reward.frames is not None}
        return cls(((make_reward(reward), reward.weight) for reward in rewards), frames)

    def load(self) -> RewardMix:
        """Load every reward, here; returns the mix itself.

        Raises:
            RewardError: one of them cannot be loaded.
        """
        for reward, _ in self.terms:
            reward.load()
        return self

    def validate(self, prompts: Sequence[PromptRecord]) -> None:
        """Refuse prompts that any of the rewards could not score; see `Reward.validate`."""
        for reward, _ in self.terms:
            reward.validate(prompts)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> Mixed:
        """Score B samples with every reward.

        Args:
            images: (B, F, H, W, 3) uint8.
            prompts: B records, in the same order.

        Raises:
            ValueError: a reward did not return B scores.
        """
        parts = {reward.name: self._score(reward, images, prompts) for reward, _ in self.terms}
        weights = {reward.name: weight for reward, weight in self.terms}
        columns = [dict(zip(parts, column, strict=True)) for column in zip(*parts.values(), strict=True)]
        return Mixed(tuple(_weighted_sum(column, weights) for column in columns), parts)

    def _score(self, reward: Reward, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> tuple[Score, ...]:
        """The reward's scores, with values that are not finite turned into failures."""
        scores = reward(images[:, sampled_frames(images.shape[1], self.frames.get(reward.name))], prompts)
        if len(scores) != len(prompts):
            raise ValueError(f"reward {reward.name} returned {len(scores)} scores for {len(prompts)} samples")
        return tuple(score_of(reward.name, s.value) if isinstance(s, Scored) else s for s in scores)


def sampled_frames(frames: int, wanted: int | None) -> NDArray[np.intp]:
    """Which of the frames are looked at: `wanted` of them, evenly spaced, first and last among them; None: all."""
    if wanted is None or wanted >= frames:
        return np.arange(frames)
    return np.round(np.linspace(0, frames - 1, wanted)).astype(np.intp) if wanted > 1 else np.asarray([frames // 2])


def _weighted_sum(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """Sum of one sample's weighted values, or every reason why there is none."""
    reasons = [f"{name}: {score.reason}" for name, score in scores.items() if isinstance(score, Failed)]
    if reasons:
        return Failed("; ".join(reasons))
    values = {name: score.value for name, score in scores.items() if isinstance(score, Scored)}
    total = score_of("sum of " + ", ".join(values), sum(weights[name] * value for name, value in values.items()))
    return replace(total, parts=tuple(values.values())) if isinstance(total, Scored) else total
