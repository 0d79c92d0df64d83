"""Which checkpoints stay: the last ones, the best ones, every n-th for good, and what the run may go back to."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from digenrl.config import KeepConfig


@dataclass(frozen=True)
class Merits:
    """What is known of a run's versions.

    Attributes:
        rewards: held-out reward by iterations that were complete.
        awaited: iterations whose evaluation is still to come.
        needed: iterations to which the run may have to go back.
    """

    rewards: Mapping[int, float] = field(default_factory=dict)
    awaited: Collection[int] = ()
    needed: Collection[int] = ()


def retained(iterations: Collection[int], keep: KeepConfig, merits: Merits) -> set[int]:
    """Those of the saved `iterations` that stay.

    Of equally good ones the later stays. One whose evaluation is awaited stays until it is known, if any are kept for
    their reward. For each one needed, the newest that is not newer stays.
    """
    saved = sorted(set(iterations))
    stay = set(saved[-keep.last :])
    if keep.every:
        stay |= {iteration for iteration in saved if iteration % keep.every == 0}
    if keep.best:
        ranked = sorted((merits.rewards[i], i) for i in saved if i in merits.rewards)
        stay |= {iteration for _, iteration in ranked[-keep.best :]}
        stay |= set(saved) & set(merits.awaited)
    for needed in merits.needed:
        stay |= set(saved[: bisect_right(saved, needed)][-1:])
    return stay
