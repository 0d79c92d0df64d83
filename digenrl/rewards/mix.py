"""Several rewards as one: a weighted sum that has a value only where every part has one.

RewardMix        the rewards of a run with their weights
Mixed            what it returns: the sums, and every part for the metrics
sampled_frames   which frames of a video are looked at

A prompt may name the rewards its pictures are scored by (routing); the others never see them. What becomes of the sums
and parts within a group is decided in `digenrl.algorithms.mixing`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from digenrl.config.errors import did_you_mean
from digenrl.config.rewards import RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, Reward, Score, Scored, score_of
from digenrl.rewards.registry import make_reward


@dataclass(frozen=True)
class Mixed:
    """Scores of B samples.

    Attributes:
        scores: B weighted sums with their parts; Failed where any part failed.
        parts: for every reward by name, its B scores before weighting; None for samples it does not score.
    """

    scores: tuple[Score, ...]
    parts: Mapping[str, tuple[Score | None, ...]]


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

    def check(self, prompt: PromptRecord) -> None:
        """Refuse a prompt that the rewards could not score.

        Raises:
            ValueError: it names a reward that is none of these, or one of its rewards refuses it.
        """
        names = [reward.name for reward, _ in self.terms]
        for name in prompt.rewards or ():
            if name not in names:
                raise ValueError(
                    f"prompt {prompt.uid!r} names the reward {name!r}, which is not among the run's rewards"
                    f"{did_you_mean(name, names, 'those are')}"
                )
        for reward, _ in self.terms:
            if prompt.scored_by(reward.name):
                reward.validate([prompt])

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> Mixed:
        """Score B samples, each with the rewards of its prompt.

        Args:
            images: (B, F, H, W, 3) uint8.
            prompts: B records, in the same order, that `check` does not refuse.

        Raises:
            ValueError: a reward did not return as many scores as it got samples.
        """
        parts = {reward.name: self._score(reward, images, prompts) for reward, _ in self.terms}
        weights = {reward.name: weight for reward, weight in self.terms}
        columns = [dict(zip(parts, column, strict=True)) for column in zip(*parts.values(), strict=True)]
        return Mixed(tuple(_weighted_sum(column, weights) for column in columns), parts)

    def _score(
        self, reward: Reward, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]
    ) -> tuple[Score | None, ...]:
        """The reward's scores of the samples it scores, with values that are not finite turned into failures."""
        rows = [row for row, prompt in enumerate(prompts) if prompt.scored_by(reward.name)]
        found: list[Score | None] = [None] * len(prompts)
        if not rows:
            return tuple(found)
        seen = images if len(rows) == len(prompts) else images[rows]
        frames = sampled_frames(images.shape[1], self.frames.get(reward.name))
        scores = reward(seen[:, frames], [prompts[row] for row in rows])
        if len(scores) != len(rows):
            raise ValueError(f"reward {reward.name} returned {len(scores)} scores for {len(rows)} samples")
        for row, score in zip(rows, scores, strict=True):
            found[row] = score_of(reward.name, score.value) if isinstance(score, Scored) else score
        return tuple(found)


def sampled_frames(frames: int, wanted: int | None) -> NDArray[np.intp]:
    """Which of the frames are looked at: `wanted` of them, evenly spaced, first and last among them; None: all."""
    if wanted is None or wanted >= frames:
        return np.arange(frames)
    return np.round(np.linspace(0, frames - 1, wanted)).astype(np.intp) if wanted > 1 else np.asarray([frames // 2])


def _weighted_sum(scores: Mapping[str, Score | None], weights: Mapping[str, float]) -> Score:
    """Sum of one sample's weighted values, or every reason why there is none."""
    reasons = [f"{name}: {score.reason}" for name, score in scores.items() if isinstance(score, Failed)]
    if reasons:
        return Failed("; ".join(reasons))
    values = {name: score.value for name, score in scores.items() if isinstance(score, Scored)}
    total = score_of("sum of " + ", ".join(values), sum(weights[name] * value for name, value in values.items()))
    return replace(total, parts=values) if isinstance(total, Scored) else total
