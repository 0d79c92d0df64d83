"""What benchmarks/emulated_fleet.py runs: a workload cut to size, with scaled costs, on a fleet, in a policy.

case.plan()        what is run: shape, costs, devices in join order, layout
planned_s(plan)    seconds of an iteration as `digenrl plan` predicts them, before anything was run
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from digenrl import runspec
from digenrl.scheduling.ablation import Fleet, Policy, place
from digenrl.scheduling.bound import Pool, work_bound
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.policies import Layout
from digenrl.scheduling.predict import joining, predict
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import Unit
from digenrl.scheduling.workloads import workload
from flows.plan.costs import GAP_S
from workers.emulated import config_for, scaled


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        workload: name.
        fleet: devices.
        policy: schedule.
        groups: P, cut from the workload's.
        factor: an emulated second is so many seconds of this one.
        iterations: of the run; the first and the last do not count.
    """

    workload: str
    fleet: Fleet
    policy: Policy
    groups: int
    factor: float
    iterations: int

    @property
    def label(self) -> str:
        """Workload and what was cut from it."""
        return f"{self.workload} (P={self.groups})"

    def plan(self) -> Plan:
        """What is run."""
        whole = workload(self.workload)
        cut = replace(whole, run=replace(whole.run, groups=self.groups))
        shape = cut.shape(self.iterations, cut.timestep_batch if self.policy.tsp else 1)
        bound = work_bound(cut.cost_model(cut.shape(self.iterations)), self.fleet.pools)
        shape = replace(shape, stale_groups=int(self.policy.stale_fraction * self.groups))
        costs = scaled(cut.cost_model(shape), self.factor)
        pools, layout = place(self.policy, self.fleet, costs)
        return Plan(self, shape, costs, tuple(pools), layout, cut.run.std_scope, bound.samples_per_s)


@dataclass(frozen=True)
class Plan:
    """A case, resolved.

    Attributes:
        case: where it comes from.
        shape: of the run.
        costs: scaled, without any orchestration.
        pools: the devices, in join order.
        layout: roles.
        std_scope: of the advantages.
        bound_samples_per_s: the work bound's rate on policy, not scaled.
    """

    case: Case
    shape: RunShape
    costs: CostModel
    pools: tuple[Pool, ...]
    layout: Layout
    std_scope: StdScope
    bound_samples_per_s: float

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the devices, in join order."""
        return tuple(event.kind for event in joining(self.pools))

    def scheduler(self) -> Scheduler:
        """Fresh; the same on both clocks."""
        return Scheduler(
            self.shape,
            self.layout,
            runspec.advantage_rule(config_for(self.shape, self.std_scope)),
            std_scope=self.std_scope,
            gap=self.case.policy.gap,
            streaming=self.case.policy.streaming,
            costs=CostModel.from_json(self.shape, self.costs.to_json()),
        )

    @property
    def shortest_unit_s(self) -> float:
        """The shortest rollout or train unit, slept."""
        first = self.shape.micro_batches(0)[0]
        units: list[Unit] = [*self.shape.rollout_units(first), *self.shape.train_units(first)]
        return min(self.costs.seconds(unit, kind) for unit in units for kind in set(self.kinds))


def planned_s(plan: Plan) -> float:
    """Mean seconds of an iteration, from the seconds of units and the pause that plans assume between two of them."""
    costs = CostModel.from_json(plan.shape, plan.costs.to_json())
    for kind in costs.kinds:
        costs.note("gap_s", kind, GAP_S)
    case = plan.case
    return predict(
        costs,
        plan.pools,
        plan.layout,
        std_scope=plan.std_scope,
        iterations=case.iterations,
        gap=case.policy.gap,
        streaming=case.policy.streaming,
    ).iteration_s
