"""Streaming advantage: what may be trained before its group is complete, and whose sums wait for which group.

Only where the ratio is identically 1: fresh groups of an iteration's first update. A trainer holds two sums for each
group of which it has trained something that was open then, so it may have so many of them only. A group that closes
sends its statistics with the next train unit, and its sums become part of the update's; whatever of it is not trained
by then is trained the ordinary way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from digenrl.scheduling.batches import Batch
from digenrl.scheduling.state import State

if TYPE_CHECKING:
    from digenrl.algorithms.advantages import GroupStatistics


class Streams:
    """The open groups of the first update of the iteration in progress.

    Attributes:
        baseline: what is subtracted from its rewards: the mean reward of the iteration before, 0 if there is none.
        closings: its groups that are closed.
    """

    def __init__(self, state: State, *, enabled: bool, max_open_groups: int) -> None:
        """`max_open_groups`: how many groups' sums a trainer may hold."""
        self._state = state
        self._enabled = enabled
        self._most = max_open_groups
        self.baseline = 0.0
        self.closings: dict[int, GroupStatistics | None] = {}
        self._held: defaultdict[str, set[int]] = defaultdict(set)

    def begin(self, baseline: float) -> None:
        """A new iteration is in progress."""
        self.baseline = baseline
        self.closings = {}
        self._held.clear()

    def eligible(self, batch: Batch) -> bool:
        """Whether the micro-batch may be trained before its group is complete. Some of its samples must be scored."""
        return self._enabled and batch.on_policy and bool(batch.rewards)

    def admits(self, batch: Batch, trainer: str) -> bool:
        """Whether a trainer may train a micro-batch of an open group: it needs room for the group's sums.

        Those of closed groups do not count: the trainer is told of them before it begins.
        """
        held = self._held[trainer]
        return self.eligible(batch) and (self._group(batch) in held or len(held - self.closings.keys()) < self._most)

    def admit(self, batch: Batch, trainer: str) -> None:
        """A trainer begins to train a micro-batch of an open group."""
        self._held[trainer].add(self._group(batch))

    def close(self, batch: Batch, statistics: Mapping[int, GroupStatistics | None]) -> None:
        """The group of a micro-batch is complete. `statistics`, by group: None if it has no policy gradient.

        Raises:
            ValueError: its statistics are missing, or do not apply to all of its samples.
        """
        if not self._enabled or not batch.on_policy:
            return
        group = self._group(batch)
        if group not in statistics:
            raise ValueError(f"streaming needs the statistics of group {group} from the advantage function")
        if statistics[group] is not None and set(batch.taking_part) != batch.rewards.keys():
            raise ValueError(f"group {group} has statistics, so no sample of {batch.id.label} may be excluded")
        if group in self.closings:
            return
        self.closings[group] = statistics[group]
        for trainer, held in self._held.items():
            if group in held:
                self._state.wake(trainer)

    def deliver(self, trainer: str) -> dict[int, GroupStatistics | None]:
        """A train unit goes to a trainer. Returns what it is to be told of groups whose sums it holds."""
        held = self._held[trainer]
        closed = {group: self.closings[group] for group in sorted(held & self.closings.keys())}
        held.difference_update(closed)
        return closed

    def closings_of(self, theta: int) -> dict[int, GroupStatistics | None]:
        """What the step that makes `theta` needs."""
        return dict(self.closings) if theta == self._state.version_theta + 1 else {}

    def _group(self, batch: Batch) -> int:
        return self._state.shape.group_of(batch.id)
