"""Schedules to compare, and trying them on the virtual clock.

schedule_of(config)        the configured one
schedules(subject)         the rows of a comparison
Planner                    subject, costs and fleet -> predictions, each at its best role split or a given one
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from digenrl.config.streaming import hindrance
from digenrl.scheduling.allocate import Proposal, propose
from digenrl.scheduling.bound import Pool, work_bound
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.policies import Colocated, Digenrl, Disaggregated, Layout
from digenrl.scheduling.predict import Prediction, joining, predict
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.staffing import Offer, Plan, Staffing
from flows.plan.subject import Subject

#: Share of stale groups in the comparison, where the configuration has none.
STALE_FRACTION = 0.25


@dataclass(frozen=True)
class Schedule:
    """What can be chosen about a schedule apart from roles; see ScheduleConfig.

    Attributes:
        name: of the row.
        colocated: everybody does everything; else trainers and rollout workers.
        gap: samples of a group are spread over all rollout workers.
        helps: trainers with nothing to train roll out.
        search: only when the iteration is predicted to end earlier.
        streaming: samples are trained before their group is complete.
        timestep_batch: trained timesteps per unit.
        stale_groups: groups generated one version early.
    """

    name: str
    colocated: bool
    gap: bool
    helps: bool
    search: bool
    streaming: bool
    timestep_batch: int
    stale_groups: int

    def layout(self, trainers: int) -> Layout:
        """Roles and order."""
        if self.colocated:
            return Colocated()
        return (Digenrl if self.helps else Disaggregated)(trainers)


def schedule_of(subject: Subject) -> Schedule:
    """The configured schedule."""
    schedule, shape = subject.config.schedule, subject.shape
    return Schedule(
        name="as configured",
        colocated=schedule.layout == "colocated",
        gap=schedule.gap,
        helps=schedule.assist != "off",
        search=schedule.assist == "search",
        streaming=schedule.streams,
        timestep_batch=shape.timestep_batch,
        stale_groups=shape.stale_groups,
    )


def schedules(subject: Subject) -> list[Schedule]:
    """What is compared: the published layouts, then one technique after the other; last the configured one, if new."""
    configured, shape, algorithm = schedule_of(subject), subject.shape, subject.config.algorithm
    bare = replace(configured, name="colocated", colocated=True, helps=False, search=False, streaming=False)
    bare = replace(bare, gap=True, stale_groups=0)
    apart = replace(bare, name="disaggregated", colocated=False, gap=False)
    pipelined = replace(apart, name="+ GAP", gap=True)
    assisted = replace(pipelined, name="+ TAG", helps=True, search=True)
    stale = configured.stale_groups or max(1, int(STALE_FRACTION * shape.groups))
    rows = [bare, apart, pipelined, assisted]
    if len(shape.trained_steps(shape.start_iteration)) > 1 and bare.timestep_batch > 1:
        rows.insert(0, replace(bare, name="genrl (timestep batch 1)", timestep_batch=1))
    if shape.groups > 1:
        rows.append(replace(assisted, name=f"+ TCSS ({stale} of {shape.groups} groups)", stale_groups=stale))
    if hindrance(algorithm) is None and shape.micro_batches_per_group > 1:
        rows.append(replace(assisted, name="GAP, TAG, streaming", streaming=True))
    if subject.config.method == "full":  # what needs weights beside those that are trained is refused
        rows = [row for row in rows if not (row.helps or row.streaming or row.stale_groups)]
    if not any(replace(row, name=configured.name) == configured for row in rows):
        rows.append(configured)
    return rows


@dataclass(frozen=True)
class Planned:
    """A schedule with its roles on the virtual clock.

    Attributes:
        schedule: what was tried.
        split: trainers by kind of worker; empty where there are no roles.
        trainers: their names in the prediction.
        prediction: how it goes.
    """

    schedule: Schedule
    split: Mapping[str, int]
    trainers: frozenset[str]
    prediction: Prediction


@dataclass(frozen=True)
class Planner:
    """Tries schedules of one subject on one fleet.

    Attributes:
        model: costs; its shape is the subject's.
        pools: the fleet.
        std_scope: over which samples the standard deviation is taken.
        iterations: to simulate.
        watch: hears now and then how many units have ended in the present simulation.
    """

    model: CostModel
    pools: Sequence[Pool]
    std_scope: StdScope
    iterations: int = 4
    watch: Callable[[int], None] | None = None

    def bound_s(self) -> float:
        """Seconds of an iteration at the work bound, on policy."""
        shape = replace(self.model.shape, stale_groups=0)
        return work_bound(CostModel.from_json(shape, self.model.to_json()), self.pools).seconds

    def best(self, schedule: Schedule, simulations: int) -> Planned:
        """At the role split that is fastest on the virtual clock, of so many that are tried."""
        if schedule.colocated:
            return self._try(schedule, {})
        proposal = self._propose(schedule, self._offers(), simulations)
        split = self._split(proposal.plan)
        return Planned(schedule, split, self._names(split), proposal.prediction)

    def sized(
        self, schedule: Schedule, simulations: int, *, target_samples_per_s: float | None, budget_per_hour: float | None
    ) -> Proposal:
        """How many of the fleet's workers to take: the cheapest for a rate, or the fastest within a budget.

        Raises:
            ValueError: no number of them will do; the sentence says why.
        """
        offers = tuple(replace(offer, least=0) for offer in self._offers())
        wanted = {"target_samples_per_s": target_samples_per_s, "budget_per_hour": budget_per_hour}
        return self._propose(schedule, offers, simulations, **wanted)

    def staffed(self, schedule: Schedule) -> Planned:
        """At the role split that is best if nobody ever waits; one simulation."""
        if schedule.colocated:
            return self._try(schedule, {})
        staffing = Staffing(self._model(schedule), self._offers(), split=True, budget=None)
        return self._try(schedule, self._split(staffing.fastest()))

    def first(self, schedule: Schedule, trainers: int) -> Planned:
        """With the first `trainers` workers that can train as trainers, as a run with this number has it."""
        left, split = 0 if schedule.colocated else trainers, {}
        for pool in self.pools:
            split[pool.kind] = min(left, pool.count) if "train" in pool.capabilities else 0
            left -= split[pool.kind]
        return self._try(schedule, {} if schedule.colocated else split)

    def with_scope(self, planned: Planned, scope: StdScope) -> Prediction:
        """The same schedule and roles under another std scope. Streaming needs scope `group`."""
        if scope == self.std_scope:
            return planned.prediction
        schedule = replace(planned.schedule, streaming=planned.schedule.streaming and scope == "group")
        return replace(self, std_scope=scope)._try(schedule, planned.split).prediction

    def _propose(
        self, schedule: Schedule, offers: Sequence[Offer], simulations: int, **wanted: float | None
    ) -> Proposal:
        return propose(
            self._model(schedule),
            offers,
            roles="shared" if schedule.colocated else "split",
            layout=schedule.layout,
            std_scope=self.std_scope,
            max_simulations=simulations,
            predicted=functools.partial(self._predict, schedule),
            **wanted,
        )

    def _try(self, schedule: Schedule, split: Mapping[str, int]) -> Planned:
        pools, layout = self._ordered(split), schedule.layout(sum(split.values()))
        found = self._predict(schedule, self._model(schedule), pools, layout, std_scope=self.std_scope)
        return Planned(schedule, split, self._names(split), found)

    def _ordered(self, split: Mapping[str, int]) -> list[Pool]:
        """The fleet, trainers first: layouts take the first workers for trainers."""
        training = [replace(pool, count=split.get(pool.kind, 0)) for pool in self.pools]
        others = [replace(pool, count=pool.count - split.get(pool.kind, 0)) for pool in self.pools]
        return [pool for pool in (*training, *others) if pool.count]

    def _names(self, split: Mapping[str, int]) -> frozenset[str]:
        return frozenset(event.worker for event in joining(self._ordered(split))[: sum(split.values())])

    def _split(self, plan: Plan) -> dict[str, int]:
        return {pool.kind: count for pool, count in zip(self.pools, plan.trainers, strict=True)}

    def _predict(
        self, schedule: Schedule, model: CostModel, pools: Sequence[Pool], layout: Layout, *, std_scope: StdScope
    ) -> Prediction:
        switches = {"gap": schedule.gap, "search": schedule.search, "streaming": schedule.streaming}
        return predict(
            model, pools, layout, std_scope=std_scope, iterations=self.iterations, watch=self.watch, **switches
        )

    def _model(self, schedule: Schedule) -> CostModel:
        sizes = {"timestep_batch": schedule.timestep_batch, "stale_groups": schedule.stale_groups}
        return CostModel.from_json(replace(self.model.shape, **sizes), self.model.to_json())

    def _offers(self) -> tuple[Offer, ...]:
        return tuple(
            Offer(pool.kind, pool.count, pool.count, pool.price_per_hour, pool.capabilities) for pool in self.pools
        )
