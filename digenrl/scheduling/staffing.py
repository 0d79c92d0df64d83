"""How many workers of which kind, and in which role, if nobody ever waited: an integer linear program.

    Offer      workers of one kind that may be had
    Plan       how many are taken, and how many of them train
    Staffing   the program: the fastest plan, or the cheapest one for a rate

Every role works without waiting, so the program is optimistic; `allocate` tries its plans on the virtual clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from digenrl.scheduling.bound import EVERYTHING, Pool
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.messages import Capability
from digenrl.scheduling.units import RolloutUnit, ScoreUnit

Role = Literal["rollout", "train", "score"]


@dataclass(frozen=True)
class Offer:
    """Workers of one kind that may be had.

    Attributes:
        kind: their type; costs are looked up by it.
        most: how many there are at most.
        least: how many there are to be at least; `most` for a fleet that is there already.
        price_per_hour: of one worker; None if unknown.
        capabilities: what each of them can do.
    """

    kind: str
    most: int
    least: int = 0
    price_per_hour: float | None = None
    capabilities: frozenset[Capability] = EVERYTHING

    def pool(self, count: int) -> Pool:
        """So many of them."""
        return Pool(self.kind, count, self.capabilities, self.price_per_hour)


@dataclass(frozen=True)
class Plan:
    """How many workers of each offer, and how many of them train; the others roll out.

    Attributes:
        counts: workers, by offer.
        trainers: trainers among them, by offer. All 0 if every worker has both roles.
    """

    counts: tuple[int, ...]
    trainers: tuple[int, ...]

    def pools(self, offers: Sequence[Offer]) -> list[Pool]:
        """The fleet, trainers first: in this order a layout picks its first trainers."""
        trainers = [offer.pool(count) for offer, count in zip(offers, self.trainers, strict=True)]
        others = [offer.pool(n - t) for offer, n, t in zip(offers, self.counts, self.trainers, strict=True)]
        return [pool for pool in (*trainers, *others) if pool.count]


class Staffing:
    """The integer program.

    Columns: workers by offer, of these rolling out, of these training, and the rate.
    """

    def __init__(self, model: CostModel, offers: tuple[Offer, ...], *, split: bool, budget: float | None) -> None:
        self.offers, self.split, self.budget = offers, split, budget
        shape = model.shape
        self.samples = shape.groups * shape.group_size
        batches = shape.micro_batches(shape.start_iteration)
        self.rollout_s, self.train_s, self.score_s = [], [], []
        for offer in offers:
            # Seconds one worker would need for a whole iteration's units of each role.
            trained = sum(model.seconds(unit, offer.kind) for batch in batches for unit in shape.train_units(batch))
            rolled = model.seconds(RolloutUnit(batches[0], 0, shape.num_steps), offer.kind) * len(batches)
            self.rollout_s.append(rolled if "rollout" in offer.capabilities else np.inf)
            self.train_s.append(trained if "train" in offer.capabilities else np.inf)
            scored = model.seconds(ScoreUnit(batches[0]), offer.kind) * len(batches)
            self.score_s.append(scored if "score" in offer.capabilities else np.inf)
        # Rates are counted per so many seconds, which brings all coefficients near 1 for the solver's tolerances.
        self.scale = min(s for s in (*self.rollout_s, *self.train_s) if s > 0)

    def fastest(self) -> Plan:
        """The plan with the highest rate; of equally fast ones a cheap one.

        Raises:
            ValueError: the budget, or the offers, do not suffice for one worker per role.
        """
        return self._fastest()[0]

    def cheapest(self, samples_per_s: float) -> Plan:
        """The cheapest plan that reaches a rate when nobody waits; without prices the one with the fewest workers.

        Raises:
            ValueError: no plan reaches it.
        """
        n = len(self.offers)
        goal = np.append(self._prices(), np.zeros(2 * n + 1))
        found = self._solve(goal, samples_per_s / self.samples)
        if found is None:
            raise ValueError(
                f"target_samples_per_s={samples_per_s:g} is out of reach: {self._offered()} make at most "
                f"{self._fastest()[1] * self.samples:.4g} samples/s even if nobody waits"
            )
        return found[0]

    def loads(self, plan: Plan) -> dict[Role, float]:
        """Seconds per iteration that each role would need alone, without waiting."""

        def alone(counts: Sequence[int], seconds: Sequence[float]) -> float:
            rate = sum(count / s for count, s in zip(counts, seconds, strict=True) if s)
            return 1 / rate if rate else (np.inf if any(seconds) else 0.0)

        rollers = [n - t for n, t in zip(plan.counts, plan.trainers, strict=True)]
        trainers = plan.trainers if self.split else plan.counts
        return {
            "rollout": alone(rollers, self.rollout_s),
            "train": alone(trainers, self.train_s),
            "score": alone(plan.counts, self.score_s),
        }

    def _fastest(self) -> tuple[Plan, float]:
        n = len(self.offers)
        goal = np.append(np.zeros(3 * n), -1.0)
        goal[:n] = 1e-9 * self._prices() / max(1.0, float(self._prices().max()))
        found = self._solve(goal, 0.0)
        if found is None:
            limit = f" within budget_per_hour={self.budget:g}" if self.budget is not None else ""
            raise ValueError(f"no plan{limit} has a worker for every role; on offer are {self._offered()}")
        return found

    def _offered(self) -> str:
        return ", ".join(f"{offer.most} x {offer.kind}" for offer in self.offers)

    def _rates(self, seconds: Sequence[float]) -> Any:
        """Iterations of one worker per `scale` seconds. What costs nothing is as good as never a limit."""
        return np.array([1e6 if s == 0 else self.scale / s for s in seconds])

    def _prices(self) -> Any:
        return np.array([1.0 if offer.price_per_hour is None else offer.price_per_hour for offer in self.offers])

    def _solve(self, goal: Any, rate: float) -> tuple[Plan, float] | None:
        """The plan that minimises `goal`, and its iterations per second, of those with at least `rate`."""
        n = len(self.offers)
        zero, ones = np.zeros(n), np.ones(n)
        rows: list[tuple[Any, float, float]] = []
        for i in range(n):
            column = np.eye(n)[i]
            spent = np.concatenate([-column, column, column, [0.0]])
            rows.append((spent, 0.0 if self.split else -np.inf, 0.0))
        rows.append((np.concatenate([zero, self._rates(self.rollout_s), zero, [-1.0]]), 0.0, np.inf))
        rows.append((np.concatenate([zero, zero, self._rates(self.train_s), [-1.0]]), 0.0, np.inf))
        rows.append((np.concatenate([self._rates(self.score_s), zero, zero, [-1.0]]), 0.0, np.inf))
        # Two roles take two workers, however low the rate.
        rows.append((np.concatenate([ones, zero, zero, [0.0]]), 2.0 if self.split else 1.0, np.inf))
        if self.split:
            rows.append((np.concatenate([zero, ones, zero, [0.0]]), 1.0, np.inf))
            rows.append((np.concatenate([zero, zero, ones, [0.0]]), 1.0, np.inf))
        if self.budget is not None:
            rows.append((np.concatenate([self._prices(), zero, zero, [0.0]]), 0.0, self.budget))
        most = np.array([float(offer.most) for offer in self.offers])
        least = np.array([float(offer.least) for offer in self.offers])
        rolls = np.where(np.isfinite(self.rollout_s), most, 0.0)
        trains = np.where(np.isfinite(self.train_s), most, 0.0)
        found: Any = milp(
            goal,
            constraints=LinearConstraint(
                np.array([row for row, _, _ in rows]), *zip(*[r[1:] for r in rows], strict=True)
            ),
            bounds=Bounds(
                np.concatenate([least, zero, zero, [rate * self.scale]]),
                np.concatenate([most, rolls, trains, [np.inf]]),
            ),
            integrality=np.concatenate([ones, np.full(2 * n, 1.0 if self.split else 0.0), [0.0]]),
        )
        if found.x is None:
            return None
        counts = tuple(round(x) for x in found.x[:n])
        trainers = tuple(round(x) for x in found.x[2 * n : 3 * n]) if self.split else (0,) * n
        return Plan(counts, trainers), float(found.x[-1]) / self.scale
