"""From rewards to advantages, one standard-deviation scope at a time.

A scope (a group, the groups of one update, or an iteration) is closed when every sample in it is scored or failed.
Only then are its advantages known, and only then may its train units enter an update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from digenrl.identity import SampleId
from digenrl.rewards.base import Failed, Scored, mean_reward
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.shape import RunShape

if TYPE_CHECKING:
    from digenrl.algorithms.advantages import Advantage, GroupStatistics

StdScope = Literal["group", "update", "iteration"]


@dataclass(frozen=True)
class Verdict:
    """What training does with the scored samples of one scope; every one of them is in exactly one of the two.

    Attributes:
        advantages: samples that take part. A sample with only a KL term takes part with advantage 0.
        excluded: samples that do not, with the reason ("zero variance").
        statistics: of each group that was given, None if it has no policy gradient. Needed for streaming only, where a
            group with statistics must take part with all its samples.
    """

    advantages: Mapping[SampleId, Advantage]
    excluded: Mapping[SampleId, str] = field(default_factory=dict)
    statistics: Sequence[GroupStatistics | None] = ()


class Closed(NamedTuple):
    """What a closed scope consists of.

    Attributes:
        members: its micro-batches, their `advantages` filled in.
        excluded: samples that take no part, with the reason.
        statistics: by group, if the advantage function gives them.
    """

    members: list[Batch]
    excluded: dict[SampleId, str]
    statistics: dict[int, GroupStatistics | None]


#: Scores by sample of each group of one scope, groups in identity order -> verdict. Samples whose reward failed are
#: absent, so a group may be empty.
AdvantageFn = Callable[[Sequence[Mapping[SampleId, Scored]]], Verdict]


class Scopes:
    """Counts scored micro-batches of the open iterations and closes scopes."""

    def __init__(self, shape: RunShape, std_scope: StdScope, advantages: AdvantageFn) -> None:
        self._shape = shape
        self._std_scope = std_scope
        self._advantages = advantages
        # By (iteration, scope).
        self._members: dict[tuple[int, int], list[Batch]] = {}
        self._unscored: Counter[tuple[int, int]] = Counter()
        self._failed: dict[int, list[Failed]] = {}  # by iteration

    def open(self, batches: Sequence[Batch]) -> None:
        """Begin an iteration. These are all of its micro-batches, none of which is scored."""
        for batch in batches:
            self._failed.setdefault(batch.id.iteration, [])
            self._members.setdefault(self._key(batch), []).append(batch)
            self._unscored[self._key(batch)] += 1

    def replace(self, batch: Batch, other: Batch) -> None:
        """A micro-batch that is not scored gives way to another."""
        members = self._members[self._key(batch)]
        members[members.index(batch)] = other

    def forget(self, iteration: int) -> None:
        """An iteration is over."""
        for key in [key for key in self._members if key[0] == iteration]:
            del self._members[key], self._unscored[key]
        del self._failed[iteration]

    def failed(self, iteration: int) -> list[Failed]:
        """The samples of an open iteration that have failed so far."""
        return self._failed[iteration]

    def scored(self, batch: Batch) -> Closed | None:
        """A micro-batch got its scores. Returns its scope if that is closed by this."""
        assert batch.scores is not None
        self._failed[batch.id.iteration] += [score for score in batch.scores.values() if isinstance(score, Failed)]
        key = self._key(batch)
        self._unscored[key] -= 1
        return None if self._unscored[key] else self._close(self._members[key])

    def mean_reward(self, iteration: int) -> float:
        """Mean of the rewards of an open iteration, as far as they are known."""
        members = [batch for key, batches in self._members.items() if key[0] == iteration for batch in batches]
        return mean_reward(score for batch in members for score in (batch.scores or {}).values())

    def _close(self, members: list[Batch]) -> Closed:
        excluded: dict[SampleId, str] = {}
        groups: dict[int, dict[SampleId, Scored]] = {}
        for batch in members:
            rewards = groups.setdefault(self._shape.group_of(batch.id), {})
            assert batch.scores is not None
            for sample in batch.samples:
                score = batch.scores[sample]
                if isinstance(score, Scored):
                    rewards[sample] = score
                else:
                    excluded[sample] = score.reason
        verdict = self._advantages(list(groups.values()))
        for sample in (sample for rewards in groups.values() for sample in rewards):
            if (sample in verdict.advantages) == (sample in verdict.excluded):
                raise ValueError(f"{sample} must be either in `advantages` or in `excluded` of the advantage function")
        for batch in members:
            batch.advantages = {s: verdict.advantages[s] for s in batch.samples if s in verdict.advantages}
        statistics = dict(zip(groups, verdict.statistics, strict=True)) if verdict.statistics else {}
        return Closed(members, excluded | dict(verdict.excluded), statistics)

    def _key(self, batch: Batch) -> tuple[int, int]:
        if self._std_scope == "group":
            return batch.id.iteration, self._shape.group_of(batch.id)
        return batch.id.iteration, batch.update if self._std_scope == "update" else 0
