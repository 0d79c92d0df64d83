"""Advantages of several rewards: routed, ranked, normalised one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.algorithms.advantages import AdvantageRule, group_advantages
from digenrl.algorithms.mixing import Term, mixed_advantages, ranks, summed_advantages

GROUP = AdvantageRule()
EXACT = AdvantageRule(eps=1e-12, adv_clip_max=None)
VALUES = st.dictionaries(st.integers(0, 20), st.integers(-5, 5).map(float), min_size=1)


def both(a: dict[int, float], b: dict[int, float]) -> dict[int, dict[str, float]]:
    return {sample: {"a": a[sample], "b": b[sample]} for sample in a}


def test_weighted_advantages_ignore_the_scale_of_a_reward() -> None:
    groups = [both({0: 0.0, 1: 1.0, 2: 0.5}, {0: 1000.0, 1: 0.0, 2: 500.0})]
    balanced = mixed_advantages(groups, [Term("a"), Term("b")], AdvantageRule(eps=1e-12))
    assert list(balanced.values.values()) == pytest.approx([0.0, 0.0, 0.0], abs=1e-9)
    one, other = (mixed_advantages(groups, [Term("a", w), Term("b", 1 - w)], GROUP).values[1] for w in (1.0, 0.0))
    assert one > 0 > other
    assert balanced.statistics == ()


def test_a_mix_has_zero_variance_only_if_every_reward_has() -> None:
    groups = [
        both({0: 1.0, 1: 1.0}, {0: 2.0, 1: 3.0}),
        both({2: 1.0, 3: 1.0}, {2: 2.0, 3: 2.0}),
        both({4: 1.0}, {4: 1.0}),
        {},
    ]
    result = mixed_advantages(groups, [Term("a"), Term("b")], GROUP)
    assert result.zero_variance == {1, 2, 3}
    assert result.values[0] == -result.values[1] != 0 and result.values[2] == result.values[4] == 0.0


@pytest.mark.parametrize("scope", ["group", "update"])
def test_a_group_has_the_advantages_of_its_own_rewards(scope: str) -> None:
    """A routed group is what it would be in a run of its rewards alone; the others' values do not reach it."""
    rule = replace(EXACT, std_scope=scope)
    routed = [
        {0: {"a": 1.0}, 1: {"a": 3.0}},
        {2: {"b": 10.0}, 3: {"b": 50.0}},
        both({4: 0.0, 5: 1.0}, {4: 7.0, 5: 1.0}),
    ]
    terms = [Term("a", 2.0), Term("b", 0.5)]
    result = mixed_advantages(routed, terms, rule)
    a = group_advantages([{0: 1.0, 1: 3.0}, {4: 0.0, 5: 1.0}], rule).values
    b = group_advantages([{2: 10.0, 3: 50.0}, {4: 7.0, 5: 1.0}], rule).values
    expected = {s: 2.0 * a.get(s, 0.0) + 0.5 * b.get(s, 0.0) for s in range(6)}
    assert result.values == pytest.approx(expected)
    sums = summed_advantages(routed, terms, rule)
    assert sums == group_advantages([{0: 2.0, 1: 6.0}, {2: 5.0, 3: 25.0}, {4: 3.5, 5: 2.5}], rule)


def test_std_takes_the_scale_out_of_a_sum() -> None:
    groups = [both({0: 0.0, 1: 1.0, 2: 0.5}, {0: 1000.0, 1: 0.0, 2: 500.0})]
    plain = summed_advantages(groups, [Term("a"), Term("b")], GROUP)
    assert plain.values[0] > 1, "the larger reward decides"
    terms = [Term("a", 3.0, "std"), Term("b", 1.0, "std")]
    assert summed_advantages(groups, terms, GROUP).values == pytest.approx({0: -1.2247, 1: 1.2247, 2: 0.0}, abs=1e-3)
    even = [replace(term, weight=1.0) for term in terms]
    assert summed_advantages(groups, even, replace(GROUP, eps=1e-12)).zero_variance == {0}, "they cancel"


def test_ranks_do_not_feel_an_outlier() -> None:
    groups = [{0: {"a": 0.0}, 1: {"a": 1.0}, 2: {"a": 1e6}}]
    found = summed_advantages(groups, [Term("a", normalise="rank")], EXACT).values
    assert found == pytest.approx({0: -(1.5**0.5), 1: 0.0, 2: 1.5**0.5})
    assert mixed_advantages(groups, [Term("a", normalise="rank")], EXACT).values == pytest.approx(found)


def test_ranks_of_equal_values_are_equal_also_where_rounding_parts_them() -> None:
    assert ranks({0: 1 / 3, 1: 1 - 2 / 3, 2: 5.0, 3: -1.0}, 1e-8) == {0: 0.5, 1: 0.5, 2: 1.0, 3: 0.0}
    assert ranks({7: 3.0}, 0.0) == {7: 0.5} and ranks({}, 0.0) == {}
    assert summed_advantages([{0: {"a": 2.0}, 1: {"a": 2.0}}], [Term("a", normalise="rank")], GROUP).zero_variance == {
        0
    }


@given(values=VALUES, scale=st.sampled_from([0.5, 3.0]))
def test_ranks_keep_the_order_and_nothing_else(values: dict[int, float], scale: float) -> None:
    found = ranks(values, 0.0)
    assert list(found) == list(values) and sum(found.values()) == pytest.approx(len(values) / 2)
    assert all((found[i] < found[j]) == (values[i] < values[j]) for i in values for j in values)
    assert found == ranks({sample: scale * value**3 for sample, value in values.items()}, 0.0)
    assert found == {s: ranks(dict(reversed(values.items())), 0.0)[s] for s in values}, "not of the order of arrival"
