"""Which workers to have, and who trains: a role split and pool sizes for a target rate or a budget.

    propose     the best plan within a budget, the cheapest one for a target rate, or the best split of a fixed fleet

First an integer program over the offers (staffing), in which every role works without waiting; then the virtual clock,
which knows of waiting, on its solution and the neighbours that differ by one worker's role. Units cost what the run
makes of them (its timestep batch, gathering, forwards under the version's adapter), not what the work bound counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from digenrl.scheduling.bubbles import Cause
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.policies import Colocated, Disaggregated, Layout
from digenrl.scheduling.predict import Prediction, predict
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.staffing import Offer, Plan, Staffing

#: What keeps a plan from being faster.
Binding = Literal["rollout", "train", "score", "budget", "offer"]

#: The share of the target that prediction and target may differ by, and how often the program is solved for it.
_TOLERANCE, _ROUNDS = 0.01, 6


@dataclass(frozen=True)
class Proposal:
    """A plan and what to expect of it.

    Attributes:
        plan: counts by offer.
        offers: the offers it is made of.
        prediction: the plan on the virtual clock.
        cost_per_hour: None if a price is unknown.
        binding: what keeps it from being faster: a role that has no time left, the budget, or that no more workers
            are offered. A role is named if a worker more of it, taken from the other role, would be better placed.
        why: the same as a sentence for a person.
        simulated: plans that were tried on the virtual clock.
    """

    plan: Plan
    offers: tuple[Offer, ...]
    prediction: Prediction
    cost_per_hour: float | None
    binding: Binding
    why: str
    simulated: int


def propose(
    model: CostModel,
    offers: Sequence[Offer],
    *,
    budget_per_hour: float | None = None,
    target_samples_per_s: float | None = None,
    roles: Literal["split", "shared"] = "split",
    layout: Callable[[int], Layout] | None = None,
    std_scope: StdScope = "group",
    max_simulations: int = 24,
    predicted: Callable[..., Prediction] = predict,
) -> Proposal:
    """The fastest plan within the budget (or the offers), or the cheapest one that reaches the target.

    Args:
        model: costs; its shape is what is run.
        offers: what may be had.
        budget_per_hour: the most the workers may cost; needs all prices.
        target_samples_per_s: the rate to reach; the cheapest plan is meant, or the smallest if a price is unknown.
        roles: `split`: each worker either trains or rolls out; `shared`: all do both, so only counts are chosen.
        layout: number of trainers -> layout; default Disaggregated, or Colocated with shared roles.
        std_scope: over which samples the standard deviation is taken.
        max_simulations: plans to try on the virtual clock.
        predicted: `predict`, or the same with other switches.

    Raises:
        ValueError: no plan meets the conditions; the sentence says which one fails.
    """
    if budget_per_hour is not None and any(offer.price_per_hour is None for offer in offers):
        nameless = ", ".join(offer.kind for offer in offers if offer.price_per_hour is None)
        raise ValueError(f"budget_per_hour={budget_per_hour} needs price_per_hour of every offer; {nameless} has none")
    program = Staffing(model, tuple(offers), split=roles == "split", budget=budget_per_hour)
    make = layout or (Disaggregated if roles == "split" else lambda trainers: Colocated())
    trial = _Trial(model, program.offers, make, functools.partial(predicted, std_scope=std_scope), max_simulations)
    if target_samples_per_s is None:
        best = trial.climb(program.fastest(), split=program.split)
    else:
        best = _reach(target_samples_per_s, program, trial)
    prediction = trial.of(best)
    cost = _cost_per_hour(program.offers, best)
    binding, why = _binding(program, best, prediction, cost, budget_per_hour)
    return Proposal(best, program.offers, prediction, cost, binding, why, trial.count)


class _Trial:
    """Plans on the virtual clock, each once."""

    def __init__(
        self,
        model: CostModel,
        offers: tuple[Offer, ...],
        layout: Callable[[int], Layout],
        predicted: Callable[..., Prediction],
        most: int,
    ) -> None:
        self._model, self._offers, self._layout, self._predict, self._most = model, offers, layout, predicted, most
        self._known: dict[Plan, Prediction] = {}

    @property
    def count(self) -> int:
        """Plans tried."""
        return len(self._known)

    def of(self, plan: Plan) -> Prediction:
        """How a plan would go."""
        if plan not in self._known:
            layout = self._layout(sum(plan.trainers))
            self._known[plan] = self._predict(self._model, plan.pools(self._offers), layout)
        return self._known[plan]

    def climb(self, plan: Plan, *, split: bool) -> Plan:
        """Change one worker's role, or half the trainers' of an offer, as long as that is faster."""
        best = plan
        self.of(best)
        improved = split
        while improved:
            improved = False
            for neighbour in self._neighbours(best):
                if self.count >= self._most and neighbour not in self._known:
                    return best
                if self.of(neighbour).samples_per_s > self.of(best).samples_per_s * (1 + 1e-9):
                    best, improved = neighbour, True
                    break
        return best

    def trim(self, plan: Plan, target: float) -> Plan:
        """Leave out one worker at a time, dear ones first, as long as the target is still reached."""
        order = sorted(range(len(plan.counts)), key=lambda i: -(self._offers[i].price_per_hour or 0.0))
        smaller = [plan]
        while smaller:
            plan = smaller[0]
            smaller = [
                fewer
                for i in order
                for fewer in self._without(plan, i)
                if (fewer in self._known or self.count < self._most) and self.of(fewer).samples_per_s >= target
            ][:1]
        return plan

    def _without(self, plan: Plan, i: int) -> list[Plan]:
        """Plans with one worker less of an offer, in either role."""
        found = []
        for trains in (0, 1):
            counts = tuple(n - (j == i) for j, n in enumerate(plan.counts))
            trainers = tuple(t - trains * (j == i) for j, t in enumerate(plan.trainers))
            rollers = [n - t for n, t in zip(counts, trainers, strict=True)]
            split = any(plan.trainers)
            if counts[i] < self._offers[i].least or min(*trainers, *rollers) < 0:
                continue
            if max(rollers) and (max(trainers) or not split):
                found.append(Plan(counts, trainers))
        return found

    def _neighbours(self, plan: Plan) -> list[Plan]:
        found = []
        for i, offer in enumerate(self._offers):
            if not {"rollout", "train"} <= offer.capabilities:
                continue
            # Where all help in both roles, few trainers may be as good as many.
            for step in dict.fromkeys((-(plan.trainers[i] // 2), 1, -1)):
                trainers = tuple(t + step if j == i else t for j, t in enumerate(plan.trainers))
                rollers = [n - t for n, t in zip(plan.counts, trainers, strict=True)]
                if step and min(trainers) >= 0 and min(rollers) >= 0 and max(trainers) and max(rollers):
                    found.append(replace(plan, trainers=trainers))
        return found


def _reach(target: float, program: Staffing, trial: _Trial) -> Plan:
    """Ask for more than the target until the virtual clock reaches it."""
    asked = target
    for _ in range(_ROUNDS):
        plan = trial.climb(program.cheapest(asked), split=program.split)
        reached = trial.of(plan).samples_per_s
        if reached >= target:
            return trial.trim(plan, target)
        asked *= max(target / reached, 1 + _TOLERANCE)
    raise ValueError(
        f"target_samples_per_s={target:g} is not reached: the best plan found makes {reached:.4g} samples/s, because "
        f"workers wait; a layout with less waiting or more groups per iteration would help"
    )


def _binding(
    program: Staffing, plan: Plan, prediction: Prediction, cost: float | None, budget: float | None
) -> tuple[Binding, str]:
    loads = program.loads(plan)
    role = max(loads, key=lambda name: loads[name])
    idle = prediction.bubble_s
    cause: Cause = max(idle, key=lambda name: idle[name])
    share = idle[cause] / max(prediction.iteration_s * len(prediction.kinds), 1e-12)
    waiting = f"the largest bubble is waiting for {cause}, {share:.0%} of the fleet's time"
    second = max(seconds for name, seconds in loads.items() if name != role)
    if loads[role] > 1.1 * second or role == "score":
        return role, f"{role} alone takes {loads[role]:.4g} s of {prediction.iteration_s:.4g} s an iteration; {waiting}"
    room = [o for o, n in zip(program.offers, plan.counts, strict=True) if n < o.most]
    if room and budget is not None and cost is not None:
        cheapest = min(room, key=lambda offer: offer.price_per_hour or 0.0)
        return "budget", (
            f"{cost:.2f} of {budget:.2f} an hour are spent, and one more {cheapest.kind} costs "
            f"{cheapest.price_per_hour:.2f}; {waiting}"
        )
    if not room:
        return (
            "offer",
            f"all {sum(plan.counts)} workers on offer are taken and both roles are equally loaded; {waiting}",
        )
    return role, f"{role} alone takes {loads[role]:.4g} s of {prediction.iteration_s:.4g} s an iteration; {waiting}"


def _cost_per_hour(offers: Sequence[Offer], plan: Plan) -> float | None:
    cost = 0.0
    for offer, count in zip(offers, plan.counts, strict=True):
        if count and offer.price_per_hour is None:
            return None
        cost += count * (offer.price_per_hour or 0.0)
    return cost
