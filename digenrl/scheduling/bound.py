"""How fast a fleet could be at best: the work bound, and the critical path of one iteration.

    Pool             workers of one kind
    work_bound       linear program over kinds of worker x kinds of unit
    critical_path_s  the longest chain of units that must follow one another

Work is computing: rollout, score, train, update, each at its best batch, so the bound is the same for every layout.
Role switches, gathering, installing, merging and orchestration are not work. The program lets every worker divide its
time freely and knows no order, so no schedule that trains every sample on policy can beat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import linprog

from digenrl.identity import MicroBatchId
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.messages import Capability
from digenrl.scheduling.units import Lane, RolloutUnit, ScoreUnit, UpdateUnit

Activity = Literal["rollout", "score", "train", "update"]

ACTIVITIES: tuple[Activity, ...] = ("rollout", "score", "train", "update")

#: What a worker must be capable of.
NEEDS: dict[Activity, Capability] = {"rollout": "rollout", "score": "score", "train": "train", "update": "train"}

EVERYTHING: frozenset[Capability] = frozenset({"rollout", "train", "score"})


@dataclass(frozen=True)
class Pool:
    """Workers of one kind.

    Attributes:
        kind: their type; costs are looked up by it.
        count: how many.
        capabilities: what each of them can do.
        price_per_hour: of one worker, in any currency; None if unknown.
    """

    kind: str
    count: int
    capabilities: frozenset[Capability] = EVERYTHING
    price_per_hour: float | None = None


@dataclass(frozen=True)
class WorkBound:
    """The least time of one iteration.

    Attributes:
        seconds: of one iteration.
        samples_per_s: the corresponding rate.
        busy: (index of the pool, lane) -> share of its time it works in the optimum.
        seconds_by_activity: (index of the pool, activity) -> worker-seconds it spends on it.
        price: activity -> seconds the iteration gets longer per second of it added on the reference kind; the
            activities that bind are those with a price above 0.
    """

    seconds: float
    samples_per_s: float
    busy: dict[tuple[int, Lane], float]
    seconds_by_activity: dict[tuple[int, Activity], float]
    price: dict[Activity, float]

    @property
    def binding(self) -> tuple[Activity, ...]:
        """Activities that more or faster workers for would shorten the iteration, the most binding first."""
        return tuple(sorted((a for a, price in self.price.items() if price > 1e-9), key=lambda a: -self.price[a]))


def demand(model: CostModel) -> dict[Activity, float]:
    """Units of work of one iteration: micro-batches, micro-batches, trained timesteps of micro-batches, steps.

    A trained timestep that needs a no-grad forward under its version's adapter (stale groups, and updates after the
    first) counts as 1 + replay_share. The first iteration has no stale groups; those of the others are counted.
    """
    shape = model.shape
    micro_batches = shape.groups * shape.micro_batches_per_group
    replays = sum(not shape.on_policy(m) for m in shape.micro_batches(shape.start_iteration + 1)) / micro_batches
    steps = micro_batches * len(shape.trained_steps(shape.start_iteration))
    return {
        "rollout": float(micro_batches),
        "score": float(micro_batches),
        "train": steps * (1 + replays * model.replay_share),
        "update": float(shape.updates),
    }


def work_of(model: CostModel, kind: str) -> dict[Activity, float]:
    """Seconds of one unit of `demand` on a kind of worker."""
    shape = model.shape
    micro_batch = MicroBatchId("train", shape.start_iteration, 0)
    return {
        "rollout": model.work_s(RolloutUnit(micro_batch, 0, shape.num_steps), kind),
        "score": model.work_s(ScoreUnit(micro_batch), kind),
        "train": model.best_train_step_s(kind),
        "update": model.work_s(UpdateUnit(1), kind),
    }


def lane_of(activity: Activity) -> Lane:
    """The lane an activity occupies."""
    return "cpu" if activity == "score" else "device"


def work_bound(model: CostModel, pools: Sequence[Pool]) -> WorkBound:
    """Solve: minimise t such that every activity's demand is met and no lane of a pool works longer than count * t.

    Args:
        model: costs and, through its shape, the work of an iteration.
        pools: the fleet.

    Raises:
        ValueError: nobody is capable of an activity that takes time.
    """
    amounts = demand(model)
    works = [work_of(model, pool.kind) for pool in pools]
    for activity in ACTIVITIES:
        if not any(pool.count and NEEDS[activity] in pool.capabilities for pool in pools):
            raise ValueError(
                f"the fleet has no worker with the capability {NEEDS[activity]!r}; there are {_name(pools)}"
            )
    pairs = [(i, a) for i, pool in enumerate(pools) for a in ACTIVITIES if NEEDS[a] in pool.capabilities]
    lanes: list[tuple[int, Lane]] = [(i, lane) for i in range(len(pools)) for lane in ("device", "cpu")]
    # Columns: units of an activity on a pool, and last the time.
    meets = np.zeros((len(ACTIVITIES), len(pairs) + 1))
    fills = np.zeros((len(lanes), len(pairs) + 1))
    for column, (i, activity) in enumerate(pairs):
        meets[ACTIVITIES.index(activity), column] = 1.0
        fills[lanes.index((i, lane_of(activity))), column] = works[i][activity]
    fills[:, -1] = [-pools[i].count for i, _ in lanes]
    goal = np.append(np.zeros(len(pairs)), 1.0)
    found: Any = linprog(
        goal, A_ub=fills, b_ub=np.zeros(len(lanes)), A_eq=meets, b_eq=[amounts[a] for a in ACTIVITIES], method="highs"
    )
    if not found.success:
        raise ValueError(f"the work bound of {_name(pools)} could not be computed: {found.message}")
    seconds = float(found.fun)
    spent = {pair: float(x) * works[pair[0]][pair[1]] for pair, x in zip(pairs, found.x[:-1], strict=True)}
    busy: dict[tuple[int, Lane], float] = {}
    for i, lane in lanes:
        total = sum(s for (j, activity), s in spent.items() if j == i and lane_of(activity) == lane)
        busy[i, lane] = total / (pools[i].count * seconds) if pools[i].count and seconds else 0.0
    reference = work_of(model, model.kinds[0])
    marginals = dict(zip(ACTIVITIES, found.eqlin.marginals, strict=True))
    price = {a: float(marginals[a]) / reference[a] if reference[a] else 0.0 for a in ACTIVITIES}
    samples = model.shape.groups * model.shape.group_size
    return WorkBound(seconds, samples / seconds if seconds else float("inf"), busy, spent, price)


def critical_path_s(model: CostModel, pools: Sequence[Pool]) -> float:
    """Seconds of the longest chain of one iteration if every unit had the fastest capable worker at once.

    A micro-batch is generated, scored, one of its train units runs, and the optimiser steps; each further update
    needs at least one train unit after the step before. Train units are as the run cuts them.
    """
    shape = model.shape

    def fastest(activity: Activity, seconds_on: Any) -> float:
        able = [pool for pool in pools if pool.count and NEEDS[activity] in pool.capabilities]
        return min(float(seconds_on(pool.kind)) for pool in able)

    micro_batches = shape.micro_batches(shape.start_iteration)
    path = fastest("rollout", lambda kind: work_of(model, kind)["rollout"])
    path += fastest("score", lambda kind: work_of(model, kind)["score"])
    for update in range(shape.updates):
        first = micro_batches[update * shape.groups_per_update * shape.micro_batches_per_group]
        longest = max(shape.train_units(first), key=lambda unit: len(unit.steps))
        path += fastest("train", lambda kind, unit=longest: model.work_s(unit, kind))
        path += fastest("update", lambda kind: work_of(model, kind)["update"])
    return path


def _name(pools: Sequence[Pool]) -> str:
    return ", ".join(f"{p.count} x {p.kind} ({', '.join(sorted(p.capabilities))})" for p in pools) or "no workers"
