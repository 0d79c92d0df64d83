"""With which algorithms training may begin before a group is complete.

    hindrance    why not

Streaming sums gradients while rewards are missing and puts the advantages in afterwards (see
`digenrl.algorithms.streaming`). That is the ordinary gradient only if every advantage is (r - mean) / scale with a
mean and a scale that the group has in common, all samples take part, and no advantage is clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from digenrl.config.algorithm import AlgorithmConfig, DiffusionNftConfig, extreme_of
from digenrl.config.rewards import RewardConfig


def hindrance(algorithm: AlgorithmConfig, rewards: Sequence[RewardConfig] = ()) -> str | None:
    """Why advantages cannot be put in afterwards, and what helps, as the middle of a sentence; None: they can."""
    if algorithm.closing_scope != "group":
        return (
            f"cannot be combined with algorithm.std_scope={algorithm.std_scope}: only a group's own "
            f"standard deviation keeps advantages within adv_clip_max; use std_scope=group"
        )
    if algorithm.best_of_n is not None:
        return (
            f"cannot be combined with algorithm.best_of_n={algorithm.best_of_n}: which samples take part is known only "
            f"when their group is complete; use best_of_n=null"
        )
    if algorithm.reward_aggregation != "rewards":
        return (
            f"cannot be combined with algorithm.reward_aggregation={algorithm.reward_aggregation}: each reward has a "
            "mean and a standard deviation of its own, and would need sums of its own; use reward_aggregation=rewards"
        )
    for number, reward in enumerate(rewards):
        if reward.normalise != "none":
            return (
                f"cannot be combined with rewards.{number}.normalise={reward.normalise}: what a reward counts is known "
                f"only when its group is complete; use normalise=none"
            )
    if isinstance(algorithm, DiffusionNftConfig) and algorithm.adv_mode != "all":
        return (
            f"cannot be combined with algorithm.adv_mode={algorithm.adv_mode}, which makes of an advantage something "
            f"else than a multiple of it; use adv_mode=all"
        )
    return _clipping(algorithm)


def _clipping(algorithm: AlgorithmConfig) -> str | None:
    """Whether an advantage could be clipped."""
    bound, largest = algorithm.adv_clip_max, algorithm.largest_advantage
    if bound is None or largest <= bound:
        return None
    if math.isinf(largest):
        key, value = ("std_scope", "group") if algorithm.std_scope == "none" else ("trimmed_ratio", "0")
        cure = f"{key}={value}" if isinstance(algorithm, DiffusionNftConfig) else "adv_clip_max=null"
        return (
            f"needs advantages that algorithm.adv_clip_max={bound:g} never clips, but with "
            f"algorithm.{key}={getattr(algorithm, key)} they may be of any size; use {cure}"
        )
    fitting = [n for n in range(2, algorithm.samples_per_prompt) if extreme_of(n, algorithm.std_ddof) <= bound]
    fewer = f"at most {fitting[-1]} samples, " if fitting else ""
    return (
        f"needs advantages that algorithm.adv_clip_max={bound:g} never clips, but one sample of "
        f"algorithm.samples_per_prompt={algorithm.samples_per_prompt} can be further from the mean; use {fewer}a "
        f"larger adv_clip_max"
    )
