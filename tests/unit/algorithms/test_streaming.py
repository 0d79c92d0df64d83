"""Deferred advantages against the ordinary gradient, in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.algorithms.accumulate import Accumulator, NonFiniteGradient
from digenrl.algorithms.advantages import AdvantageRule, Advantages, GroupStatistics, group_advantages
from digenrl.algorithms.streaming import StreamedGradient, UpdateAccumulator

WEIGHTS = {"a": torch.zeros(2, 3, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
Gradient = dict[str, torch.Tensor]
Sample = tuple[int, int]
Unit = tuple[int, int]  # group, number


@dataclass
class Update:
    """Random groups of random sizes, each cut into units of up to three samples, and the gradient of every sample."""

    groups: list[dict[Sample, float]]
    h: dict[Sample, Gradient]
    final: dict[Unit, Gradient]

    @classmethod
    def of(cls, seed: int, rewards: list[list[float]]) -> Update:
        generator = torch.Generator().manual_seed(seed)
        groups = [{(g, i): r for i, r in enumerate(group)} for g, group in enumerate(rewards)]
        h = {sample: _random(generator) for group in groups for sample in group}
        update = cls(groups, h, {})
        update.final = {unit: _random(generator) for unit in update.units}
        return update

    @property
    def units(self) -> dict[Unit, list[Sample]]:
        return {
            (g, first // 3): list(group)[first : first + 3]
            for g, group in enumerate(self.groups)
            for first in range(0, len(group), 3)
        }

    @property
    def advantages(self) -> Advantages[Sample]:
        return group_advantages(self.groups, AdvantageRule())

    @property
    def closings(self) -> dict[int, GroupStatistics | None]:
        return dict(enumerate(self.advantages.statistics))

    def ordinary(self, unit: Unit, kl: bool) -> Gradient:
        values = self.advantages.values
        total = _sum([_scaled(self.h[sample], -values[sample]) for sample in self.units[unit]])
        return _sum([total, self.final[unit]]) if kl else total

    def streamed(self, unit: Unit, baseline: float, kl: bool) -> StreamedGradient:
        samples = self.units[unit]
        rewards = self.groups[unit[0]]
        return StreamedGradient(
            _sum([self.h[s] for s in samples]),
            _sum([_scaled(self.h[s], rewards[s] - baseline) for s in samples]),
            baseline,
            self.final[unit] if kl else None,
        )

    def reference(self, kl: bool) -> Gradient:
        accumulator: Accumulator[Unit] = Accumulator(WEIGHTS)
        for unit in self.units:
            accumulator.add(unit, self.ordinary(unit, kl))
        return accumulator.state().sums


def _random(generator: torch.Generator) -> Gradient:
    return {name: torch.randn(w.shape, generator=generator, dtype=torch.float64) for name, w in WEIGHTS.items()}


def _scaled(gradient: Gradient, factor: float) -> Gradient:
    return {name: factor * t for name, t in gradient.items()}


def _sum(gradients: list[Gradient]) -> Gradient:
    return {name: torch.stack([g[name] for g in gradients]).sum(0) for name in WEIGHTS}


def _error(found: Gradient, wanted: Gradient) -> float:
    """Largest difference, in units of the gradient of one sample (whose elements are of order one)."""
    return max(float((found[name] - wanted[name]).abs().max()) for name in WEIGHTS)


rewards = st.lists(
    st.one_of(
        st.lists(st.integers(0, 10).map(lambda tenths: tenths / 10), min_size=1, max_size=26),
        st.integers(1, 26).map(lambda size: [0.3] * size),
        st.integers(2, 26).map(lambda size: [0.0] * (size - 1) + [1.0]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(
    rewards=rewards,
    seed=st.integers(0, 10**6),
    baseline=st.floats(-1, 2),
    workers=st.integers(1, 3),
    open_share=st.sampled_from([0.0, 0.5, 1.0]),
    closes_early=st.booleans(),
    kl=st.booleans(),
)
def test_streamed_gradient_is_the_ordinary_one(
    rewards: list[list[float]],
    seed: int,
    baseline: float,
    workers: int,
    open_share: float,
    closes_early: bool,
    kl: bool,
) -> None:
    """However units are spread and ordered, whoever folds, and whether a part of a group was trained when closed."""
    update, rng = Update.of(seed, rewards), random.Random(seed)
    held: list[UpdateAccumulator[Unit]] = [UpdateAccumulator(WEIGHTS) for _ in range(workers)]
    units = list(update.units)
    rng.shuffle(units)
    silent = {group for group, statistics in update.closings.items() if statistics is None}
    for unit in units:
        accumulator = rng.choice(held)
        if rng.random() < open_share:
            accumulator.add_open(unit[0], unit, update.streamed(unit, baseline, kl))
        elif kl or unit[0] not in silent:  # otherwise nobody of the unit takes part
            accumulator.add(unit, update.ordinary(unit, kl))
        if closes_early and rng.random() < 0.3:
            group = rng.choice(list(update.closings))
            accumulator.close({group: update.closings[group]})
    lead, *others = held
    for other in others:
        state, tensors = other.state()
        arrived: UpdateAccumulator[Unit] = UpdateAccumulator.from_state(state, tensors)
        assert arrived.keys == other.keys
        if rng.random() < 0.5:
            arrived.close(update.closings)
        lead.merge(arrived, other.keys)
    lead.close(update.closings)
    assert not lead.open_groups
    assert _error(lead.sums(), update.reference(kl)) < 1e-12
    assert lead.effective <= lead.keys <= update.units.keys()
    assert lead.effective == {u for u in lead.keys if kl or u[0] not in silent}


def test_baseline_near_the_mean_keeps_the_digits_of_float32_sums() -> None:
    """Rewards around 20 with a spread of 0.02: their differences are all that matters."""
    update = Update.of(0, [[20 + 0.02 * math.sin(i) for i in range(16)]])
    errors = []
    for baseline in (0.0, 20.0):
        accumulator: UpdateAccumulator[Unit] = UpdateAccumulator(WEIGHTS)
        for unit in update.units:
            whole = update.streamed(unit, baseline, kl=False)
            narrow = [{n: t.float() for n, t in part.items()} for part in (whole.plain, whole.weighted)]
            accumulator.add_open(0, unit, StreamedGradient(*narrow, baseline))
        accumulator.close(update.closings)
        errors.append(_error(accumulator.sums(), update.reference(kl=False)))
    assert errors[1] < 3e-6 < 1e-5 < errors[0]


def test_group_of_zero_variance_is_dropped_even_if_it_is_not_finite() -> None:
    update = Update.of(1, [[0.5, 0.5], [0.0, 1.0]])
    accumulator: UpdateAccumulator[Unit] = UpdateAccumulator(WEIGHTS)
    accumulator.spoil_open(0, (0, 0), 0.0, final=False)
    accumulator.add_open(1, (1, 0), update.streamed((1, 0), 0.0, kl=False))
    accumulator.close(update.closings)
    assert _error(accumulator.sums(), update.reference(kl=False)) < 1e-12
    assert accumulator.keys == {(0, 0), (1, 0)} and accumulator.effective == {(1, 0)}


@pytest.mark.parametrize(("closing", "final"), [(GroupStatistics(0.5, 1.0), False), (None, True)])
def test_spoiled_contribution_that_counts_spoils_the_gradient(closing: GroupStatistics | None, final: bool) -> None:
    accumulator: UpdateAccumulator[Unit] = UpdateAccumulator(WEIGHTS)
    accumulator.spoil_open(0, (0, 0), 0.0, final=final)
    accumulator.close({0: closing})
    assert all(bool(t.isnan().all()) for t in accumulator.gradient().values())


def _with_one() -> tuple[Update, UpdateAccumulator[Unit]]:
    update = Update.of(2, [[0.0, 1.0, 0.5, 0.2]])
    accumulator: UpdateAccumulator[Unit] = UpdateAccumulator(WEIGHTS)
    accumulator.add_open(0, (0, 0), update.streamed((0, 0), 0.25, kl=True))
    return update, accumulator


def test_open_group_has_no_gradient() -> None:
    _, accumulator = _with_one()
    with pytest.raises(ValueError, match=r"the groups \[0\] are not closed"):
        accumulator.gradient()


def test_contribution_is_taken_once_in_whatever_form() -> None:
    update, accumulator = _with_one()
    for again in (
        lambda: accumulator.add((0, 0), update.ordinary((0, 0), kl=False)),
        lambda: accumulator.add_open(0, (0, 0), update.streamed((0, 0), 0.25, kl=False)),
        lambda: accumulator.spoil((0, 0)),
        lambda: accumulator.spoil_open(0, (0, 0), 0.25, final=True),
    ):
        with pytest.raises(ValueError, match="already in the accumulator"):
            again()
    accumulator.close({0: None})
    with pytest.raises(ValueError, match="already in the accumulator"):
        accumulator.add((0, 0), update.ordinary((0, 0), kl=False))


def test_other_baseline_than_the_groups_is_refused() -> None:
    update, accumulator = _with_one()
    other: UpdateAccumulator[Unit] = UpdateAccumulator(WEIGHTS)
    other.add_open(0, (0, 1), update.streamed((0, 1), 0.5, kl=False))
    for act in (
        lambda: accumulator.add_open(0, (0, 1), update.streamed((0, 1), 0.5, kl=False)),
        lambda: accumulator.merge(other, other.keys),
    ):
        with pytest.raises(ValueError, match=r"group 0 began with baseline 0.25; a contribution has 0.5"):
            act()
    assert accumulator.keys == {(0, 0)}


def test_merge_is_whole_or_not_at_all() -> None:
    update, accumulator = _with_one()
    other: UpdateAccumulator[Unit] = UpdateAccumulator(WEIGHTS)
    other.add_open(0, (0, 1), update.streamed((0, 1), 0.25, kl=False))
    before, _ = accumulator.state()
    with pytest.raises(ValueError, match=r"missing \(0, 7\); unexpected nothing"):
        accumulator.merge(other, {(0, 1), (0, 7)})
    accumulator.merge(other, {(0, 1)})
    with pytest.raises(ValueError, match=r"already held: \(0, 1\)"):
        accumulator.merge(other, {(0, 1)})
    assert before.groups[0].keys == {(0, 0)} and accumulator.keys == {(0, 0), (0, 1)}
    assert other.keys == {(0, 1)} and other.open_groups == {0}


@pytest.mark.parametrize("part", ["plain", "weighted", "final"])
def test_nothing_of_a_contribution_that_is_not_finite_is_added(part: str) -> None:
    update, accumulator = _with_one()
    good = update.streamed((0, 1), 0.25, kl=True)
    bad = {name: t.clone() for name, t in getattr(good, part).items()}
    bad["b"][1] = math.inf
    with pytest.raises(NonFiniteGradient):
        accumulator.add_open(0, (0, 1), replace(good, **{part: bad}))
    accumulator.add_open(0, (0, 1), good)
    accumulator.close(update.closings)
    assert _error(accumulator.sums(), update.reference(kl=True)) < 1e-12


def test_without_open_groups_it_is_an_accumulator_bit_for_bit() -> None:
    weights = {name: w.float() for name, w in WEIGHTS.items()}
    plain, ours = Accumulator(weights), UpdateAccumulator(weights)
    assert all(torch.equal(ours.gradient()[n], plain.gradient()[n]) for n in weights)
    generator = torch.Generator().manual_seed(0)
    for key in range(20):
        gradient = {name: torch.randn(w.shape, generator=generator) for name, w in weights.items()}
        plain.add(key, gradient)
        ours.add(key, gradient)
    arrived = UpdateAccumulator.from_state(*ours.state())
    assert all(torch.equal(arrived.gradient()[n], plain.gradient()[n]) for n in weights)
    assert arrived.gradient()["a"].dtype == torch.float32
