"""Held-out scores of two sets of weights, side by side.

    score(...) -> Scores              one batch; add them up with `|`
    compare(before, after) -> rows    every reward alone, the mix, and the share of exact matches

Both sides use the same noise, so differences are taken prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.rewards.base import Failed, PromptRecord, Score, Scored
from digenrl.rewards.mix import RewardMix
from digenrl.scoring import NON_FINITE
from digenrl.statistics import paired_rise
from digenrl.trajectory import Trajectory

#: Rows beside the single rewards.
MIXED, EXACT_MATCH = "mixed", "exact match"
OCR = "ocr"


@dataclass(frozen=True)
class Scores:
    """Values by row name and prompt index, and the prompts without a value with the reason."""

    values: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)

    def __or__(self, other: Scores) -> Scores:
        names = dict.fromkeys([*self.values, *other.values])
        return Scores(
            {name: {**self.values.get(name, {}), **other.values.get(name, {})} for name in names},
            {**self.failed, **other.failed},
        )


@dataclass(frozen=True)
class Row:
    """One line of the comparison.

    Attributes:
        name: of a reward, `mixed` or `exact match`.
        before: mean over the scored prompts.
        after: likewise.
        rise: mean difference over the prompts scored both times.
        interval: 95 % interval of `rise`.
        pairs: prompts scored both times.
    """

    name: str
    before: float
    after: float
    rise: float
    interval: tuple[float, float]
    pairs: int

    def to_json(self) -> dict[str, Any]:
        """Numbers as in summary.json."""
        return {
            "before": round(self.before, 6),
            "after": round(self.after, 6),
            "rise": round(self.rise, 6),
            "rise_ci95": [round(bound, 6) for bound in self.interval],
            "pairs": self.pairs,
        }


def score(
    reward: RewardMix, trajectory: Trajectory, images: NDArray[np.uint8], records: Sequence[PromptRecord]
) -> Scores:
    """Score one batch.

    Args:
        reward: the run's rewards.
        trajectory: of the batch; a sample's group is its prompt index.
        images: (B, F, H, W, 3).
        records: B prompts.
    """
    indices = [sample.group for sample in trajectory.samples]
    good = [row for row, finite in enumerate(trajectory.finite.tolist()) if finite]
    found = reward(images[good], [records[row] for row in good]) if good else None
    columns: dict[str, Sequence[Score | None]] = {**found.parts, MIXED: found.scores} if found is not None else {}
    values = {
        name: {indices[row]: s.value for row, s in zip(good, scores, strict=True) if isinstance(s, Scored)}
        for name, scores in columns.items()
    }
    if OCR in values:
        # The reward is 1 exactly where the reading is the target.
        values[EXACT_MATCH] = {index: float(value >= 1.0) for index, value in values[OCR].items()}
    failed = {index: NON_FINITE.reason for row, index in enumerate(indices) if row not in good}
    mixed = zip(good, columns.get(MIXED, ()), strict=True)
    failed |= {indices[row]: s.reason for row, s in mixed if isinstance(s, Failed)}
    return Scores(values, failed)


def compare(before: Scores, after: Scores) -> list[Row]:
    """A row for every name that has a prompt scored both times: single rewards, then the mix, then exact matches.

    The mix is left out where it is the only reward, with weight 1: its row would be the same.
    """
    rows = []
    singles = before.values.keys() - {MIXED, EXACT_MATCH}
    same = len(singles) == 1 and all(
        scores.values.get(MIXED) == scores.values.get(*singles) for scores in (before, after)
    )
    for name in sorted(before.values.keys() & after.values.keys(), key=lambda n: (n == EXACT_MATCH, n == MIXED, n)):
        first, second = dict(before.values[name]), dict(after.values[name])
        pairs = len(first.keys() & second.keys())
        if pairs and not (same and name == MIXED):
            means = [float(np.mean(list(values.values()))) for values in (first, second)]
            rows.append(Row(name, means[0], means[1], *paired_rise(first, second), pairs))
    return rows
