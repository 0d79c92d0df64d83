"""Group-relative advantages: A = (r - mean of the group) / (std + eps).

    AdvantageRule       the settings
    group_advantages    what training uses: plain floats, missing samples, zero-variance groups
    normalised          the same without the choice of the best and the clip: one of several rewards

`digenrl.algorithms.mixing` makes advantages of several rewards.

Statistics are float64, two-pass. Sums are `math.fsum`, which rounds once, so the result does not depend on the order
in which samples arrived.

A sample whose reward failed is absent, never 0. A group with fewer than two samples left, or whose rewards (those that
count for its statistics) are all equal up to a tolerance, says nothing about which sample was better: its advantages
are 0 and it is named, so that callers can leave its policy term out. Dividing its rounding errors by eps would make
noise of order one of them. A reward that differs from its group's mean by rounding alone has advantage exactly 0: a
gradient of 1e-16 of the others' would not fit into a float64 sum of them, and the sum would depend on the order again.

Sources: Flow-GRPO (arXiv 2505.05470), per-prompt statistics; Dr.GRPO (arXiv 2503.20783), no standard deviation;
MixGRPO (arXiv 2507.21802), trimmed statistics; DanceGRPO (arXiv 2505.07818), best of n.
Deviation: a group without variance is left out, where the references multiply its rounding errors by 1 / eps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

StdScope = Literal["group", "update", "iteration", "none"]

#: Rewards such as 1/3 and 1 - 2/3, and their mean, are each off by up to an ulp.
ROUNDING_ULPS = 4


class _Identity(Protocol):
    """Hashable and ordered: a SampleId, a number, a string."""

    def __hash__(self) -> int: ...
    def __lt__(self, other: Any, /) -> bool: ...


K = TypeVar("K", bound=_Identity)


#: The positive and the negative part of several advantages, see `digenrl.algorithms.split`.
SplitAdvantage = tuple[float, float]

#: What a train unit is told of a sample.
Advantage = float | SplitAdvantage


@dataclass(frozen=True)
class AdvantageRule:
    """How rewards become advantages.

    Attributes:
        std_scope: "group" takes the standard deviation within each group, "update" and "iteration" over all rewards
            given; with "none" rewards are only centred. The mean is always the group's.
        ddof: subtracted from the number of rewards in the standard deviation: 0 population, 1 sample.
        eps: added to the standard deviation.
        trimmed_ratio: share of a group's lowest rewards, rounded down, that its mean and standard deviation leave out.
        best_of_n: only the n/2 samples of a group with the highest and the n/2 with the lowest advantage take part;
            None: all.
        adv_clip_max: advantages are clipped to +- this; None: not at all.
        zero_variance_tolerance: a group whose largest and smallest reward differ by no more has zero variance.
    """

    std_scope: StdScope = "group"
    ddof: float = 0
    eps: float = 1e-4
    trimmed_ratio: float = 0.0
    best_of_n: int | None = None
    adv_clip_max: float | None = 5.0
    zero_variance_tolerance: float = 1e-8


@dataclass(frozen=True)
class GroupStatistics:
    """What turns the rewards of a group into advantages: A = (r - mean) / scale, before clipping."""

    mean: float
    scale: float


@dataclass(frozen=True)
class Advantages(Generic[K]):
    """Advantages of the samples of some groups.

    Attributes:
        values: advantage of every sample that has a reward and is among the best and worst, ordered by identity.
        zero_variance: positions, in the sequence of groups, of those without a policy term (advantages exactly 0).
        statistics: of each group in the sequence, None for those without a policy term; empty where advantages are
            not those of one reward.
        middling: samples left out because they are not among the best and worst of their group.
        split: the same samples as in `values`, if their rewards' losses are clipped one by one; else empty.
    """

    values: dict[K, float]
    zero_variance: frozenset[int]
    statistics: tuple[GroupStatistics | None, ...] = ()
    middling: frozenset[K] = frozenset()
    split: Mapping[K, SplitAdvantage] = field(default_factory=dict)

    @property
    def told(self) -> Mapping[K, Advantage]:
        """What train units are told."""
        return self.split or self.values


def group_advantages(rewards_by_group: Sequence[Mapping[K, float]], rule: AdvantageRule) -> Advantages[K]:
    """Advantages of the samples of whole groups.

    Args:
        rewards_by_group: per group, the reward of each sample that has one. With scope "update" or "iteration" exactly
            the groups of one of these, as their rewards share one standard deviation; otherwise any groups.
        rule: how.

    Raises:
        ValueError: a reward is not finite, or a sample is in two groups.
    """
    _check_rewards(rewards_by_group)
    statistics = _statistics(rewards_by_group, rule)
    values = [_normalised(*group) for group in zip(rewards_by_group, statistics, strict=True)]
    return finished(values, frozenset(i for i, found in enumerate(statistics) if found is None), statistics, rule)


def normalised(
    rewards_by_group: Sequence[Mapping[K, float]], rule: AdvantageRule
) -> tuple[list[dict[K, float]], frozenset[int]]:
    """(reward - mean) / scale of every sample, and the positions of the groups without variance, where it is 0.

    Args:
        rewards_by_group: as in `group_advantages`; a group may be empty.
        rule: how.

    Raises:
        ValueError: as `group_advantages`.
    """
    _check_rewards(rewards_by_group)
    statistics = _statistics(rewards_by_group, rule)
    values = [_normalised(*group) for group in zip(rewards_by_group, statistics, strict=True)]
    return values, frozenset(i for i, found in enumerate(statistics) if found is None)


def finished(
    groups: Sequence[Mapping[K, float]],
    zero_variance: frozenset[int],
    statistics: tuple[GroupStatistics | None, ...],
    rule: AdvantageRule,
) -> Advantages[K]:
    """The best and worst of each group that has any, clipped, ordered by identity."""
    values: dict[K, float] = {}
    middling: set[K] = set()
    for position, group in enumerate(groups):
        left_out = set() if position in zero_variance else _middling(group, rule.best_of_n)
        middling |= left_out
        values.update({s: _clipped(a, rule.adv_clip_max) for s, a in group.items() if s not in left_out})
    ordered = {sample: values[sample] for sample in sorted(values)}
    return Advantages(ordered, zero_variance, statistics, frozenset(middling))


def _statistics(
    rewards_by_group: Sequence[Mapping[K, float]], rule: AdvantageRule
) -> tuple[GroupStatistics | None, ...]:
    """Mean and scale of every group, None for those without variance."""
    kept = [_untrimmed(list(group.values()), rule.trimmed_ratio) for group in rewards_by_group]
    pooled = _mean_std([reward for rewards in kept for reward in rewards], rule.ddof)[1]
    found: list[GroupStatistics | None] = []
    for rewards in kept:
        if len(rewards) < 2 or max(rewards) - min(rewards) <= rule.zero_variance_tolerance:
            found.append(None)
            continue
        mean, own = _mean_std(rewards, rule.ddof)
        std = own if rule.std_scope == "group" else pooled
        found.append(GroupStatistics(mean, 1.0 if rule.std_scope == "none" else std + rule.eps))
    return tuple(found)


def _untrimmed(rewards: list[float], ratio: float) -> list[float]:
    return sorted(rewards)[int(len(rewards) * ratio) :]


def _normalised(group: Mapping[K, float], statistics: GroupStatistics | None) -> dict[K, float]:
    """Advantages of one group, not clipped."""
    if statistics is None:
        return dict.fromkeys(group, 0.0)
    mean, scale = statistics.mean, statistics.scale
    rounding = ROUNDING_ULPS * math.ulp(max(map(abs, group.values())))
    return {s: (reward - mean) / scale if abs(reward - mean) > rounding else 0.0 for s, reward in group.items()}


def _middling(group: Mapping[K, float], best_of_n: int | None) -> set[K]:
    """Samples that are neither among the n/2 highest nor the n/2 lowest; equal ones rank by identity."""
    if best_of_n is None or len(group) <= best_of_n:
        return set()
    ranked = sorted(sorted(group), key=lambda sample: group[sample])
    return set(ranked[best_of_n // 2 : -best_of_n // 2])


def _clipped(advantage: float, bound: float | None) -> float:
    return advantage if bound is None else min(max(advantage, -bound), bound)


def _mean_std(rewards: Sequence[float], ddof: float) -> tuple[float, float]:
    """Mean and standard deviation; (0, 0) of nothing."""
    if len(rewards) <= ddof:
        return (rewards[0], 0.0) if rewards else (0.0, 0.0)
    mean = math.fsum(rewards) / len(rewards)
    return mean, math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - ddof))


def _check_rewards(rewards_by_group: Iterable[Mapping[K, float]]) -> None:
    seen: set[K] = set()
    for position, group in enumerate(rewards_by_group):
        for sample, reward in group.items():
            if not math.isfinite(reward):
                raise ValueError(f"the reward of {sample} is {reward}: a failed reward must be left out of its group")
            if sample in seen:
                raise ValueError(f"{sample} is in group {position} and in an earlier one")
            seen.add(sample)
