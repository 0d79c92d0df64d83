"""Losses of several rewards, clipped one by one: against the sum written out."""

from __future__ import annotations

import math

import pytest
import torch

from digenrl.algorithms.advantages import AdvantageRule, group_advantages
from digenrl.algorithms.base import PolicyGradient, Replay
from digenrl.algorithms.losses import clipped_surrogate
from digenrl.algorithms.mixing import Term, mixed_advantages
from digenrl.algorithms.registry import policy_gradient_of
from digenrl.algorithms.split import split_advantages, surrogate
from digenrl.algorithms.steps import StepTerms
from digenrl.config import DanceGrpoConfig, FlowDppoConfig

RULE = AdvantageRule(ddof=1, eps=1e-8)
#: Of three samples: praised by both rewards, by one, by the other.
GROUP = [{0: {"a": 1.0, "b": 30.0}, 1: {"a": 0.9, "b": 10.0}, 2: {"a": 0.0, "b": 29.0}}]
WEIGHTS = [1.0, 0.5]
TERMS = [Term("a", 1.0), Term("b", 0.5)]
CLIP = 1e-2


def _of_each() -> list[dict[int, float]]:
    return [group_advantages([{i: r[q] for i, r in GROUP[0].items()}], RULE).values for q in ("a", "b")]


def _replay(log_prob: torch.Tensor) -> Replay:
    mean = log_prob.detach()[:, None].expand(-1, 4)
    one = torch.ones(len(log_prob), 1, dtype=torch.float64)
    return Replay(mean, log_prob, mean * 0, torch.zeros_like(log_prob).detach(), StepTerms(one, one, one, one))


def _gradients(rules: PolicyGradient, moved: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the split loss, and of the sum over rewards written out; ratios on both sides of the clip range and inside."""
    split = split_advantages(GROUP, TERMS, RULE)
    found = []
    for apart in (True, False):
        log_prob = torch.tensor([moved, -moved, moved / 100], dtype=torch.float64).requires_grad_()
        replay = _replay(log_prob)
        ratio = rules.ratio(replay)
        if apart:
            loss = surrogate(rules, ratio, torch.tensor([split[i] for i in range(3)], dtype=torch.float64), replay).loss
        else:
            of_each = [torch.tensor([a[i] for i in range(3)], dtype=torch.float64) for a in _of_each()]
            loss = sum(w * rules.surrogate(ratio, a, replay).loss for w, a in zip(WEIGHTS, of_each, strict=True))
        found.append(torch.autograd.grad(loss.sum(), log_prob)[0])
    return found[0], found[1]


@pytest.mark.parametrize("moved", [0.0, 0.5, -0.5])
@pytest.mark.parametrize(
    "section",
    [DanceGrpoConfig(clip_range=CLIP), FlowDppoConfig(divergence_threshold=1e-3)],
    ids=lambda section: section.name,
)
def test_two_numbers_stand_for_any_number_of_rewards(section: DanceGrpoConfig, moved: float) -> None:
    apart, written_out = _gradients(policy_gradient_of(section), moved)
    torch.testing.assert_close(apart, written_out, rtol=1e-14, atol=1e-16)


def test_a_sample_that_is_praised_and_blamed_is_clipped_on_both_sides() -> None:
    up, down = split_advantages(GROUP, TERMS, RULE)[1]
    assert up > 0 > down
    far = torch.tensor([math.log(1.5)], dtype=torch.float64)

    def slope(*advantages: float) -> float:
        new = far.clone().requires_grad_()
        ratio = new.exp()
        loss = sum(clipped_surrogate(ratio, torch.tensor([a]), CLIP, None).loss.sum() for a in advantages)
        return float(torch.autograd.grad(loss, new)[0])

    # Beyond the range only the blame is left, whichever of the two is larger.
    assert slope(up, down) == pytest.approx(-down * 1.5, rel=1e-6) != slope(up + down)


def test_each_reward_is_normalised_and_clipped_by_itself() -> None:
    split, summed = split_advantages(GROUP, TERMS, RULE), mixed_advantages(GROUP, TERMS, RULE).values
    assert {i: up + down for i, (up, down) in split.items()} == pytest.approx(summed, rel=1e-12)
    first, second = _of_each()
    assert split[1] == pytest.approx((first[1], 0.5 * second[1]), rel=1e-12)
    tight = split_advantages(GROUP, [Term("a"), Term("b", 3.0)], AdvantageRule(ddof=1, adv_clip_max=0.1))
    assert all(up <= 0.1 * 4 and down >= -0.1 * 4 for up, down in tight.values())
    assert tight[0] == pytest.approx((0.4, 0.0))


def test_a_reward_without_variance_says_nothing() -> None:
    terms, one, other = [Term("a"), Term("b")], {"a": 1.0, "b": 5.0}, {"a": 0.0, "b": 5.0}
    assert split_advantages([{0: one, 1: other}], terms, RULE)[0] == pytest.approx((math.sqrt(0.5), 0))
    assert split_advantages([{0: one}, {}], terms, RULE) == {0: (0.0, 0.0)}


def test_a_negative_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must not be negative, got \[-0.5\]"):
        split_advantages(GROUP, [Term("a"), Term("b", -0.5)], RULE)
