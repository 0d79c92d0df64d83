"""Group-relative advantages: published values, missing samples, groups without signal."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from golden_cases import Case, golden
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.algorithms.advantages import (
    AdvantageRule,
    Advantages,
    GroupStatistics,
    group_advantages,
)
from digenrl.algorithms.mixing import Term, mixed_advantages
from digenrl.identity import SampleId

GROUP = AdvantageRule()
DANCE = AdvantageRule(ddof=1, eps=1e-8, adv_clip_max=None)


def _blocks(rewards: torch.Tensor, size: int) -> list[dict[int, float]]:
    """Consecutive blocks of so many samples, as groups."""
    values = rewards.tolist()
    return [{i: values[i] for i in range(first, first + size)} for first in range(0, len(values), size)]


def _by_uid(rewards: torch.Tensor, uids: torch.Tensor) -> list[dict[int, float]]:
    return [{int(i): float(rewards[i]) for i in (uids == uid).nonzero()} for uid in uids.unique()]


def _check(result: Advantages[int], expected: torch.Tensor) -> None:
    """Ours are float64: 1e-12 where the reference is, its own rounding where it is float32."""
    limit = 1e-12 if expected.dtype == torch.float64 else 1e-5
    np.testing.assert_allclose(list(result.values.values()), expected.numpy(), rtol=limit, atol=limit)
    assert not result.zero_variance


@golden("adv_stat_tracker")
def test_population_statistics_of_flow_grpo(case: Case) -> None:
    rule = replace(GROUP, std_scope="iteration" if case.parameters["global_std"] else "group", adv_clip_max=None)
    for column in range(case["in_rewards"].shape[1]):
        groups = _by_uid(case["in_rewards"][:, column], case["in_prompt_ids"])
        _check(group_advantages(groups, rule), case["out_advantages"][:, column])


@golden("adv_dance")
def test_sample_statistics_of_dance_grpo(case: Case) -> None:
    """Without groups its statistics are those of one group of all samples."""
    rewards = case["in_rewards"]
    size = case.parameters["num_generations"] if case.parameters["use_group"] else len(rewards)
    _check(group_advantages(_blocks(rewards, size), DANCE), case["out_advantages"])


@golden("adv_mix")
def test_trimmed_statistics_and_weighted_advantages_of_mix_grpo(case: Case) -> None:
    p = case.parameters
    rule = replace(DANCE, trimmed_ratio=p["trimmed_ratio"])
    if p["multi_reward_mix"] == "reward_aggr":
        _check(group_advantages(_blocks(case["in_rewards"], p["num_generations"]), rule), case["out_advantages"])
        return
    both = zip(
        *(_blocks(case[f"in_rewards_{name}"], p["num_generations"]) for name in p["reward_weights"]), strict=True
    )
    names = list(p["reward_weights"])
    groups = [{i: dict(zip(names, (first[i], second[i]), strict=True)) for i in first} for first, second in both]
    terms = [Term(name, weight) for name, weight in p["reward_weights"].items()]
    _check(mixed_advantages(groups, terms, rule), case["out_advantages"])


@golden("adv_verl_omni")
def test_statistics_over_repeated_rewards_of_verl_omni(case: Case) -> None:
    """Each reward stands there K times, which leaves the mean and makes 1 / K of the ddof."""
    p, rewards = case.parameters, case["in_rewards"]
    scope = "none" if not p["norm_by_std"] else "iteration" if p["global_std"] else "group"
    rule = AdvantageRule(std_scope=scope, ddof=1 / rewards.shape[1], eps=p["epsilon"], adv_clip_max=None)
    _check(group_advantages(_by_uid(rewards[:, 0], case["in_uid"]), rule), case["out_advantages"][:, 0])


def test_seven_equal_rewards_and_one_other() -> None:
    """The extreme of a group of eight, on both sides."""
    rewards = {i: float(i == 3) for i in range(8)}
    for ddof, extreme in ((0, math.sqrt(7)), (1, 7 / math.sqrt(8))):
        values = group_advantages([rewards], AdvantageRule(ddof=ddof, eps=1e-12)).values
        assert values[3] == pytest.approx(extreme, rel=1e-11)
        assert all(values[i] == pytest.approx(-extreme / 7, rel=1e-11) for i in rewards if i != 3)


def test_trimming_leaves_the_lowest_out_of_the_statistics_only() -> None:
    rewards = {0: -100.0, 1: 0.0, 2: 1.0, 3: 2.0}
    result = group_advantages([rewards], AdvantageRule(trimmed_ratio=0.25))
    scale = math.sqrt(2 / 3) + 1e-4
    assert result.statistics == (GroupStatistics(1.0, scale),)
    assert result.values == pytest.approx({0: -5.0, 1: -1 / scale, 2: 0.0, 3: 1 / scale})
    # What is left is all equal: the outlier alone says nothing.
    assert group_advantages([{0: 0.0, 1: 1.0, 2: 1.0}], AdvantageRule(trimmed_ratio=0.4)).zero_variance == {0}


def test_best_of_n_takes_both_ends_and_keeps_the_statistics_of_all() -> None:
    rewards = dict(enumerate([0.5, 0.1, 0.9, 0.4, 0.6, 0.6, 0.2, 0.8]))
    everybody, chosen = (group_advantages([rewards], AdvantageRule(best_of_n=n)) for n in (None, 4))
    assert chosen.values.keys() == {1, 6, 7, 2} and chosen.middling == {0, 3, 4, 5}
    assert chosen.values == {i: everybody.values[i] for i in chosen.values}
    assert group_advantages([rewards], AdvantageRule(best_of_n=8)).middling == frozenset()


def test_best_of_n_ranks_equal_samples_by_identity_and_leaves_silent_groups_alone() -> None:
    tied = {3: 1.0, 2: 1.0, 1: 0.0, 0: 0.0, 4: 0.0}
    result = group_advantages([tied, dict.fromkeys(range(10, 14), 0.5)], AdvantageRule(best_of_n=2))
    assert result.values.keys() == {0, 3, 10, 11, 12, 13} and result.zero_variance == {1}


def test_without_a_standard_deviation_rewards_are_centred() -> None:
    result = group_advantages(
        [{0: 1.0, 1: 2.0}, {2: 10.0, 3: 30.0}], AdvantageRule(std_scope="none", adv_clip_max=None)
    )
    assert result.values == {0: -0.5, 1: 0.5, 2: -10.0, 3: 10.0}


def test_values_are_plain_floats_in_the_order_of_identity() -> None:
    samples = [SampleId(0, 1, 2, g) for g in (3, 1, 0)]
    result = group_advantages([dict(zip(samples, [1.0, 0.0, 0.5], strict=True))], GROUP)
    assert list(result.values) == sorted(samples)
    assert all(type(value) is float for value in result.values.values())
    std = math.sqrt(1 / 6)
    assert result.values[samples[0]] == pytest.approx(0.5 / (std + 1e-4), rel=1e-15)


@pytest.mark.parametrize("scope", ["group", "update", "iteration"])
def test_missing_samples_are_absent_and_small_groups_have_no_policy_term(scope: str) -> None:
    groups = [{}, {"b0": 0.7}, {"c0": 0.1, "c2": 0.9}, {"d0": 0.4, "d1": 0.4}]
    result = group_advantages(groups, AdvantageRule(std_scope=scope))  # type: ignore[arg-type]
    assert result.zero_variance == {0, 1, 3}
    assert result.values.keys() == {"b0", "c0", "c2", "d0", "d1"}
    assert [result.values[k] for k in ("b0", "d0", "d1")] == [0.0, 0.0, 0.0]
    assert result.values["c0"] == -result.values["c2"] != 0


@pytest.mark.parametrize(("spread", "zero"), [(0.0, True), (1e-9, True), (1e-8, True), (1e-7, False)])
def test_zero_variance_is_judged_by_the_tolerance(spread: float, zero: bool) -> None:
    result = group_advantages([{0: 0.0, 1: spread}], GROUP)
    assert (0 in result.zero_variance) is zero
    assert any(result.values.values()) is not zero


def test_equal_rewards_whose_mean_rounds_give_exactly_zero() -> None:
    result = group_advantages([dict.fromkeys(range(3), 0.1)], GROUP)
    assert result.zero_variance == {0}
    assert list(result.values.values()) == [0.0, 0.0, 0.0]


def test_the_pooled_std_includes_every_reward_and_the_mean_stays_the_groups() -> None:
    groups = [{0: 0.0, 1: 1.0}, {2: 10.0, 3: 10.0}]
    result = group_advantages(groups, AdvantageRule(std_scope="update"))
    std = float(np.std([0.0, 1.0, 10.0, 10.0]))
    assert result.values[1] == pytest.approx(0.5 / (std + 1e-4), rel=1e-14)
    assert result.zero_variance == {1}


def test_advantages_are_clipped() -> None:
    one_success = {i: float(i == 0) for i in range(40)}
    result = group_advantages([one_success], GROUP)
    assert result.values[0] == 5.0
    assert result.values[1] == pytest.approx(-1 / math.sqrt(39), rel=1e-3)
    mirrored = group_advantages([{i: -r for i, r in one_success.items()}], GROUP)
    assert mirrored.values[0] == -5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be left out"):
        group_advantages([{0: 1.0, 1: bad}], GROUP)


def test_a_sample_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="7 is in group 1 and in an earlier one"):
        group_advantages([{7: 1.0, 1: 0.0}, {7: 1.0, 2: 0.0}], GROUP)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=5), st.sampled_from(["group", "update"]))
def test_the_order_of_arrival_does_not_change_a_bit(rewards: list[float], scope: str) -> None:
    items = list(enumerate(rewards))
    other = {100: 0.25, 101: 1.0}
    results = {
        tuple(group_advantages([dict(order), other], AdvantageRule(std_scope=scope)).values.items())  # type: ignore[arg-type]
        for order in itertools.islice(itertools.permutations(items), 24)
    }
    assert len(results) == 1


def test_a_reward_that_is_the_mean_up_to_rounding_has_advantage_zero() -> None:
    """Trained on, what rounding leaves would make sums of gradients depend on their order."""
    rewards = dict(enumerate([0.0, 1 / 3, 2 / 3, 1 - 2 / 3, 0.0, 2 / 3]))
    mean = math.fsum(rewards.values()) / len(rewards)
    assert {r - mean for i, r in rewards.items() if i in (1, 3)} != {0.0}
    values = group_advantages([rewards], GROUP).values
    assert values[1] == values[3] == 0
    assert values[0] == -values[2] != 0
