"""Group-relative advantages: published values, missing samples, groups without signal."""

import itertools
import math

import numpy as np
import pytest
from golden_cases import Case, golden
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.algorithms.advantages import advantage_matrix, group_advantages
from digenrl.identity import SampleId

OPTIONS = {"adv_clip_max": 5.0, "zero_variance_tolerance": 1e-8}


def _by_group(rewards: np.ndarray, groups: np.ndarray) -> list[dict[int, float]]:
    return [{int(i): float(rewards[i]) for i in np.flatnonzero(groups == g)} for g in np.unique(groups)]


@golden("adv_stat_tracker")
def test_both_forms_equal_the_published_tracker(case: Case) -> None:
    rewards, groups = case["in_rewards"].numpy(), case["in_prompt_ids"].numpy()
    expected = case["out_advantages"].numpy()
    global_std = case.parameters["global_std"]
    matrix = advantage_matrix(rewards, groups, global_std=global_std)
    np.testing.assert_allclose(matrix, expected, rtol=1e-12, atol=1e-12)
    for column in range(rewards.shape[1]):
        result = group_advantages(
            _by_group(rewards[:, column], groups), std_scope="iteration" if global_std else "group", **OPTIONS
        )
        np.testing.assert_allclose(list(result.values.values()), expected[:, column], rtol=1e-12, atol=1e-12)
        assert not result.zero_variance


def test_values_are_plain_floats_in_the_order_of_identity() -> None:
    samples = [SampleId(0, 1, 2, g) for g in (3, 1, 0)]
    result = group_advantages([dict(zip(samples, [1.0, 0.0, 0.5], strict=True))], std_scope="group", **OPTIONS)
    assert list(result.values) == sorted(samples)
    assert all(type(value) is float for value in result.values.values())
    std = math.sqrt(1 / 6)
    assert result.values[samples[0]] == pytest.approx(0.5 / (std + 1e-4), rel=1e-15)


@pytest.mark.parametrize("scope", ["group", "update", "iteration"])
def test_missing_samples_are_absent_and_small_groups_have_no_policy_term(scope: str) -> None:
    groups = [{}, {"b0": 0.7}, {"c0": 0.1, "c2": 0.9}, {"d0": 0.4, "d1": 0.4}]
    result = group_advantages(groups, std_scope=scope, **OPTIONS)  # type: ignore[arg-type]
    assert result.zero_variance == {0, 1, 3}
    assert result.values.keys() == {"b0", "c0", "c2", "d0", "d1"}
    assert [result.values[k] for k in ("b0", "d0", "d1")] == [0.0, 0.0, 0.0]
    assert result.values["c0"] == -result.values["c2"] != 0


@pytest.mark.parametrize(("spread", "zero"), [(0.0, True), (1e-9, True), (1e-8, True), (1e-7, False)])
def test_zero_variance_is_judged_by_the_tolerance(spread: float, zero: bool) -> None:
    result = group_advantages([{0: 0.0, 1: spread}], std_scope="group", **OPTIONS)
    assert (0 in result.zero_variance) is zero
    assert any(result.values.values()) is not zero


def test_equal_rewards_whose_mean_rounds_give_exactly_zero() -> None:
    result = group_advantages([dict.fromkeys(range(3), 0.1)], std_scope="group", **OPTIONS)
    assert result.zero_variance == {0}
    assert list(result.values.values()) == [0.0, 0.0, 0.0]


def test_the_pooled_std_includes_every_reward_and_the_mean_stays_the_groups() -> None:
    groups = [{0: 0.0, 1: 1.0}, {2: 10.0, 3: 10.0}]
    result = group_advantages(groups, std_scope="update", **OPTIONS)
    std = float(np.std([0.0, 1.0, 10.0, 10.0]))
    assert result.values[1] == pytest.approx(0.5 / (std + 1e-4), rel=1e-14)
    assert result.zero_variance == {1}


def test_advantages_are_clipped() -> None:
    one_success = {i: float(i == 0) for i in range(40)}
    result = group_advantages([one_success], std_scope="group", **OPTIONS)
    assert result.values[0] == 5.0
    assert result.values[1] == pytest.approx(-1 / math.sqrt(39), rel=1e-3)
    mirrored = group_advantages([{i: -r for i, r in one_success.items()}], std_scope="group", **OPTIONS)
    assert mirrored.values[0] == -5.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="must be left out"):
        group_advantages([{0: 1.0, 1: bad}], std_scope="group", **OPTIONS)


def test_a_sample_in_two_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="7 is in group 1 and in an earlier one"):
        group_advantages([{7: 1.0, 1: 0.0}, {7: 1.0, 2: 0.0}], std_scope="group", **OPTIONS)


@settings(deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=5), st.sampled_from(["group", "update"]))
def test_the_order_of_arrival_does_not_change_a_bit(rewards: list[float], scope: str) -> None:
    items = list(enumerate(rewards))
    other = {100: 0.25, 101: 1.0}
    results = {
        tuple(group_advantages([dict(order), other], std_scope=scope, **OPTIONS).values.items())  # type: ignore[arg-type]
        for order in itertools.islice(itertools.permutations(items), 24)
    }
    assert len(results) == 1


def test_a_reward_that_is_the_mean_up_to_rounding_has_advantage_zero() -> None:
    """Trained on, what rounding leaves would make sums of gradients depend on their order."""
    rewards = dict(enumerate([0.0, 1 / 3, 2 / 3, 1 - 2 / 3, 0.0, 2 / 3]))
    mean = math.fsum(rewards.values()) / len(rewards)
    assert {r - mean for i, r in rewards.items() if i in (1, 3)} != {0.0}
    values = group_advantages([rewards], std_scope="group", **OPTIONS).values
    assert values[1] == values[3] == 0
    assert values[0] == -values[2] != 0
