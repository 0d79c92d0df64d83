"""A compact copy of what is left of an iteration, and how it would go on.

    Hand      what one worker needs for what, and what it may do
    Outlook   goes forward in time from decision to decision; can be copied at each

It leaves out where trajectories lie, failures, evaluation and the cpu lanes: scoring takes its time, but nobody waits
for a lane; a ready train unit goes to whichever trainer is free first. The only decision is that of a trainer with
nothing to train while trajectories wait: to begin one, or to pause until there is something to train.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

# What happens at a moment, in this order: train units become ready, an optimiser step is done, a worker is free.
_READY, _STEPPED, _FREE = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Hand:
    """One worker. Seconds.

    Attributes:
        rollout_s: a whole trajectory of a micro-batch.
        train_s: a train unit of each update of the iteration.
        switch_s: going over from rollout to training or back.
        rolls: it is its role to roll out.
        trains: it trains, as its role or to assist.
        helps: it may roll out when it has nothing to train.
        assists: it is to train only when nothing is to be rolled out for the update in progress.
    """

    rollout_s: float
    train_s: tuple[float, ...]
    switch_s: float
    rolls: bool
    trains: bool
    helps: bool = False
    assists: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """What does not change while time goes by.

    Attributes:
        hands: workers, in join order.
        score_s: from the end of a trajectory to its samples' scores, and to its arrival where it is trained on.
        step_s: from the last train unit of an update to the first of the next one.
        scope_of: std scope of each group, groups in order.
        update_of: update of each group, counted from the one in progress.
        yields: per scope, (update, train units) that become ready when it is scored.
    """

    hands: tuple[Hand, ...]
    score_s: float
    step_s: float
    scope_of: tuple[int, ...]
    update_of: tuple[int, ...]
    yields: tuple[tuple[tuple[int, int], ...], ...]


class Outlook:
    """What is left. Times are on the driver's clock.

    Attributes:
        now: the moment.
        steps: units begun so far, counted over all copies.
    """

    __slots__ = (
        "_end",
        "_free",
        "_fresh",
        "_left",
        "_pool",
        "_queue",
        "_ready_at",
        "_rested",
        "_rollout",
        "_sizes",
        "_trained",
        "_update",
        "_waiting",
        "now",
        "steps",
    )

    def __init__(
        self,
        sizes: Sizes,
        now: float,
        *,
        free: list[float],
        rollout: list[bool],
        resting: frozenset[int],
        waiting: list[int],
        ready_at: list[float],
        scored: frozenset[int],
        pool: list[int],
        left: list[int],
        trained: list[float],
    ) -> None:
        """A state.

        Args:
            sizes: what does not change.
            now: the moment.
            free: when each worker has done what it has been given.
            rollout: whether that is, or ends with, a rollout.
            resting: workers that wait for train units although they could help.
            waiting: trajectories that nobody has begun, by group.
            ready_at: per scope, when the trajectories that are begun will be scored.
            scored: scopes that are scored already; they yield nothing more.
            pool: train units that are ready and not begun, by update from the one in progress.
            left: train units that are not begun, by update.
            trained: when the train units that are begun will have ended, by update.
        """
        self._sizes = sizes
        self.now = now
        self.steps = [0]
        self._free, self._rollout = free, rollout
        self._waiting, self._ready_at = waiting, ready_at
        self._pool, self._left, self._trained = pool, left, trained
        self._update = 0
        self._end = 0.0
        # Workers that are idle until something becomes ready, in the order they came to rest.
        self._rested = dict.fromkeys(sorted(resting))
        self._queue = [
            (max(at, now), _FREE, not hand.rolls, i)
            for i, (hand, at) in enumerate(zip(sizes.hands, free, strict=True))
            if i not in resting
        ]
        # Trajectories of each scope that nobody has begun.
        self._fresh = [0] * len(sizes.yields)
        for group, count in enumerate(waiting):
            self._fresh[sizes.scope_of[group]] += count
        for scope, count in enumerate(self._fresh):
            if not count and scope not in scored:
                self._queue.append((max(ready_at[scope], now), _READY, False, scope))
        heapify(self._queue)
        self._step_if_done()

    def copy(self) -> Outlook:
        """The same state, to go on differently."""
        other = Outlook.__new__(Outlook)
        other._sizes, other.now, other.steps = self._sizes, self.now, self.steps
        other._update, other._end = self._update, self._end
        other._free, other._rollout = self._free[:], self._rollout[:]
        other._waiting, other._ready_at, other._fresh = self._waiting[:], self._ready_at[:], self._fresh[:]
        other._pool, other._left, other._trained = self._pool[:], self._left[:], self._trained[:]
        other._rested, other._queue = self._rested.copy(), self._queue[:]
        return other

    @property
    def units(self) -> int:
        """Units that are not begun."""
        return sum(self._waiting) + sum(self._left)

    @property
    def end(self) -> float:
        """When the iteration ends; infinity if it does not, because all wait for each other."""
        return round(self._end, 6) if self._update == len(self._left) else math.inf

    @property
    def bound(self) -> float:
        """The iteration cannot end earlier: everybody works without pause on what they are fastest at."""
        hands = self._sizes.hands
        work = sum(max(0.0, at - self.now) for at in self._free)
        work += sum(self._waiting) * min((h.rollout_s for h in hands if h.rolls or h.helps), default=0.0)
        for update in range(self._update, len(self._left)):
            work += self._left[update] * min((h.train_s[update] for h in hands if h.trains), default=0.0)
        return self.now + work / len(hands) + self._sizes.step_s * (len(self._left) - self._update)

    def key(self) -> tuple[object, ...]:
        """Equal for states that go on equally, whenever they are reached."""
        now = self.now
        return (
            self._update,
            tuple(self._waiting),
            tuple(self._pool),
            tuple(self._left),
            tuple(max(0.0, round(at - now, 6)) for at in self._free),
            tuple(self._rollout),
            tuple(self._rested),
            tuple(round(at - now, 6) for at, n in zip(self._ready_at, self._fresh, strict=True) if n),
            tuple(sorted((round(at - now, 6), what, i) for at, what, _, i in self._queue)),
            tuple(max(0.0, round(at - now, 6)) for at in self._trained),
        )

    # --- going on ---

    def advance(self) -> int | None:
        """Go on until a trainer has to decide. Returns it, or None at the end."""
        while self._queue:
            self.now, what, _, i = heappop(self._queue)
            if what == _FREE:
                if self._ask(i):
                    return i
                continue
            if what == _STEPPED:
                self._update += 1
                self._step_if_done()
            else:
                for update, units in self._sizes.yields[i]:
                    self._pool[update] += units
            self._wake()
        return None

    def is_choice(self, i: int) -> bool:
        """Whether a trajectory waits that others would not end before worker i."""
        waiting = sum(self._waiting)
        return waiting > 0 and self._outrun(i, "rollout", waiting) < waiting

    def insert(self, i: int) -> None:
        """The trainer that has to decide begins a trajectory."""
        self._rested.pop(i, None)
        self._roll(i, self._outrun(i, "rollout", sum(self._waiting)))

    def rest(self, i: int) -> None:
        """The trainer that has to decide waits for something to train."""
        self._rested[i] = None

    def finish(self, *, inserting: bool) -> float:
        """Go on to the end, deciding always in the same way. Returns `end`."""
        while (i := self.advance()) is not None:
            if inserting:
                self.insert(i)
            else:
                self.rest(i)
        return self.end

    # --- what workers do ---

    def _ask(self, i: int) -> bool:
        """Give a free worker what it takes. Returns whether that is to be decided."""
        hand = self._sizes.hands[i]
        if hand.assists and self._is_urgent and self._rolls(i):
            return False
        if hand.trains and self._update < len(self._pool):
            ready = self._pool[self._update]
            if ready and self._outrun(i, "train", ready) < ready:
                self._train(i)
                return False
        if hand.rolls and self._rolls(i):
            return False
        if hand.helps and not hand.rolls and self.is_choice(i):
            return True
        self._rested[i] = None
        return False

    @property
    def _is_urgent(self) -> bool:
        """Whether a trajectory waits that the update in progress needs."""
        waiting = (update for update, count in zip(self._sizes.update_of, self._waiting, strict=True) if count)
        return next(waiting, math.inf) <= self._update

    def _rolls(self, i: int) -> bool:
        """Begin a trajectory, unless others would end all that wait before. Returns whether it does."""
        waiting = sum(self._waiting)
        ahead = self._outrun(i, "rollout", waiting) if waiting else 0
        if ahead < waiting:
            self._roll(i, ahead)
        return ahead < waiting

    def _wake(self) -> None:
        """As many trainers as there are ready units look at them, the fastest first."""
        if self._update == len(self._pool):
            return
        ready = self._pool[self._update]
        hands, update = self._sizes.hands, self._update
        able = sorted((i for i in self._rested if hands[i].trains), key=lambda i: hands[i].train_s[update])
        for i in able[:ready]:
            del self._rested[i]
            heappush(self._queue, (self.now, _FREE, not hands[i].rolls, i))

    def _train(self, i: int) -> None:
        update = self._update
        end = self._begin(i, self._sizes.hands[i].train_s[update], rollout=False)
        self._pool[update] -= 1
        self._left[update] -= 1
        self._trained[update] = max(self._trained[update], end)
        self._step_if_done()

    def _roll(self, i: int, ahead: int) -> None:
        """Begin the first trajectory behind those that others end before."""
        end = self._begin(i, self._sizes.hands[i].rollout_s, rollout=True)
        group = 0
        while ahead >= self._waiting[group]:
            ahead -= self._waiting[group]
            group += 1
        self._waiting[group] -= 1
        scope = self._sizes.scope_of[group]
        self._fresh[scope] -= 1
        self._ready_at[scope] = max(self._ready_at[scope], end + self._sizes.score_s)
        if not self._fresh[scope]:
            heappush(self._queue, (self._ready_at[scope], _READY, False, scope))

    def _begin(self, i: int, seconds: float, *, rollout: bool) -> float:
        hand = self._sizes.hands[i]
        end = self.now + seconds + (hand.switch_s if self._rollout[i] != rollout else 0.0)
        self._rollout[i] = rollout
        self._free[i] = end
        self.steps[0] += 1
        heappush(self._queue, (end, _FREE, not hand.rolls, i))
        return end

    def _step_if_done(self) -> None:
        if self._update == len(self._left):
            return
        if not self._left[self._update] and not self._pool[self._update]:
            self._end = max(self._trained[self._update], self.now) + self._sizes.step_s
            heappush(self._queue, (self._end, _STEPPED, False, 0))

    def _outrun(self, i: int, what: Literal["rollout", "train"], most: int) -> int:
        """How many of such units the others would end before worker i ended one, at most `most`."""
        hands, update = self._sizes.hands, self._update
        rollout = what == "rollout"
        mine = hands[i].rollout_s if rollout else hands[i].train_s[update]
        end = self.now + mine
        count = 0
        for j, hand in enumerate(hands):
            theirs = hand.rollout_s if rollout else hand.train_s[update]
            if theirs < mine and (hand.rolls if rollout else hand.trains):
                count += max(0, math.ceil((end - max(self._free[j], self.now)) / theirs - 1e-9) - 1)
                if count >= most:
                    return most
        return count
