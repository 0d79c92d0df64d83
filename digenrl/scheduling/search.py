"""Bubble-triggered search (BTS): whether a trainer with nothing to train is to begin a trajectory or to wait.

    survey         the present state as an Outlook
    BubbleSearch   the decision

At a bubble both answers are tried on a compact copy of what is left of the iteration, with the durations of the cost
model: the next decisions of all trainers are branched on, the rest follows two simple rules (always begin; never).
A trajectory is inserted only if the predicted end of the iteration falls. A trainer that rests is asked again when
something becomes ready to train, and when another one decides, on whom its answer may have relied.

The search is deterministic, remembers states, cuts off branches that cannot win, and spends no more than a fixed share
of the time that it decides about; where that is too little for both answers, far from the iteration's end, the trainer
helps.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection

from digenrl.scheduling.batches import Batch
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.foresight import Foresight
from digenrl.scheduling.outlook import Hand, Outlook, Sizes
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.state import State
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, UpdateUnit

#: Share of the time that may go into searching; seconds one unit takes in an Outlook, roughly; and how many of those
#: steps it takes to count one micro-batch in a survey.
_SHARE, _STEP_S, _SURVEY_STEPS = 0.01, 8e-6, 0.2

#: Decisions of trainers that are branched on.
_MOST_DEPTH = 5


class BubbleSearch:
    """Decides for each trainer with a bubble: skip, or insert a rollout."""

    def __init__(self, state: State, foresight: Foresight, std_scope: StdScope) -> None:
        self._state = state
        self._foresight = foresight
        self._std_scope = std_scope
        # When each trainer last chose to rest, and how many trajectories waited then.
        self._rested: dict[str, tuple[float, int]] = {}
        self._began: float | None = None
        self.searches = 0
        self.steps = 0.0

    def inserts(self, worker: Worker, waiting: int) -> bool:
        """Whether this idle trainer is to begin one of the trajectories of which so many wait."""
        state = self._state
        moment = state.now, waiting
        rests = self._rested.get(worker.name) == moment or not self._decide(worker, waiting)
        if rests:
            state.resting.add(worker.name)
            self._rested[worker.name] = moment
        else:
            state.resting.discard(worker.name)
            moment = state.now, waiting - 1
        # What the others decided in other circumstances is decided again.
        state.awake.update(name for name in state.resting if self._rested[name] != moment)
        return not rests

    def _decide(self, worker: Worker, waiting: int) -> bool:
        state, budget = self._state, self._budget()
        survey_steps = _SURVEY_STEPS * len(state.batches)
        if state.stuck or survey_steps + 2 * waiting > budget:
            return True
        staying = [w for w in state.fleet.workers.values() if not w.draining]
        resting = [w for w in staying if w is worker or self._rested.get(w.name) == (state.now, waiting)]
        base = survey(state, self._foresight, self._std_scope, staying, resting)
        self.steps += survey_steps
        place = staying.index(worker)
        return not base.is_choice(place) or 4 * base.units > budget or self._better(base, place, budget)

    def _budget(self) -> float:
        """Steps this search may take: all workers' searches together must not exceed their share of the time so far.

        What is due during the first trajectory is granted in advance, and no search takes more than one worker's part.
        """
        state, fleet = self._state, self._state.fleet
        if self._began is None:
            self._began = state.now
        trajectory = _SHARE / _STEP_S * min(self._foresight.rollout_s(kind) for kind, n in fleet.kinds.items() if n)
        due = _SHARE / _STEP_S * (state.now - self._began)
        return min(trajectory / len(fleet.workers), trajectory + due - self.steps)

    def _better(self, base: Outlook, place: int, budget: float) -> bool:
        # Both answers lead to 2 ** depth leaves, each of which is followed to the end twice.
        depth = min(_MOST_DEPTH, int(math.log2(budget / (4 * base.units))))
        insert, skip = base.copy(), base.copy()
        insert.insert(place)
        skip.rest(place)
        known: dict[tuple[object, ...], float] = {}
        skipped = _best(skip, depth, math.inf, known)
        inserted = _best(insert, depth, skipped, known)
        self.searches += 1
        self.steps += base.steps[0]
        return skipped - inserted > 1e-6


def _best(outlook: Outlook, depth: int, limit: float, known: dict[tuple[object, ...], float]) -> float:
    """The earliest end that is reached by branching on the next decisions, or `limit` if that is not later."""
    place = outlook.advance()
    if place is None:
        return min(limit, outlook.end)
    if outlook.bound >= limit:
        return limit
    # Equal states may be reached at different times.
    key, now = (depth, place, *outlook.key()), outlook.now
    if key in known:
        return min(limit, now + known[key])
    insert = outlook.copy()
    insert.insert(place)
    outlook.rest(place)
    if depth == 0:
        best = min(limit, insert.finish(inserting=True), outlook.finish(inserting=False))
    else:
        best = _best(insert, depth - 1, limit, known)
        best = _best(outlook, depth - 1, best, known)
    if best < limit:
        known[key] = best - now
    return best


def survey(
    state: State, foresight: Foresight, std_scope: StdScope, workers: list[Worker], resting: Collection[Worker]
) -> Outlook:
    """The present state of the iteration in progress.

    Args:
        state: of the scheduler.
        foresight: its predictions.
        std_scope: over which samples the standard deviation is taken.
        workers: those that are not leaving, in join order.
        resting: idle trainers that wait for something to train.
    """
    return _Survey(state, foresight, std_scope, workers).outlook(resting)


class _Survey:
    """Counts what is left, by group, std scope and update."""

    def __init__(self, state: State, foresight: Foresight, std_scope: StdScope, workers: list[Worker]) -> None:
        self._state, self._foresight, self._workers = state, foresight, workers
        shape = state.shape
        self._first = shape.theta_of_version(state.version) + 1
        per_update = shape.groups_per_update
        scopes = {"group": range(shape.groups), "iteration": [0] * shape.groups}
        self._scope_of = tuple(scopes.get(std_scope, [group // per_update for group in range(shape.groups)]))
        self._free = {worker.name: self._free_at(worker) for worker in workers}
        count = self._scope_of[-1] + 1
        # Updates before the one in progress have nothing left.
        self._done = state.theta + 1 - self._first
        self._waiting = [0] * shape.groups
        self._ready_at = [state.now] * count
        self._scored = set(range(count))
        self._yields: list[defaultdict[int, int]] = [defaultdict(int) for _ in range(count)]
        self._pool, self._left = ([0] * shape.updates for _ in range(2))
        self._trained = [0.0] * shape.updates
        self._score_s = max(
            foresight.unit_s(ScoreUnit(shape.micro_batches(state.version)[0]), w.kind) for w in workers
        ) + max(foresight.transfer_s(w) for w in workers)
        for batch in state.batches.values():
            if batch.id.phase == "train" and batch.id.iteration == state.version:
                self._count(batch)

    def _free_at(self, worker: Worker) -> float:
        """When a worker can begin something new: it may lack the adapter, or be in the middle of a trajectory."""
        state, foresight = self._state, self._foresight
        at = foresight.free_at(worker, state.now)
        if worker.name not in state.ledger.adapters(state.version_theta):
            return max(at, state.now + (foresight.costs.of_kind(worker.kind).install_s or 0.0))
        if worker.rolling is None:
            return at
        batch = state.batches[worker.rolling]
        return at + sum(foresight.unit_s(unit, worker.kind) for unit in batch.rollout[batch.issued :])

    def _complete_at(self, batch: Batch) -> float:
        """When a trajectory that is begun will be complete: not after what its worker has been given behind it."""
        worker = self._state.fleet.workers.get(batch.roller or "")
        if worker is None or worker.name not in self._free:
            return self._state.now
        behind = 0.0
        for unit in reversed(worker.device):
            if isinstance(unit, RolloutUnit) and unit.micro_batch == batch.id:
                break
            behind += self._foresight.unit_s(unit, worker.kind)
        return self._free[worker.name] - behind if worker.rolling is None else self._free[worker.name]

    def _count(self, batch: Batch) -> None:
        state, group = self._state, self._state.shape.group_of(batch.id)
        update, scope = batch.update - self._first, self._scope_of[group]
        ready = len(batch.open) - len(batch.running)
        if update < self._done:
            return
        for name in batch.running.values():
            self._trained[update] = max(self._trained[update], self._free.get(name, state.now))
        self._left[update] += ready
        if batch.advantages is not None:
            self._pool[update] += ready
            return
        self._scored.discard(scope)
        self._yields[scope][update] += ready
        if not state.ledger.holders(batch.id):
            if batch.roller is None:
                self._waiting[group] += 1
                return
            self._ready_at[scope] = max(self._ready_at[scope], self._complete_at(batch) + self._score_s)
        elif batch.scores is None:
            self._ready_at[scope] = max(self._ready_at[scope], state.now + self._score_s)

    def outlook(self, resting: Collection[Worker]) -> Outlook:
        """All of it as an Outlook."""
        state, updates, done = self._state, self._state.shape.updates, self._done
        sizes = Sizes(
            hands=tuple(self._hand(worker) for worker in self._workers),
            score_s=self._score_s,
            step_s=self._step_s(),
            scope_of=self._scope_of,
            update_of=tuple(group // state.shape.groups_per_update - done for group in range(state.shape.groups)),
            yields=tuple(
                tuple((update - done, units) for update, units in sorted(found.items())) for found in self._yields
            ),
        )
        last = [next(reversed(worker.device), None) for worker in self._workers]
        return Outlook(
            sizes,
            state.now,
            free=[self._free[worker.name] for worker in self._workers],
            rollout=[isinstance(unit, RolloutUnit) for unit in last],
            resting=frozenset(i for i, worker in enumerate(self._workers) if worker in resting),
            waiting=self._waiting,
            ready_at=self._ready_at,
            scored=frozenset(self._scored),
            pool=self._pool[done:updates],
            left=self._left[done:updates],
            trained=[max(state.now, at) for at in self._trained[done:updates]],
        )

    def _hand(self, worker: Worker) -> Hand:
        state, foresight = self._state, self._foresight
        takes = state.layout.takes(worker, state.stage)
        rolls = "rollout" in worker.roles
        micro_batches = state.shape.micro_batches(state.version)
        train_s = []
        for update in range(self._done, state.shape.updates):
            group = update * state.shape.groups_per_update
            units = state.shape.train_units(micro_batches[group * state.shape.micro_batches_per_group])
            train_s.append(sum(foresight.unit_s(unit, worker.kind) for unit in units) / len(units))
        switch_s = foresight.costs.of_kind(worker.kind).switch_s
        return Hand(
            rollout_s=foresight.rollout_s(worker.kind),
            train_s=tuple(train_s),
            switch_s=switch_s or 0.0,
            rolls=rolls,
            trains=worker.trains,
            helps=not rolls and "rollout" in takes,
            assists="assist" in worker.roles,
        )

    def _step_s(self) -> float:
        """Merging, the optimiser step, its commit and the installation of the new adapter, in that order."""
        state, foresight = self._state, self._foresight
        lead = state.fleet.workers.get(state.lead or "", self._workers[0])
        moves = foresight.costs.of_kind(lead.kind).install_s or 0.0
        return 3 * moves + foresight.unit_s(UpdateUnit(state.theta + 1), lead.kind)
