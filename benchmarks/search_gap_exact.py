"""The shortest schedule of a case, by OR-Tools CP-SAT: over all assignments and orders without preemption.

Rollouts run where they can, samples are scored beside the devices (without waiting for a lane, which only makes the
optimum better), train units run where they can once their whole group is scored, and one device runs one unit at a
time. Samples of a group, groups, and workers of equal rate and capabilities are interchangeable; one order is fixed.
"""

from __future__ import annotations

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


def solve(case: Case, limit_s: float, hint: int) -> Exact:
    """Search for the shortest schedule.

    Args:
        case: the case.
        limit_s: deterministic time of the solver, roughly seconds.
        hint: ticks of a schedule that is known to exist.
    """
    model = _Model(case, hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time = limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = case.seed
    solver.parameters.symmetry_level = 2
    status = solver.solve(model.model)
    bound = int(solver.best_objective_bound)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(round(solver.objective_value), bound)
    if status == cp_model.INFEASIBLE:
        # Only schedules shorter than the hint are asked for.
        return Exact(hint, hint)
    return Exact(hint, bound)


class _Model:
    def __init__(self, case: Case, hint: int) -> None:
        self.case = case
        self.model = model = cp_model.CpModel()
        self._horizon = hint - 1
        self._lanes: list[list[cp_model.IntervalVar]] = [[] for _ in case.workers]
        self._loads: list[list[cp_model.LinearExprT]] = [[] for _ in case.workers]
        span = model.new_int_var(0, max(self._horizon, 0), "makespan")
        ready = [self._group(span) for _ in range(case.groups)]
        for one, two in pairwise(ready):
            model.add(one <= two)
        for lane in self._lanes:
            model.add_no_overlap(lane)
        self._loads_fit(span)
        model.minimize(span)

    def _group(self, span: cp_model.IntVar) -> cp_model.IntVar:
        """Rollouts and train units of one group. Returns when its last sample is scored."""
        case, model = self.case, self.model
        rollouts = [self._unit("rollout") for _ in range(case.group_size)]
        ready = model.new_int_var(0, self._horizon, "ready")
        # Scoring takes as long as on the fastest worker: no lane of a slower one has to be chosen.
        score = min(worker.score for worker in case.workers)
        for _, end in rollouts:
            model.add(ready >= end + score)
        trained = [self._unit("train") for _ in range(case.group_size * case.units)]
        for start, end in trained:
            model.add(start >= ready)
            model.add(end <= span)
        for units in (rollouts, trained):
            for (one, _), (two, _) in pairwise(units):
                model.add(one <= two)
        return ready

    def _unit(self, what: str) -> tuple[cp_model.IntVar, cp_model.IntVar]:
        model = self.model
        start, end = (model.new_int_var(0, self._horizon, f"{what} {edge}") for edge in ("start", "end"))
        chosen = []
        for i, worker in enumerate(self.case.workers):
            if not (worker.rolls if what == "rollout" else worker.trains):
                continue
            ticks = worker.rollout if what == "rollout" else worker.train
            here = model.new_bool_var(f"{what} on {i}")
            self._lanes[i].append(model.new_optional_interval_var(start, ticks, end, here, what))
            self._loads[i].append(ticks * here)
            chosen.append(here)
        model.add_exactly_one(chosen)
        return start, end

    def _loads_fit(self, span: cp_model.IntVar) -> None:
        """No worker works longer than the makespan; of interchangeable ones the first works longest."""
        seen: dict[CaseWorker, cp_model.LinearExprT] = {}
        for worker, terms in zip(self.case.workers, self._loads, strict=True):
            load = cp_model.LinearExpr.sum(terms)
            self.model.add(load <= span)
            if worker in seen:
                self.model.add(load <= seen[worker])
            seen[worker] = load
