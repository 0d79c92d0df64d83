"""The shortest schedule of a case, by OR-Tools CP-SAT: over all assignments and orders without preemption.

Rollouts run where they can, samples are scored beside the devices (without waiting for a lane, which only makes the
optimum better), train units run where they can once their whole group is scored, and one device runs one unit at a
time. Workers of equal rate and capabilities are interchangeable: units are given to a kind of worker, of which no more
are busy at any time than there are. So are groups, and the samples of a group: one order is fixed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model

from benchmarks.search_gap_cases import Case, CaseWorker


@dataclass(frozen=True)
class Exact:
    """What the solver found, in ticks.

    Attributes:
        best: the shortest schedule found.
        bound: no schedule is shorter.
    """

    best: int
    bound: int

    @property
    def proven(self) -> bool:
        """Whether the schedule is optimal."""
        return self.best == self.bound


def solve(case: Case, effort: float, known: int) -> Exact:
    """Search for the shortest schedule.

    Args:
        case: the case.
        effort: deterministic time of the solver; 0.5 is about three seconds.
        known: ticks of a schedule that is known to exist; only shorter ones are searched for.
    """
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = effort
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = case.seed
    status = solver.solve(_Model(case, known - 1).model)
    if status == cp_model.INFEASIBLE:
        return Exact(known, known)
    best = round(solver.objective_value) if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else known
    return Exact(best, round(solver.best_objective_bound))


@dataclass(frozen=True)
class _Unit:
    """A rollout or a train unit: on which kind of worker (0 or 1 each), and until when."""

    on: dict[CaseWorker, cp_model.IntVar]
    start: cp_model.IntVar
    end: cp_model.IntVar


@dataclass(frozen=True)
class _Group:
    rollouts: Sequence[_Unit]
    ready: cp_model.IntVar
    trained: Sequence[_Unit]


class _Model:
    def __init__(self, case: Case, horizon: int) -> None:
        self.case = case
        self.model = model = cp_model.CpModel()
        self._horizon = max(horizon, 0)
        self._kinds = Counter(case.workers)
        self._intervals: defaultdict[CaseWorker, list[cp_model.IntervalVar]] = defaultdict(list)
        self._span = self._time("makespan")
        self._groups = [self._group() for _ in range(case.groups)]
        _in_order(model, [group.ready for group in self._groups])
        for kind, count in self._kinds.items():
            intervals = self._intervals[kind]
            if count == 1:
                model.add_no_overlap(intervals)
            else:
                model.add_cumulative(intervals, [1] * len(intervals), count)
            self._fit(kind, count)
        model.minimize(self._span)

    def _time(self, name: str) -> cp_model.IntVar:
        return self.model.new_int_var(0, self._horizon, name)

    def _group(self) -> _Group:
        case, model = self.case, self.model
        rollouts = [self._unit("rollout") for _ in range(case.group_size)]
        ready = self._time("ready")
        for unit in rollouts:
            model.add(ready >= unit.end + case.score)
        trained = [self._unit("train") for _ in range(case.group_size * case.units)]
        for unit in trained:
            model.add(unit.start >= ready)
            model.add(unit.end <= self._span)
        for units in (rollouts, trained):
            _in_order(model, [unit.end for unit in units])
        return _Group(rollouts, ready, trained)

    def _unit(self, what: str) -> _Unit:
        start, end = self._time(f"{what} starts"), self._time(f"{what} ends")
        on = {}
        for kind in self._kinds:
            if kind.rolls if what == "rollout" else kind.trains:
                here = on[kind] = self.model.new_bool_var(f"{what} here")
                ticks = kind.rollout if what == "rollout" else kind.train
                self._intervals[kind].append(self.model.new_optional_interval_var(start, ticks, end, here, what))
        self.model.add_exactly_one(on.values())
        return _Unit(on, start, end)

    def _fit(self, kind: CaseWorker, count: int) -> None:
        """What follows already, but makes the bound much better: work fits into the time there is for it.

        Nothing takes longer than the makespan; the first groups are rolled out before the last of them is ready; the
        last groups are trained after the first of them is ready.
        """
        rollout = [kind.rollout * _here(group.rollouts, kind) for group in self._groups]
        train = [kind.train * _here(group.trained, kind) for group in self._groups]
        self.model.add(sum(rollout) + sum(train) <= count * self._span)
        for i, group in enumerate(self._groups):
            self.model.add(sum(rollout[: i + 1]) <= count * (group.ready - self.case.score))
            self.model.add(sum(train[i:]) <= count * (self._span - group.ready))


def _here(units: Iterable[_Unit], kind: CaseWorker) -> cp_model.LinearExprT:
    return cp_model.LinearExpr.sum([unit.on[kind] for unit in units if kind in unit.on])


def _in_order(model: cp_model.CpModel, times: Sequence[cp_model.IntVar]) -> None:
    for one, two in pairwise(times):
        model.add(one <= two)
