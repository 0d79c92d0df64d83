"""Several rewards whose losses are clipped one by one: L = sum_q w_q L(A_q), L the loss of an algorithm.

    split_advantages    what that needs to know of each sample
    surrogate           the loss of each pair, of one advantage or of split ones

A loss that is clipped is linear in A on either side of 0, since only the sign of A decides what is clipped. The sum is
therefore L(A+) + L(A-), with A+ the sum of the positive w_q A_q and A- that of the negative ones: two numbers a sample,
however many rewards there are. Where the ratio is 1 this is L of the weighted sum of advantages; once it is not, a
sample that one reward praises and another blames is clipped on both sides instead of on that of the sum.

Source: DanceGRPO (arXiv 2505.07818), training of HunyuanVideo with two rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from digenrl.algorithms.advantages import AdvantageRule, K, SplitAdvantage, group_advantages
from digenrl.algorithms.mixing import Term, columns_of

if TYPE_CHECKING:
    from torch import Tensor

    from digenrl.algorithms.base import PolicyGradient, Replay
    from digenrl.algorithms.losses import PolicyTerms


def split_advantages(
    values_by_group: Sequence[Mapping[K, Mapping[str, float]]], terms: Sequence[Term], rule: AdvantageRule
) -> dict[K, SplitAdvantage]:
    """A+ and A- of every sample.

    Args:
        values_by_group: as in `digenrl.algorithms.mixing.summed_advantages`.
        terms: rewards, whose weights w_q are not negative.
        rule: how each reward is normalised and clipped; nobody is left out.

    Raises:
        ValueError: a weight is negative, or as `group_advantages`.
    """
    if negative := [term.weight for term in terms if term.weight < 0]:
        raise ValueError(f"weights of losses that are clipped apart must not be negative, got {negative}")
    rule = replace(rule, best_of_n=None)
    found: dict[K, SplitAdvantage] = {sample: (0.0, 0.0) for group in values_by_group for sample in group}
    for term in terms:
        for sample, advantage in group_advantages(columns_of(values_by_group, term, rule), rule).values.items():
            up, down = found[sample]
            found[sample] = up + term.weight * max(advantage, 0.0), down + term.weight * min(advantage, 0.0)
    return found


def surrogate(rules: PolicyGradient, ratio: Tensor, advantages: Tensor, replay: Replay) -> PolicyTerms:
    """The algorithm's loss of each pair, before it is weighted.

    Args:
        rules: the algorithm.
        ratio: (N,) with gradient.
        advantages: (N,), or (N, 2) split ones.
        replay: what the ratio is of.
    """
    if advantages.ndim == 1:
        return rules.surrogate(ratio, advantages, replay)
    up, down = (rules.surrogate(ratio, advantages[:, side], replay) for side in (0, 1))
    return up._replace(loss=up.loss + down.loss)
