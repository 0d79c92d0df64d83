"""Accumulators: whole or not at all, no contribution twice, and the order leaves no trace."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.algorithms.accumulate import Accumulator, NonFiniteGradient
from digenrl.identity import MicroBatchId
from digenrl.scheduling.units import TrainUnit

WEIGHTS = {"a": torch.zeros(2, 3), "b": torch.zeros(4)}


def _unit(index: int) -> TrainUnit:
    return TrainUnit(MicroBatchId("train", 0, index), (0, 1))


def _gradient(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(w.shape, generator=generator) for name, w in WEIGHTS.items()}


def _filled(*indices: int) -> Accumulator[TrainUnit]:
    accumulator: Accumulator[TrainUnit] = Accumulator(WEIGHTS)
    for index in indices:
        accumulator.add(_unit(index), _gradient(index))
    return accumulator


def _equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_the_sum_is_rounded_once() -> None:
    accumulator: Accumulator[int] = Accumulator({"w": torch.zeros(1)})
    for key in range(4):
        accumulator.add(key, {"w": torch.full((1,), 2.0**-24)})
    accumulator.add(4, {"w": torch.ones(1)})
    assert float(accumulator.gradient()["w"]) == 1 + 2.0**-22  # float32 sums would stay at 1 in the other order
    assert accumulator.gradient()["w"].dtype == torch.float32


def test_an_empty_accumulator_has_a_zero_gradient() -> None:
    accumulator: Accumulator[int] = Accumulator(WEIGHTS)
    assert not accumulator.keys
    assert _equal(accumulator.gradient(), WEIGHTS)


def test_the_same_contribution_twice_is_refused() -> None:
    accumulator = _filled(0, 1)
    before = accumulator.gradient()
    with pytest.raises(ValueError, match="already in the accumulator"):
        accumulator.add(_unit(1), _gradient(1))
    assert _equal(accumulator.gradient(), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_contribution_that_is_not_finite_is_refused_before_anything_is_added(bad: float) -> None:
    accumulator = _filled(0)
    before = accumulator.gradient()
    gradient = _gradient(1)
    gradient["b"][3] = bad
    with pytest.raises(NonFiniteGradient, match="gradient of b"):
        accumulator.add(_unit(1), gradient)
    assert accumulator.keys == {_unit(0)}
    assert _equal(accumulator.gradient(), before)


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ({"a": torch.zeros(2, 3)}, "missing b; unexpected nothing"),
        ({**WEIGHTS, "c": torch.zeros(1)}, "missing nothing; unexpected c"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(5)}, r"b has shape \(5,\); expected \(4,\)"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(4).double()}, "float64; contributions are float32"),
    ],
)
def test_a_gradient_of_other_weights_is_refused(gradient: dict[str, torch.Tensor], message: str) -> None:
    accumulator = _filled(0)
    before = accumulator.gradient()
    with pytest.raises(ValueError, match=message):
        accumulator.add(_unit(1), gradient)
    assert _equal(accumulator.gradient(), before)


def test_a_spoiled_contribution_makes_every_sum_it_reaches_nan() -> None:
    lead, source = Accumulator(WEIGHTS), Accumulator(WEIGHTS)
    lead.add("unit 1", {name: torch.ones_like(w) for name, w in WEIGHTS.items()})
    source.spoil("unit 2")
    with pytest.raises(ValueError, match="already in the accumulator"):
        source.spoil("unit 2")
    lead.merge(source, {"unit 2"})
    assert lead.keys == {"unit 1", "unit 2"}
    assert all(bool(gradient.isnan().all()) for gradient in lead.gradient().values())


def test_merge_adds_everything_and_leaves_the_source_as_it_is() -> None:
    lead, source = _filled(0, 1), _filled(2, 3)
    kept = source.gradient()
    lead.merge(source, {_unit(2), _unit(3)})
    assert lead.keys == {_unit(i) for i in range(4)}
    assert _equal(lead.gradient(), _filled(0, 1, 2, 3).gradient())
    assert _equal(source.gradient(), kept) and source.keys == {_unit(2), _unit(3)}


def test_merge_refuses_a_different_set_whole_and_names_the_difference() -> None:
    lead = _filled(0)
    before = lead.gradient()
    with pytest.raises(ValueError, match=r"missing .*index=9.*; unexpected .*index=3"):
        lead.merge(_filled(2, 3), {_unit(2), _unit(9)})
    assert lead.keys == {_unit(0)}
    assert _equal(lead.gradient(), before)


def test_merge_refuses_what_is_already_held() -> None:
    lead = _filled(0, 1)
    before = lead.gradient()
    with pytest.raises(ValueError, match="already held"):
        lead.merge(_filled(1, 2), {_unit(1), _unit(2)})
    assert _equal(lead.gradient(), before)


def test_state_travels_and_is_a_copy() -> None:
    accumulator = _filled(0, 1)
    state = accumulator.state()
    accumulator.add(_unit(2), _gradient(2))
    back = Accumulator.from_state(state)
    assert back.keys == {_unit(0), _unit(1)}
    assert _equal(back.gradient(), _filled(0, 1).gradient())
    assert all(total.dtype == torch.float64 for total in state.sums.values())
    back.add(_unit(2), _gradient(2))
    assert _equal(back.gradient(), accumulator.gradient())


def test_a_gradient_that_was_handed_out_does_not_change() -> None:
    accumulator = _filled(0)
    early = accumulator.gradient()
    accumulator.add(_unit(1), _gradient(1))
    assert _equal(early, _filled(0).gradient())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    units=st.integers(2, 24),
    spread=st.integers(0, 12),
    workers=st.integers(1, 5),
)
def test_no_permutation_and_no_merging_changes_a_bit(seed: int, units: int, spread: int, workers: int) -> None:
    """Contributions whose scales lie up to 2^12 apart, as those of different timesteps do, summed in any way."""
    draw = random.Random(seed)
    weights = {"w": torch.zeros(64)}
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(64, generator=generator) * 2.0 ** -draw.randint(0, spread) for _ in range(units)]

    def summed(order: list[int], parts: int) -> torch.Tensor:
        accumulators: list[Accumulator[int]] = [Accumulator(weights) for _ in range(parts)]
        for key in order:
            accumulators[draw.randrange(parts)].add(key, {"w": gradients[key]})
        draw.shuffle(accumulators)
        lead, *others = accumulators
        for other in others:
            lead.merge(Accumulator.from_state(other.state()), other.keys)
        assert lead.keys == set(range(units))
        return lead.gradient()["w"]

    reference = summed(list(range(units)), 1)
    exact = torch.tensor([math.fsum(float(g[i]) for g in gradients) for i in range(64)], dtype=torch.float64).float()
    assert torch.equal(reference, exact)
    for _ in range(3):
        assert torch.equal(summed(draw.sample(range(units), units), workers), reference)
