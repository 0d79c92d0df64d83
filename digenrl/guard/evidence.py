"""What the guard judges by: an evaluation, and the iterations before it.

    Sighting         one evaluation; Sighting.of(version, scores, inspection)
    IterationFacts   one iteration;  IterationFacts.of(iteration, scores, metrics, tolerance)
    Evidence         all of them so far

All of it can be written as JSON, for a checkpoint.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from digenrl.guard.inspection import Inspection
from digenrl.guard.pictures import PictureStatistics
from digenrl.identity import SampleId
from digenrl.rewards.base import Score, Scored


@dataclass(frozen=True)
class Sighting:
    """One evaluation, by prompt index, of the prompts that were inspected. What failed is left out.

    Attributes:
        version: of the weights: iterations that made them.
        reward: the trained reward.
        gold: `gold[name][prompt index]`.
        pictures: statistics.
    """

    version: int
    reward: Mapping[int, float]
    gold: Mapping[str, Mapping[int, float]]
    pictures: Mapping[int, PictureStatistics]

    @classmethod
    def of(cls, version: int, scores: Mapping[SampleId, Score], inspection: Inspection) -> Sighting:
        """What is kept of an evaluation."""
        inspected = inspection.pictures
        reward = {s.group: v.value for s, v in scores.items() if s.group in inspected and isinstance(v, Scored)}
        gold = {
            name: {index: score.value for index, score in sorted(found.items()) if isinstance(score, Scored)}
            for name, found in inspection.gold.items()
        }
        return cls(version, reward, gold, dict(sorted(inspected.items())))

    def to_state(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "version": self.version,
            "reward": _with_text(self.reward),
            "gold": {name: _with_text(values) for name, values in self.gold.items()},
            "pictures": {str(index): list(astuple(found)) for index, found in self.pictures.items()},
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Sighting:
        """Inverse of to_state."""
        return cls(
            state["version"],
            _with_numbers(state["reward"]),
            {name: _with_numbers(values) for name, values in state["gold"].items()},
            {int(index): PictureStatistics(*found) for index, found in state["pictures"].items()},
        )


@dataclass(frozen=True)
class IterationFacts:
    """One iteration. None: not measured, as nothing was trained on or the algorithm has no such thing.

    Attributes:
        iteration: 0-based.
        failed: share of its samples without a reward.
        zero_variance: share of its groups, of those with at least two rewards, whose rewards are all equal.
        diversity: mean distance between two pictures of one group.
        kl: change of the policy within the iteration.
        logp_gap: mean |log p at training - log p at rollout|.
        grad_norm: mean norm of its gradients.
    """

    iteration: int
    failed: float | None = None
    zero_variance: float | None = None
    diversity: float | None = None
    kl: float | None = None
    logp_gap: float | None = None
    grad_norm: float | None = None

    @classmethod
    def of(
        cls, iteration: int, scores: Mapping[SampleId, Score], metrics: Mapping[str, float], tolerance: float
    ) -> IterationFacts:
        """What is kept of an iteration.

        Args:
            iteration: 0-based.
            scores: of all its samples.
            metrics: means over it, by name.
            tolerance: rewards of a group that differ by no more are equal.
        """
        groups: dict[int, list[float]] = defaultdict(list)
        for sample, score in scores.items():
            if isinstance(score, Scored):
                groups[sample.group].append(score.value)
        spreads = [max(values) - min(values) for values in groups.values() if len(values) > 1]
        scored = sum(map(len, groups.values()))
        return cls(
            iteration,
            failed=1 - scored / len(scores) if scores else None,
            zero_variance=sum(spread <= tolerance for spread in spreads) / len(spreads) if spreads else None,
            diversity=_finite(metrics.get("diversity")),
            kl=_finite(metrics.get("approx_kl")),
            logp_gap=_finite(metrics.get("logp_gap")),
            grad_norm=_finite(metrics.get("grad_norm")),
        )

    def to_state(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


@dataclass(frozen=True)
class Evidence:
    """All that is known when an evaluation is judged.

    Attributes:
        sightings: in order; the last one is judged, the first one is that of the base model.
        recent: the iterations since the one before it, in order.
        earlier: those before them.
    """

    sightings: Sequence[Sighting]
    recent: Sequence[IterationFacts]
    earlier: Sequence[IterationFacts]

    @property
    def base(self) -> Sighting:
        """Before training."""
        return self.sightings[0]

    @property
    def now(self) -> Sighting:
        """What is judged."""
        return self.sightings[-1]


def _finite(value: float | None) -> float | None:
    """The value, unless it is none: updates that are not finite are the business of `gates.max_bad_updates`."""
    return value if value is not None and math.isfinite(value) else None


def _with_text(values: Mapping[int, float]) -> dict[str, float]:
    return {str(index): value for index, value in values.items()}


def _with_numbers(values: Mapping[str, float]) -> dict[int, float]:
    return {int(index): value for index, value in values.items()}
