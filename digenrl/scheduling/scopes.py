"""From rewards to advantages, one standard-deviation scope at a time.

A scope (a group, the groups of one update, or an iteration) is closed when every sample in it is scored or failed.
Only then are its advantages known, and only then may its train units enter an update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from digenrl.identity import SampleId
from digenrl.rewards.base import Failed, Scored
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.shape import RunShape

StdScope = Literal["group", "update", "iteration"]


@dataclass(frozen=True)
class Verdict:
    """What training does with the scored samples of one scope; every one of them is in exactly one of the two.

    Attributes:
        advantages: samples that take part. A sample with only a KL term takes part with advantage 0.
        excluded: samples that do not, with the reason ("zero variance").
    """

    advantages: Mapping[SampleId, float]
    excluded: Mapping[SampleId, str] = field(default_factory=dict)


#: Rewards by sample of each group of one scope, groups in identity order -> verdict. Samples whose reward failed are
#: absent, so a group may be empty.
AdvantageFn = Callable[[Sequence[Mapping[SampleId, float]]], Verdict]


class Scopes:
    """Counts scored micro-batches of the open iterations and closes scopes."""

    def __init__(self, shape: RunShape, std_scope: StdScope, advantages: AdvantageFn) -> None:
        self._shape = shape
        self._std_scope = std_scope
        self._advantages = advantages
        # By (iteration, scope).
        self._members: dict[tuple[int, int], list[Batch]] = {}
        self._unscored: Counter[tuple[int, int]] = Counter()
        self._failed: Counter[int] = Counter()

    def open(self, batches: Sequence[Batch]) -> None:
        """Begin an iteration. These are all of its micro-batches, none of which is scored."""
        for batch in batches:
            self._members.setdefault(self._key(batch), []).append(batch)
            self._unscored[self._key(batch)] += 1

    def forget(self, iteration: int) -> None:
        """An iteration is over."""
        for key in [key for key in self._members if key[0] == iteration]:
            del self._members[key], self._unscored[key]
        del self._failed[iteration]

    def failed(self, iteration: int) -> int:
        """How many samples of an open iteration have failed so far."""
        return self._failed[iteration]

    def scored(self, batch: Batch) -> tuple[list[Batch], dict[SampleId, str]]:
        """A micro-batch got its scores.

        Returns:
            The micro-batches whose scope is closed by this, their `advantages` filled in (none if it is still open),
            and the samples of the scope that take no part, with the reason.
        """
        assert batch.scores is not None
        self._failed[batch.id.iteration] += sum(isinstance(score, Failed) for score in batch.scores.values())
        key = self._key(batch)
        self._unscored[key] -= 1
        if self._unscored[key]:
            return [], {}
        return self._members[key], self._close(self._members[key])

    def _close(self, members: list[Batch]) -> dict[SampleId, str]:
        excluded: dict[SampleId, str] = {}
        groups: dict[int, dict[SampleId, float]] = {}
        for batch in members:
            rewards = groups.setdefault(self._shape.group_of(batch.id), {})
            assert batch.scores is not None
            for sample in batch.samples:
                score = batch.scores[sample]
                if isinstance(score, Scored):
                    rewards[sample] = score.value
                else:
                    excluded[sample] = score.reason
        verdict = self._advantages(list(groups.values()))
        for sample in (sample for rewards in groups.values() for sample in rewards):
            if (sample in verdict.advantages) == (sample in verdict.excluded):
                raise ValueError(f"{sample} must be either in `advantages` or in `excluded` of the advantage function")
        for batch in members:
            batch.advantages = {s: verdict.advantages[s] for s in batch.samples if s in verdict.advantages}
        return excluded | dict(verdict.excluded)

    def _key(self, batch: Batch) -> tuple[int, int]:
        if self._std_scope == "group":
            return batch.id.iteration, self._shape.group_of(batch.id)
        return batch.id.iteration, batch.update if self._std_scope == "update" else 0
