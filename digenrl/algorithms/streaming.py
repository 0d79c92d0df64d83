"""Streaming advantage: train on a sample before its group is complete, and put in the advantages afterwards.

    StreamedGradient    what one train unit yields while its group is open
    UpdateAccumulator   one update's gradient on one worker: what is final, and the sums of open groups

Where the ratio is identically 1, the policy gradient of a group is linear in its advantages A_i = (r_i - mean) / scale:

    - sum_i A_i h_i  =  - (S1 - (mean - b) S0) / scale        h_i = grad rho_i = grad log p_i
    S0 = sum_i h_i    S1 = sum_i (r_i - b) h_i                over all samples i and trained timesteps

so S0 and S1 can be summed while rewards are missing. The baseline b is any constant fixed before the group begins; it
cancels exactly, but rounding grows with |mean - b| / scale, so it should be near the mean. Everything that does not
depend on the advantage (KL) is final at once. A group of zero variance has no policy gradient: its sums are dropped,
never divided by a scale that is all epsilon.

h is noted as divided by the nominal size of the update, as ordinary contributions are. Sums are float64 on the CPU and
are folded in float64 everywhere.

Not valid, and refused where a run is configured: an advantage clip that can bind (with the group's own population
standard deviation |A| <= sqrt(G - 1), reached by one sample against G - 1 equal ones), advantages that are not affine
in the reward with coefficients common to the group, a ratio that can leave the clip range.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from digenrl.algorithms.accumulate import Accumulator, AccumulatorState, check_merge
from digenrl.algorithms.advantages import GroupStatistics

K = TypeVar("K", bound=Hashable)

#: By group: what closes it, None if its rewards are all equal.
Closings = Mapping[int, GroupStatistics | None]


@dataclass(frozen=True, eq=False)
class StreamedGradient:
    """One unit's share of the sums of its group, by weight name.

    Attributes:
        plain: of S0.
        weighted: of S1.
        baseline: b.
        final: gradient that does not depend on the advantages (KL); None if there is none.
    """

    plain: Mapping[str, Tensor]
    weighted: Mapping[str, Tensor]
    baseline: float
    final: Mapping[str, Tensor] | None = None


@dataclass(frozen=True, eq=False)
class OpenState(Generic[K]):
    """The sums of one open group on their way between processes: baseline, and keys in S0 and S1."""

    baseline: float
    keys: frozenset[K]


@dataclass(frozen=True, eq=False)
class UpdateState(Generic[K]):
    """An UpdateAccumulator on its way between processes, without its tensors: keys, and the open groups."""

    final: frozenset[K]
    dropped: frozenset[K]
    groups: dict[int, OpenState[K]]


class UpdateAccumulator(Generic[K]):
    """Sums of named contributions, of which some wait for their group to close. Not thread-safe.

    Without open groups it is an Accumulator, bit for bit.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Empty, with the names, shapes and devices of `weights`."""
        self._final: Accumulator[K] = Accumulator(weights)
        self._groups: dict[int, _OpenGroup[K]] = {}
        self._dropped: frozenset[K] = frozenset()

    @property
    def keys(self) -> frozenset[K]:
        """The contributions held, or taken in and dropped because their group has zero variance."""
        return self._final.keys | self._dropped.union(*(group.keys for group in self._groups.values()))

    @property
    def open_groups(self) -> frozenset[int]:
        """Groups whose sums are held."""
        return frozenset(self._groups)

    @property
    def effective(self) -> frozenset[K]:
        """The contributions that `gradient` is made of."""
        return self._final.keys

    def add(self, key: K, gradient: Mapping[str, Tensor]) -> None:
        """Add a contribution whose advantages were known. See Accumulator.add."""
        self._check_new(key)
        self._final.add(key, gradient)

    def add_open(self, group: int, key: K, gradient: StreamedGradient) -> None:
        """Add a contribution to an open group, whole or not at all.

        Raises:
            ValueError: it is held already, does not fit the weights, or has another baseline than its group.
            NonFiniteGradient: it holds a NaN or infinity.
        """
        self._check_new(key)
        held = self._begun(group, gradient.baseline)
        for accumulator, part in ((held.plain, gradient.plain), (held.weighted, gradient.weighted)):
            accumulator.check(key, part)
        if gradient.final is not None:
            self._final.add(key, gradient.final)
        held.plain.add(key, gradient.plain)
        held.weighted.add(key, gradient.weighted)
        self._groups[group] = held

    def spoil(self, key: K) -> None:
        """Record a contribution that is not finite. See Accumulator.spoil."""
        self._check_new(key)
        self._final.spoil(key)

    def spoil_open(self, group: int, key: K, baseline: float, *, final: bool) -> None:
        """The same for one of an open group: it does no harm if the group turns out to have zero variance.

        Args:
            group: its group.
            key: the contribution.
            baseline: of the group.
            final: it has a part that does not depend on the advantages.
        """
        self._check_new(key)
        held = self._begun(group, baseline)
        held.plain.spoil(key)
        held.weighted.spoil(key)
        if final:
            self._final.spoil(key)
        self._groups[group] = held

    def close(self, closings: Closings) -> None:
        """Fold the sums of those groups that are held, and free them. Groups that are not held are passed over."""
        for group in sorted(self._groups.keys() & closings.keys()):
            held, statistics = self._groups.pop(group), closings[group]
            if statistics is None:
                self._dropped |= held.keys
            else:
                self._final.absorb(held.keys, held.folded(statistics))

    def merge(self, other: UpdateAccumulator[K], expected_keys: Collection[K]) -> None:
        """Add everything `other` holds, which must be exactly `expected_keys`, or nothing.

        Raises:
            ValueError: `other` holds a different set, or something already held here, or does not fit.
        """
        check_merge(self.keys, other.keys, expected_keys)
        begun = {group: self._begun(group, theirs.baseline) for group, theirs in other._groups.items()}
        self._final.merge(other._final, other._final.keys)
        self._dropped |= other._dropped
        for group, ours in begun.items():
            theirs = other._groups[group]
            ours.plain.merge(theirs.plain, theirs.keys)
            ours.weighted.merge(theirs.weighted, theirs.keys)
        self._groups |= begun

    def gradient(self) -> dict[str, Tensor]:
        """The sum, rounded once to float32; zeros if nothing was added.

        Raises:
            ValueError: a group is open.
        """
        self._check_closed()
        return self._final.gradient()

    def sums(self) -> dict[str, Tensor]:
        """The sum before it is rounded.

        Raises:
            ValueError: a group is open.
        """
        self._check_closed()
        return self._final.state().sums

    def state(self) -> tuple[UpdateState[K], dict[str, Tensor]]:
        """A copy to send elsewhere: description and named tensors."""
        tensors = _named("final", self._final)
        groups = {}
        for number, group in self._groups.items():
            groups[number] = OpenState(group.baseline, group.keys)
            tensors |= _named(f"{number} plain", group.plain) | _named(f"{number} weighted", group.weighted)
        return UpdateState(self._final.keys, self._dropped, groups), tensors

    @classmethod
    def from_state(
        cls, state: UpdateState[K], tensors: Mapping[str, Tensor], device: torch.device | str = "cpu"
    ) -> UpdateAccumulator[K]:
        """The accumulator that `state` was taken from, on `device`."""

        def part(prefix: str, keys: frozenset[K]) -> Accumulator[K]:
            start = f"{prefix}/"
            sums = {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)}
            return Accumulator.from_state(AccumulatorState(sums, keys), device)

        accumulator = cls({})
        accumulator._final = part("final", state.final)
        accumulator._dropped = state.dropped
        for number, group in state.groups.items():
            sums = (part(f"{number} plain", group.keys), part(f"{number} weighted", group.keys))
            accumulator._groups[number] = _OpenGroup(group.baseline, *sums)
        return accumulator

    def _begun(self, group: int, baseline: float) -> _OpenGroup[K]:
        held = self._groups.get(group)
        if held is None:
            return _OpenGroup(baseline, self._final.empty(), self._final.empty())
        if held.baseline != baseline:
            raise ValueError(f"group {group} began with baseline {held.baseline}; a contribution has {baseline}")
        return held

    def _check_new(self, key: K) -> None:
        if key in self.keys:
            raise ValueError(f"the contribution {key} is already in the accumulator")

    def _check_closed(self) -> None:
        if self._groups:
            raise ValueError(f"the groups {sorted(self._groups)} are not closed: their advantages are not known")


@dataclass(frozen=True, eq=False)
class _OpenGroup(Generic[K]):
    """S0 and S1 of a group."""

    baseline: float
    plain: Accumulator[K]
    weighted: Accumulator[K]

    @property
    def keys(self) -> frozenset[K]:
        return self.plain.keys

    def folded(self, statistics: GroupStatistics) -> dict[str, Tensor]:
        """- (S1 - (mean - b) S0) / scale, float64."""
        plain, weighted = self.plain.state().sums, self.weighted.state().sums
        shift = statistics.mean - self.baseline
        return {name: -(weighted[name].double() - shift * plain[name].double()) / statistics.scale for name in plain}


def _named(prefix: str, accumulator: Accumulator[K]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": total for name, total in accumulator.state().sums.items()}
