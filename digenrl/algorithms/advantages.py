"""Group-relative advantages: A = (r - mean of the group) / (std + eps).

    group_advantages    what training uses: plain floats, missing samples, zero-variance groups
    advantage_matrix    the published rule on a matrix of rewards, for comparison with other implementations

Statistics are float64, two-pass, with the population standard deviation. Sums are `math.fsum`, which rounds once, so
the result does not depend on the order in which samples arrived.

A sample whose reward failed is absent, never 0. A group with fewer than two samples left, or whose rewards are all
equal up to a tolerance, says nothing about which sample was better: its advantages are 0 and it is named, so that
callers can leave its policy term out. Dividing its rounding errors by eps would make noise of order one of them.
A reward that differs from its group's mean by rounding alone has advantage exactly 0: a gradient of 1e-16 of the
others' would not fit into a float64 sum of them, and the sum would depend on the order again.

Source: Flow-GRPO (arXiv 2505.05470), per-prompt statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

StdScope = Literal["group", "update", "iteration"]

#: Rewards such as 1/3 and 1 - 2/3, and their mean, are each off by up to an ulp.
ROUNDING_ULPS = 4


class _Identity(Protocol):
    """Hashable and ordered: a SampleId, a number, a string."""

    def __hash__(self) -> int: ...
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=_Identity)


@dataclass(frozen=True)
class GroupStatistics:
    """What turns the rewards of a group into advantages: A = (r - mean) / scale, before clipping."""

    mean: float
    scale: float


@dataclass(frozen=True)
class Advantages(Generic[K]):
    """Advantages of the samples of some groups.

    Attributes:
        values: advantage of every sample that has a reward, ordered by identity.
        zero_variance: positions, in the sequence of groups, of those without a policy term (advantages exactly 0).
        statistics: of each group in the sequence, None for those without a policy term.
    """

    values: dict[K, float]
    zero_variance: frozenset[int]
    statistics: tuple[GroupStatistics | None, ...]


def group_advantages(
    rewards_by_group: Sequence[Mapping[K, float]],
    *,
    std_scope: StdScope,
    adv_clip_max: float,
    zero_variance_tolerance: float,
    eps: float = 1e-4,
) -> Advantages[K]:
    """Advantages of the samples of whole groups.

    Args:
        rewards_by_group: per group, the reward of each sample that has one. For scope "group" any groups may be given;
            otherwise exactly those of one update or iteration, as their rewards share one standard deviation.
        std_scope: "group" takes the standard deviation within each group, the others over all rewards given. The mean
            is always the group's.
        adv_clip_max: advantages are clipped to +- this.
        zero_variance_tolerance: a group whose largest and smallest reward differ by no more has zero variance.
        eps: added to the standard deviation.

    Raises:
        ValueError: a reward is not finite, or a sample is in two groups.
    """
    _check_rewards(rewards_by_group)
    pooled = None
    if std_scope != "group":
        pooled = _mean_std([reward for group in rewards_by_group for reward in group.values()])[1]
    values: dict[K, float] = {}
    zero_variance = set()
    statistics: list[GroupStatistics | None] = []
    for position, group in enumerate(rewards_by_group):
        rewards = list(group.values())
        if len(rewards) < 2 or max(rewards) - min(rewards) <= zero_variance_tolerance:
            zero_variance.add(position)
            statistics.append(None)
            values.update(dict.fromkeys(group, 0.0))
            continue
        mean, std = _mean_std(rewards)
        scale = (std if pooled is None else pooled) + eps
        statistics.append(GroupStatistics(mean, scale))
        rounding = ROUNDING_ULPS * math.ulp(max(map(abs, rewards)))
        for sample, reward in group.items():
            distance = reward - mean if abs(reward - mean) > rounding else 0.0
            values[sample] = min(max(distance / scale, -adv_clip_max), adv_clip_max)
    ordered = {sample: values[sample] for sample in sorted(values)}
    return Advantages(ordered, frozenset(zero_variance), tuple(statistics))


def advantage_matrix(
    rewards: NDArray[np.float64], groups: NDArray[np.int64], *, global_std: bool, eps: float = 1e-4
) -> NDArray[np.float64]:
    """The published rule: columns are normalised separately, nothing is missing, nothing is clipped.

    Args:
        rewards: (N, K) rewards, one column per trained timestep.
        groups: (N,) group of each row.
        global_std: divide by the standard deviation of the whole column instead of the group's.
        eps: added to the standard deviation.

    Returns:
        (N, K) float64.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = np.empty_like(rewards)
    column_std = rewards.std(axis=0)
    for group in np.unique(groups):
        rows = groups == group
        own = rewards[rows]
        std = column_std if global_std else own.std(axis=0)
        advantages[rows] = (own - own.mean(axis=0)) / (std + eps)
    return advantages


def _mean_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and population standard deviation; (0, 0) of nothing."""
    if not rewards:
        return 0.0, 0.0
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))


def _check_rewards(rewards_by_group: Iterable[Mapping[K, float]]) -> None:
    seen: set[K] = set()
    for position, group in enumerate(rewards_by_group):
        for sample, reward in group.items():
            if not math.isfinite(reward):
                raise ValueError(f"the reward of {sample} is {reward}: a failed reward must be left out of its group")
            if sample in seen:
                raise ValueError(f"{sample} is in group {position} and in an earlier one")
            seen.add(sample)
