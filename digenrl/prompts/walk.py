"""Which prompts an iteration takes: a pure function of the run's seed and the iteration.

    prompts_of_iteration(prompts, run_seed, iteration, groups)
    taken_before(prompts, iteration, groups)    how many of each source, so far

So the data cursor is the number of the iteration. Every source is walked through in epochs, each a permutation of all
its prompts. Of several sources each gets its share of any number of prompts, to within less than one per other source.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from digenrl.identity import draw_rng
from digenrl.prompts.sets import PromptSet
from digenrl.rewards.base import PromptRecord


def prompts_of_iteration(
    prompts: Sequence[PromptRecord], run_seed: int, iteration: int, groups: int
) -> tuple[PromptRecord, ...]:
    """The prompts of one iteration's groups.

    Every prompt is taken once per epoch of its source. None is taken twice in one iteration while its source has
    enough, also where an iteration spans two epochs; with fewer, each is taken as often as any other or once more.

    Args:
        prompts: N prompts.
        run_seed: seed of the run.
        iteration: counted from 0.
        groups: prompts P to take.

    Returns:
        P records, in the order of the group index.

    Raises:
        ValueError: no prompts, `groups` < 1 or `iteration` < 0.
    """
    if not len(prompts) or groups < 1 or iteration < 0:
        raise ValueError(
            f"prompts of iteration {iteration}: expected iteration >= 0, at least one record (got {len(prompts)}) and "
            f"at least one group (got {groups})"
        )
    sizes, weights = _sources(prompts)
    taken: list[int] = []
    first = 0
    for number, size in enumerate(sizes):
        walk = _Walk(size, _Pace(weights, number, groups), run_seed, number)
        taken += [first + index for index in walk.taken(iteration)]
        first += size
    if len(sizes) > 1:
        # Updates take groups in order, and each should see all sources.
        draw_rng(run_seed, "sources", iteration).shuffle(taken)
    return tuple(prompts[index] for index in taken)


def taken_before(prompts: Sequence[PromptRecord], iteration: int, groups: int) -> list[int]:
    """How many prompts of each source the iterations before this one took."""
    sizes, weights = _sources(prompts)
    return [_Pace(weights, number, groups).before(iteration) for number in range(len(sizes))]


def _sources(prompts: Sequence[PromptRecord]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Sizes and weights; a plain sequence is one source."""
    return (prompts.sizes, prompts.weights) if isinstance(prompts, PromptSet) else ((len(prompts),), (1.0,))


@dataclass(frozen=True)
class _Pace:
    """How fast one of several sources is taken from: `groups` prompts an iteration from all of them."""

    weights: tuple[float, ...]
    number: int
    groups: int

    def before(self, iteration: int) -> int:
        """Prompts of this source that are taken before an iteration."""
        return _shares(self.weights, iteration * self.groups)[self.number]

    def iteration_of(self, place: int) -> int:
        """In which iteration its prompt number `place` is taken."""
        if len(self.weights) == 1:
            return place // self.groups
        # All sources together are at most this far when this one has taken place + 1.
        most = (place + 1 + len(self.weights)) * sum(self.weights) / self.weights[self.number]
        return bisect_right(range(int(most / self.groups) + 2), place, key=self.before) - 1


@lru_cache(maxsize=256)
def _shares(weights: tuple[float, ...], count: int) -> tuple[int, ...]:
    """Of `count` prompts, how many come from each source; none of them ever falls as `count` grows.

    The first source gets its share rounded, the second its share of the rest, and so on: the rest grows by 0 or 1.
    """
    shares = []
    exact = [Fraction(repr(weight)) for weight in weights]
    for number, weight in enumerate(exact[:-1]):
        share = (count * weight / sum(exact[number:]) + Fraction(1, 2)).__floor__()
        shares.append(share)
        count -= share
    return (*shares, count)


@dataclass(frozen=True)
class _Walk:
    """Through the N prompts of one source, epoch after epoch."""

    size: int
    pace: _Pace
    run_seed: int
    number: int

    def taken(self, iteration: int) -> list[int]:
        """What an iteration takes, by position in the source."""
        first, end = self.pace.before(iteration), self.pace.before(iteration + 1)
        found: list[int] = []
        while first < end:
            epoch, start = divmod(first, self.size)
            found += _epoch_order(self, epoch)[start : start + end - first]
            first = min(end, (epoch + 1) * self.size)
        return found

    def shuffled(self, epoch: int) -> array[int]:
        """The plain permutation of an epoch."""
        order = array("I", range(self.size))
        index = (epoch, self.number) if self.number else (epoch,)
        draw_rng(self.run_seed, "prompts", *index).shuffle(order)
        return order


#: A million prompts take 4 MB in each.
@lru_cache(maxsize=8)
def _epoch_order(walk: _Walk, epoch: int) -> array[int]:
    """Order in which an epoch takes its N prompts.

    It is a shuffle in which the part that completes an iteration begun in an earlier epoch prefers prompts which that
    iteration does not have yet. That moves nothing beyond the first P places, so with N >= 2P the end of the epoch
    before, all that is needed of it, is that of its plain shuffle. With fewer prompts the orders are followed from
    the last epoch that began together with an iteration.
    """
    pace, size = walk.pace, walk.size
    start = max(0, epoch - 1)
    while size < 2 * pace.groups and pace.before(pace.iteration_of(start * size)) != start * size:
        start -= 1
    order = walk.shuffled(start)
    begun: set[int] = set()
    for following in range(start + 1, epoch + 1):
        place = following * size
        iteration = pace.iteration_of(place)
        taken = place - pace.before(iteration)
        if taken < size:
            begun = set(order[size - taken :])
        order = walk.shuffled(following)
        _prefer_fresh(order, begun, pace.before(iteration + 1) - place)
    return order


def _prefer_fresh(order: array[int], begun: set[int], count: int) -> None:
    """Put the first `count` that are not in `begun` in front."""
    fresh: list[int] = []
    seen = 0
    while seen < len(order) and len(fresh) < count:
        if order[seen] not in begun:
            fresh.append(order[seen])
        seen += 1
    head = set(fresh)
    order[:seen] = array(order.typecode, [*fresh, *(index for index in order[:seen] if index not in head)])
