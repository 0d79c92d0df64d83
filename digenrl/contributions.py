"""What a train unit leaves: its share of the update's gradient, and sums of what is worth looking at.

Contribution           of a unit whose advantages are known
StreamedContribution   of one whose group is not complete
UnitMetrics            sums and counts; add them up over units, then read the means
check_staleness        see that samples are as old as they should be
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from digenrl.algorithms.streaming import StreamedGradient
from digenrl.policy import Adapter, Policy
from digenrl.trajectory import Trajectory

#: What only a transition with a likelihood has.
_OF_LIKELIHOODS = frozenset(
    {"ratio", "ratio_max", "clipped", "approx_kl", "logp_gap", "logp_gap_max", "logp_gaps", "logp_floor_max"}
)


@dataclass(frozen=True)
class UnitMetrics:
    """Sums over (sample, step) pairs; `a + b` are those of both units. Fields named `max` and mappings hold maxima.

    Attributes:
        pairs: number of pairs.
        loss: sum of loss terms, before the division by the update's size.
        ratio: sum of ratios.
        ratio_max: largest ratio.
        clipped: pairs outside the region in which the policy may move, e.g. whose ratio lies outside the clip range.
        approx_kl: sum of half the squared change of the log-prob since the rollout's weights.
        logp_gap: sum of |log p at training - log p at rollout|, both under the rollout's weights.
        logp_gap_max: the largest.
        logp_gaps: the largest of each step.
        logp_floor_max: how far rounding alone was found to move a log-prob, see `digenrl.training.replay_floor`.
        kl: sum of KLs to the base model (0 where kl_beta is 0).
        stale: pairs whose sample is one version old.
        forward: pairs that were trained without a likelihood: what is of ratios and log-probs says nothing.
        probed: units whose `logp_floor_max` was looked for.
    """

    pairs: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    approx_kl: float = 0.0
    logp_gap: float = 0.0
    logp_gap_max: float = 0.0
    logp_gaps: Mapping[int, float] = field(default_factory=dict)
    logp_floor_max: float = 0.0
    kl: float = 0.0
    stale: int = 0
    forward: int = 0
    probed: int = 0

    @property
    def staleness(self) -> dict[int, int]:
        """Histogram: how many versions old -> number of pairs."""
        return {0: self.pairs - self.stale, 1: self.stale}

    def __add__(self, other: UnitMetrics) -> UnitMetrics:
        merged: dict[str, Any] = {}
        for name in (entry.name for entry in fields(self)):
            own, others = getattr(self, name), getattr(other, name)
            if name == "logp_gaps":
                keys = sorted({*own, *others})
                merged[name] = {step: max(own.get(step, 0.0), others.get(step, 0.0)) for step in keys}
            else:
                merged[name] = max(own, others) if name.endswith("_max") else own + others
        return UnitMetrics(**merged)

    def means(self) -> dict[str, float]:
        """Means per pair (maxima as they are) of what there is; empty if there are no pairs."""
        if not self.pairs:
            return {}
        absent = {"forward", "probed", "logp_gaps", *(_OF_LIKELIHOODS if self.forward else ())}
        values = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name not in absent}
        return {
            name: value if name.endswith("_max") or name == "pairs" else value / self.pairs
            for name, value in values.items()
        }


class StalenessError(ValueError):
    """A trajectory was not generated under the weights it should have been."""


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one train unit adds to its update.

    Attributes:
        gradient: of the update's loss, by parameter name, in the adapter's dtype; zeros if no sample took part.
        metrics: of the pairs that took part.
    """

    gradient: Adapter
    metrics: UnitMetrics

    @classmethod
    def nothing(cls, policy: Policy) -> Contribution:
        """Of a unit in which no sample takes part."""
        zeros = {name: torch.zeros_like(p, requires_grad=False) for name, p in policy.trainable().items()}
        return cls(zeros, UnitMetrics())


@dataclass(frozen=True, eq=False)
class StreamedContribution:
    """The same of a unit whose group is not complete: its advantages are put in later.

    Attributes:
        gradient: shares of the group's sums; None if no sample took part.
        metrics: of the pairs that took part. The policy part of their loss is not known; over a whole group it is 0.
    """

    gradient: StreamedGradient | None
    metrics: UnitMetrics


def check_staleness(trajectory: Trajectory, staleness: int) -> None:
    """See that a trajectory is `staleness` versions old, 0 or 1.

    Raises:
        StalenessError: it is not.
    """
    found = trajectory.micro_batch.iteration - trajectory.version
    if found != staleness or staleness not in (0, 1):
        raise StalenessError(
            f"{trajectory.micro_batch.label} was generated under version {trajectory.version}, so it is {found} "
            f"versions old; it must be {staleness}, and never more than 1"
        )
