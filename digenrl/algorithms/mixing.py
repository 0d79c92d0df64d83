"""Advantages of several rewards.

    Term                 one reward of a mix
    summed_advantages    the advantage of their weighted sum
    mixed_advantages     the weighted sum of their advantages
    columns_of           the values of one reward
    ranks                what normalise=rank makes of the values of a group

A sample has values of the rewards that its prompt names, and all samples of a group share a prompt: a reward that a
group has no values of neither adds to its advantages nor, where the standard deviation spans several groups, counts
there.

Sources: GDPO (arXiv 2601.05242), why rewards are normalised one by one; MixGRPO (arXiv 2507.21802), the weighted sum of
advantages.
Deviation: GDPO normalises the sum of advantages once more over the batch. `mixed_advantages` does not, as in MixGRPO;
`summed_advantages` of terms with normalise=std does, in the scope of the rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from digenrl.algorithms.advantages import AdvantageRule, Advantages, K, finished, group_advantages, normalised


@dataclass(frozen=True)
class Term:
    """One reward of a mix.

    Attributes:
        name: of the reward.
        weight: in the sum.
        normalise: what becomes of its values first. "std": their advantages, not clipped; "rank": see `ranks`.
    """

    name: str
    weight: float = 1.0
    normalise: Literal["none", "std", "rank"] = "none"


def summed_advantages(
    values_by_group: Sequence[Mapping[K, Mapping[str, float]]], terms: Sequence[Term], rule: AdvantageRule
) -> Advantages[K]:
    """Advantages of the weighted sum of what `normalise` makes of the rewards.

    Args:
        values_by_group: per group, the values of each sample that has them, by reward. With scope "update" or
            "iteration" exactly the groups of one of these.
        terms: rewards.
        rule: how sums become advantages, and how values are normalised where that is asked for.

    Raises:
        ValueError: a value is not finite, or a sample is in two groups.
    """
    sums: list[dict[K, float]] = [dict.fromkeys(group, 0.0) for group in values_by_group]
    for term in terms:
        columns = columns_of(values_by_group, term, rule)
        _add(sums, normalised(columns, rule)[0] if term.normalise == "std" else columns, term.weight)
    return group_advantages(sums, rule)


def mixed_advantages(
    values_by_group: Sequence[Mapping[K, Mapping[str, float]]], terms: Sequence[Term], rule: AdvantageRule
) -> Advantages[K]:
    """The weighted sum of the advantages of several rewards. A group has zero variance if it has in every reward.

    Args:
        values_by_group: as in `summed_advantages`.
        terms: rewards. Each is normalised by `rule` anyway, so "std" adds nothing.
        rule: how each is normalised; clipping and the choice of the best are applied to the sum.

    Raises:
        ValueError: as `summed_advantages`.
    """
    sums: list[dict[K, float]] = [dict.fromkeys(group, 0.0) for group in values_by_group]
    silent = frozenset(range(len(values_by_group)))
    for term in terms:
        advantages, without_variance = normalised(columns_of(values_by_group, term, rule), rule)
        silent &= without_variance
        _add(sums, advantages, term.weight)
    return finished(sums, silent, (), rule)


def ranks(values: Mapping[K, float], tolerance: float) -> dict[K, float]:
    """Ranks within a group, scaled to [0, 1]: 0 lowest, 1 highest. A sample alone has 0.5.

    Args:
        values: of a group.
        tolerance: neighbours that differ by no more are equal, and share the mean of their ranks.
    """
    ordered = sorted(values, key=lambda sample: values[sample])
    found: dict[K, float] = {}
    start = 0
    for end in range(1, len(ordered) + 1):
        if end < len(ordered) and values[ordered[end]] - values[ordered[end - 1]] <= tolerance:
            continue
        # Places start .. end - 1 of 0 .. n - 1.
        share = (start + end - 1) / (2 * (len(ordered) - 1)) if len(ordered) > 1 else 0.5
        found.update(dict.fromkeys(ordered[start:end], share))
        start = end
    return {sample: found[sample] for sample in values}


def columns_of(
    values_by_group: Sequence[Mapping[K, Mapping[str, float]]], term: Term, rule: AdvantageRule
) -> list[dict[K, float]]:
    """The values of one reward, per group; none of groups that it does not score."""
    columns = [
        {sample: values[term.name] for sample, values in group.items() if term.name in values}
        for group in values_by_group
    ]
    return [ranks(column, rule.zero_variance_tolerance) for column in columns] if term.normalise == "rank" else columns


def _add(sums: Sequence[dict[K, float]], columns: Sequence[Mapping[K, float]], weight: float) -> None:
    for total, column in zip(sums, columns, strict=True):
        for sample, value in column.items():
            total[sample] += weight * value
