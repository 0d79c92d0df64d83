"""What each technique brings: one workload on one fleet, layout by layout, on the virtual clock.

    Fleet       workers by kind; FLEETS are those of the benchmark
    POLICIES    the rows, in order
    ablation    (workload, fleet, gap_s) -> a Row per policy
    place       which workers train under a policy

From `colocated-published` to `+TSP` each row changes one thing. On policy are all rows but `+TCSS`. The work bound is
that of the on-policy run, for every row, so fractions of it are proportional to rates. With TSP the timestep batch is
the best one for the layout, on both sides. A policy that a workload cannot have (streaming needs a standard deviation
per group) has no row. Full training is shown with all of them, priced with the switch and the installation of all
weights, though runs refuse it with more than GAP and TSP.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from digenrl.scheduling.allocate import propose
from digenrl.scheduling.bound import Pool, work_bound
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.policies import Colocated, Digenrl, Disaggregated, Layout
from digenrl.scheduling.predict import Prediction, predict
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.staffing import Offer, Staffing
from digenrl.scheduling.workloads import Workload

#: Iterations per prediction; the first and the last one do not count.
ITERATIONS = 4

#: Role splits that are tried per timestep batch where all help.
MOST_SPLITS = 5

LayoutName = Literal["colocated", "disaggregated", "digenrl"]

#: Timestep batch, fleet with trainers first, layout.
Arrangement = tuple[int, Sequence[Pool], Layout]


@dataclass(frozen=True)
class Fleet:
    """Workers by kind, the fastest kind first."""

    name: str
    pools: tuple[Pool, ...]

    @property
    def workers(self) -> int:
        """How many."""
        return sum(pool.count for pool in self.pools)


def _mixed(count: int) -> tuple[Pool, ...]:
    return Pool("rate-1.0", count // 2), Pool("rate-0.6", count // 4), Pool("rate-0.35", count // 4)


#: The fleets of the benchmark, by name. A mixed one has half of its workers of rate 1.0, a quarter each of the others.
FLEETS: Mapping[str, Fleet] = {
    fleet.name: fleet
    for count in (16, 32)
    for fleet in (
        Fleet(f"{count}-homogeneous", (Pool("rate-1.0", count),)),
        Fleet(f"{count}-mixed", _mixed(count)),
    )
}


@dataclass(frozen=True)
class Policy:
    """One schedule.

    Attributes:
        name: of the row.
        layout: roles.
        gap: spread each group over all workers.
        tsp: several trained timesteps in one train unit.
        streaming: train before the group is complete.
        stale_fraction: share of the groups that are generated one version early.
    """

    name: str
    layout: LayoutName
    gap: bool = True
    tsp: bool = True
    streaming: bool = False
    stale_fraction: float = 0.0


POLICIES: tuple[Policy, ...] = (
    Policy("colocated-published", "colocated", tsp=False),
    Policy("colocated", "colocated"),
    Policy("disaggregated", "disaggregated", gap=False, tsp=False),
    Policy("+GAP", "disaggregated", tsp=False),
    Policy("+TSP", "disaggregated"),
    Policy("+TAG", "digenrl"),
    Policy("+TCSS", "digenrl", stale_fraction=0.25),
    Policy("streaming+TAG", "digenrl", streaming=True),
)


@dataclass(frozen=True)
class Row:
    """One schedule of one workload on one fleet.

    Attributes:
        workload: its name.
        fleet: its name.
        policy: its name.
        clock: where the time is from.
        samples_per_s: rate, the first and the last iteration left out.
        ratio_colocated: to `colocated`, which has batched timesteps too.
        ratio_published: to `colocated-published`, one timestep per train unit.
        fraction_of_bound: of the rate that the on-policy work bound allows.
        utilisation: share of the devices' time that units ran.
        stale_share: share of the samples that are one version old when they are trained on.
        because: which item of the devices' time makes the difference to `colocated`.
    """

    workload: str
    fleet: str
    policy: str
    clock: Literal["virtual"]
    samples_per_s: float
    ratio_colocated: float
    ratio_published: float
    fraction_of_bound: float
    utilisation: float
    stale_share: float
    because: str


def ablation(workload: Workload, fleet: Fleet, gap_s: float, *, policies: Sequence[Policy] = POLICIES) -> list[Row]:
    """Every policy on the virtual clock.

    Args:
        workload: shape and costs.
        fleet: of kinds the workload knows.
        gap_s: orchestration gap between two units of a lane, as measured.
        policies: rows wanted; both colocated ones are simulated in any case.
    """
    names = [policy.name for policy in policies]
    known = {p.name: p for p in (*POLICIES[:2], *policies) if not (p.streaming and workload.run.std_scope != "group")}
    study = _Study(workload, fleet, gap_s)
    found = {name: study.predict(policy) for name, policy in known.items()}
    published, colocated = found["colocated-published"], found["colocated"]
    return [
        Row(
            workload=workload.name,
            fleet=fleet.name,
            policy=name,
            clock="virtual",
            samples_per_s=found[name].samples_per_s,
            ratio_colocated=found[name].samples_per_s / colocated.samples_per_s,
            ratio_published=found[name].samples_per_s / published.samples_per_s,
            fraction_of_bound=found[name].samples_per_s / study.bound_samples_per_s,
            utilisation=found[name].utilisation,
            stale_share=study.stale_groups(known[name]) / workload.run.groups,
            because=because(found[name], colocated),
        )
        for name in names
        if name in found
    ]


class _Study:
    """One workload on one fleet."""

    def __init__(self, workload: Workload, fleet: Fleet, gap_s: float) -> None:
        self._workload, self._fleet, self._gap_s = workload, fleet, gap_s
        self._arranged: dict[tuple[str, bool, bool], Arrangement] = {}
        shape = workload.shape(ITERATIONS)
        self.bound_samples_per_s = work_bound(workload.cost_model(shape, gap_s), fleet.pools).samples_per_s

    def stale_groups(self, policy: Policy) -> int:
        """Groups of an iteration that are generated one version early."""
        return int(policy.stale_fraction * self._workload.run.groups)

    def predict(self, policy: Policy) -> Prediction:
        """One policy on the virtual clock, with the arrangement that suits its layout best on policy."""
        key = (policy.layout, policy.gap, policy.tsp)
        if key not in self._arranged:
            self._arranged[key] = self._arrange(policy)
        batch, pools, layout = self._arranged[key]
        return self._run(policy, self._model(batch, self.stale_groups(policy)), pools, layout)

    def _arrange(self, policy: Policy) -> Arrangement:
        """The timestep batch, picked once by the virtual clock from all, half and one, and then the roles."""
        most, scope = self._workload.timestep_batch, self._workload.run.std_scope
        best, fastest = 1, 0.0
        # Of equally good ones the largest batch.
        for batch in dict.fromkeys((most, -(-most // 2), 1)) if policy.tsp else ():
            model = self._model(batch)
            pools, layout = _place(policy.layout, self._fleet, model)
            rate = predict(model, pools, layout, std_scope=scope, iterations=3).samples_per_s
            if rate > fastest * (1 + 1e-6):
                best, fastest = batch, rate
        return best, *place(policy, self._fleet, self._model(best), scope)

    def _model(self, batch: int, stale_groups: int = 0) -> CostModel:
        shape = replace(self._workload.shape(ITERATIONS, batch), stale_groups=stale_groups)
        return self._workload.cost_model(shape, self._gap_s)

    def _run(self, policy: Policy, model: CostModel, pools: Sequence[Pool], layout: Layout) -> Prediction:
        return predict(
            model,
            pools,
            layout,
            std_scope=self._workload.run.std_scope,
            iterations=ITERATIONS,
            gap=policy.gap,
            streaming=policy.streaming,
        )


def place(
    policy: Policy, fleet: Fleet, model: CostModel, std_scope: StdScope = "group"
) -> tuple[Sequence[Pool], Layout]:
    """The fleet with trainers first, and the layout that makes them trainers.

    A fixed split is the one in which neither role waits; where all help, the virtual clock decides.
    """
    if policy.layout != "digenrl":
        return _place(policy.layout, fleet, model)
    offers = _offers(fleet)
    quick = functools.partial(predict, iterations=3)
    proposal = propose(model, offers, layout=Digenrl, std_scope=std_scope, max_simulations=MOST_SPLITS, predicted=quick)
    return proposal.plan.pools(offers), Digenrl(sum(proposal.plan.trainers))


def _place(layout: LayoutName, fleet: Fleet, model: CostModel) -> tuple[Sequence[Pool], Layout]:
    if layout == "colocated":
        return fleet.pools, Colocated()
    offers = _offers(fleet)
    plan = Staffing(model, offers, split=True, budget=None).fastest()
    kind = Digenrl if layout == "digenrl" else Disaggregated
    return plan.pools(offers), kind(sum(plan.trainers))


def _offers(fleet: Fleet) -> tuple[Offer, ...]:
    return tuple(Offer(pool.kind, pool.count, least=pool.count) for pool in fleet.pools)


def because(row: Prediction, colocated: Prediction) -> str:
    """The item of the devices' time in which a schedule differs most from the colocated one.

    Seconds of one device per iteration, summed over the fleet, by activity and by cause of standing still.
    """
    items: dict[str, float] = {}
    for sign, prediction in ((1.0, row), (-1.0, colocated)):
        work = {str(name): seconds for name, seconds in prediction.activity_s.items() if name != "score"}
        idle = {f"waiting for {cause}": seconds for cause, seconds in prediction.bubble_s.items()}
        for item, seconds in (work | idle).items():
            items[item] = items.get(item, 0.0) + sign * seconds
    total = math.fsum(items.values())
    whole = colocated.iteration_s * len(colocated.kinds)
    if abs(total) < 0.005 * whole:
        return f"no item: {total / whole:+.1%} of the time of colocated"
    name = max(items, key=lambda item: items[item] * math.copysign(1.0, total))
    return f"{name}: {items[name] / whole:+.1%} of {total / whole:+.1%} of the time of colocated"
