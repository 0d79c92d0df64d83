"""Sums of gradient contributions that know what they contain.

Each canonical train unit yields one float32 gradient, named by a key. An Accumulator adds such gradients on one
worker; accumulators of several workers are merged on the lead, each whole or not at all, so a contribution can be
neither lost nor counted twice, whatever worker dies when.

Why the order does not matter. A float32 has 24 significant bits, a float64 sum has 53. As long as, for one weight, the
largest of n contributions and the smallest that is not 0 lie within a factor 2^(29 - log2 n) of each other (2^19 for
n = 1024), every addition is exact, exact addition is associative, and the one rounding to float32 at the end gives the
same bits in any order and under any merging. A contribution below that range may lose low bits of its own; orders then
differ by about n * 2^-53 relative, which reaches the float32 result only where the sum lies that close to a rounding
boundary: a chance of about n * 2^-29 for each weight this happens to. On devices other than the CPU sums are float32,
for memory and speed, and no such claim is made.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)


class NonFiniteGradient(ValueError):
    """A contribution held a NaN or infinity. Nothing of it was added."""


@dataclass(frozen=True)
class AccumulatorState(Generic[K]):
    """An accumulator on its way between processes.

    Attributes:
        sums: sum of the contributions by weight name; float64 on the CPU.
        keys: the contributions it holds.
    """

    sums: dict[str, Tensor]
    keys: frozenset[K]


class Accumulator(Generic[K]):
    """Sum of named gradient contributions. Not thread-safe."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        """Empty sums with the names, shapes and devices of `weights`."""
        self._sums = {
            name: torch.zeros_like(w, dtype=_sum_dtype(w), requires_grad=False) for name, w in weights.items()
        }
        self._dtypes = {name: w.dtype for name, w in weights.items()}
        self._keys: set[K] = set()

    def empty(self) -> Accumulator[K]:
        """Another one for the same weights, with nothing in it."""
        other: Accumulator[K] = Accumulator(self._sums)
        other._dtypes = self._dtypes
        return other

    @property
    def keys(self) -> frozenset[K]:
        """The contributions held."""
        return frozenset(self._keys)

    def add(self, key: K, gradient: Mapping[str, Tensor]) -> None:
        """Add one unit's gradient: the float32 tensors of all weights.

        Raises:
            ValueError, NonFiniteGradient: see `check`; nothing is added.
        """
        self.check(key, gradient)
        self._accumulate(gradient)
        self._keys.add(key)

    def check(self, key: K, gradient: Mapping[str, Tensor]) -> None:
        """See that a contribution can be added. Where the weights are float64, for numerical tests, so may it be.

        Raises:
            ValueError: the contribution is already held, or names, shapes or types do not match.
            NonFiniteGradient: it holds a NaN or infinity.
        """
        if key in self._keys:
            raise ValueError(f"the contribution {key} is already in the accumulator")
        self._check_layout(gradient)
        for name, tensor in gradient.items():
            if tensor.dtype not in (torch.float32, self._dtypes[name]):
                raise ValueError(f"the gradient of {name} is {tensor.dtype}; contributions are float32")
            if not bool(torch.isfinite(tensor).all()):
                raise NonFiniteGradient(f"the gradient of {name} in contribution {key} is not finite")

    def spoil(self, key: K) -> None:
        """Record that a contribution is not finite: the sum, and every sum it is merged into, is NaN from now on.

        The optimiser step then skips the whole update, wherever the contributions to it were computed.

        Raises:
            ValueError: the contribution is already held.
        """
        if key in self._keys:
            raise ValueError(f"the contribution {key} is already in the accumulator")
        for total in self._sums.values():
            total.fill_(torch.nan)
        self._keys.add(key)

    def merge(self, other: Accumulator[K], expected_keys: Collection[K]) -> None:
        """Add everything `other` holds, which must be exactly `expected_keys`, or nothing.

        Raises:
            ValueError: `other` holds a different set, or something already held here, or has other weights.
        """
        check_merge(self.keys, other.keys, expected_keys)
        self.absorb(other.keys, other._sums)

    def absorb(self, keys: Collection[K], sums: Mapping[str, Tensor]) -> None:
        """Add sums that were made elsewhere of `keys`; what was held of these keys before was another part of them.

        Raises:
            ValueError: names or shapes do not match; nothing is added.
        """
        self._check_layout(sums)
        self._accumulate(sums)
        self._keys |= set(keys)

    def gradient(self) -> dict[str, Tensor]:
        """The sum, rounded once to float32; zeros if nothing was added."""
        return {name: total.to(torch.float32, copy=True) for name, total in self._sums.items()}

    def state(self) -> AccumulatorState[K]:
        """A copy to send elsewhere."""
        return AccumulatorState({name: total.clone() for name, total in self._sums.items()}, self.keys)

    @classmethod
    def from_state(cls, state: AccumulatorState[K], device: torch.device | str = "cpu") -> Accumulator[K]:
        """The accumulator `state` was taken from, on `device`."""
        accumulator = cls({name: total.to(device) for name, total in state.sums.items()})
        accumulator._accumulate(state.sums)
        accumulator._keys = set(state.keys)
        return accumulator

    def _accumulate(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            self._sums[name] += tensor.detach().to(self._sums[name].device)

    def _check_layout(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors.keys() != self._sums.keys():
            raise ValueError(
                f"gradient names differ from the weights': missing {_listing(self._sums.keys() - tensors.keys())}; "
                f"unexpected {_listing(tensors.keys() - self._sums.keys())}"
            )
        for name, tensor in tensors.items():
            if tensor.shape != self._sums[name].shape:
                raise ValueError(
                    f"the gradient of {name} has shape {tuple(tensor.shape)}; expected {tuple(self._sums[name].shape)}"
                )


def check_merge(held: Collection[K], other: Collection[K], expected: Collection[K]) -> None:
    """Contributions are merged whole, once, or not at all.

    Raises:
        ValueError: `other` are not exactly those expected, or one of them is already held.
    """
    held, other, expected = frozenset(held), frozenset(other), frozenset(expected)
    if other != expected:
        raise ValueError(
            f"refusing to merge an accumulator of {len(other)} contributions where {len(expected)} were "
            f"expected: missing {_listing(expected - other)}; unexpected {_listing(other - expected)}"
        )
    if twice := held & expected:
        raise ValueError(f"refusing to merge contributions that are already held: {_listing(twice)}")


def _sum_dtype(weight: Tensor) -> torch.dtype:
    return torch.float64 if weight.device.type == "cpu" else torch.float32


def _listing(items: Collection[object], most: int = 5) -> str:
    """A few of the items for an error message, in a fixed order."""
    if not items:
        return "nothing"
    shown = sorted(map(str, items))
    return ", ".join(shown[:most]) + (f" and {len(shown) - most} more" if len(shown) > most else "")
