"""Role splits and pool sizes."""

from __future__ import annotations

import itertools

import pytest
from cost_models import FAST, model

from digenrl.scheduling import Disaggregated
from digenrl.scheduling.allocate import propose
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.predict import predict
from digenrl.scheduling.staffing import Offer, Plan, Staffing

FREE = FAST | {"switch_s": 0.0, "install_s": 0.0, "gather_s": 0.0, "gap_s": 0.0, "transfer_s": 0.0}
PROFILE = {"fast": FREE, "slow": {"rollout_step_s": 0.2}}


def test_a_fixed_fleet_gets_the_best_split_of_all():
    costs = model(PROFILE)
    rates = {n: predict(costs, [Pool("fast", 6)], Disaggregated(n)).samples_per_s for n in range(1, 6)}
    proposal = propose(costs, [Offer("fast", 6, least=6)])
    assert proposal.prediction.samples_per_s == pytest.approx(max(rates.values()))
    assert proposal.plan.counts == (6,)
    assert proposal.binding == "offer"


def test_the_program_agrees_with_enumeration():
    offers = (Offer("fast", 3, price_per_hour=3.0), Offer("slow", 4, price_per_hour=1.3))
    staffing = Staffing(model(PROFILE), offers, split=True, budget=9.0)
    plans = [
        Plan((fr + ft, sr + st), (ft, st))
        for fr, ft, sr, st in itertools.product(range(4), range(4), range(5), range(5))
        if fr + ft <= 3 and sr + st <= 4 and fr + sr and ft + st
    ]

    def slowest(plan: Plan) -> float:
        return max(staffing.loads(plan).values())

    def cost(plan: Plan) -> float:
        return 3.0 * plan.counts[0] + 1.3 * plan.counts[1]

    best = min(slowest(plan) for plan in plans if cost(plan) <= 9.0)
    assert slowest(staffing.fastest()) == pytest.approx(best)
    unlimited = Staffing(model(PROFILE), offers, split=True, budget=None)
    target = 64 / (1.3 * best)
    cheapest = min(cost(plan) for plan in plans if 64 / slowest(plan) >= target)
    found = unlimited.cheapest(target)
    assert cost(found) == pytest.approx(cheapest)
    assert 64 / slowest(found) >= target * (1 - 1e-6)


def test_a_budget_is_kept_and_named_as_what_binds():
    offers = [Offer("fast", 8, price_per_hour=3.0), Offer("slow", 8, price_per_hour=1.3)]
    proposal = propose(model(PROFILE), offers, budget_per_hour=14.0)
    assert proposal.cost_per_hour is not None and proposal.cost_per_hour <= 14.0
    assert proposal.binding in ("budget", "rollout", "train")
    assert "14.00" in proposal.why or "alone takes" in proposal.why
    assert proposal.prediction.cost_per_1000_samples == pytest.approx(
        proposal.cost_per_hour / 3.6 / proposal.prediction.samples_per_s
    )


def test_a_target_is_reached_on_the_virtual_clock():
    offers = [Offer("fast", 8, price_per_hour=3.0), Offer("slow", 8, price_per_hour=1.0)]
    proposal = propose(model(PROFILE), offers, target_samples_per_s=4.0)
    assert proposal.prediction.samples_per_s >= 4.0
    more = propose(model(PROFILE), offers)
    assert proposal.cost_per_hour is not None and more.cost_per_hour is not None
    assert proposal.cost_per_hour < more.cost_per_hour


def test_a_worker_that_cannot_train_rolls_out():
    offers = [Offer("fast", 2, least=2), Offer("slow", 3, least=3, capabilities=frozenset({"rollout", "score"}))]
    proposal = propose(model(PROFILE), offers)
    assert proposal.plan.trainers[1] == 0 and proposal.plan.trainers[0] >= 1


def test_shared_roles_need_no_split():
    proposal = propose(model(PROFILE), [Offer("fast", 4, least=4)], roles="shared")
    assert proposal.plan == Plan((4,), (0,))
    assert proposal.simulated == 1


def test_scoring_that_binds_is_named():
    proposal = propose(model({"fast": FREE | {"score_s": 40.0}}), [Offer("fast", 4, least=4)])
    assert proposal.binding == "score"
    assert proposal.why.startswith("score alone takes 320 s")


def test_what_cannot_be_reached_is_refused_with_what_can():
    with pytest.raises(ValueError, match=r"target_samples_per_s=500 is out of reach: 2 x fast make at most 1\.8\d*"):
        propose(model(PROFILE), [Offer("fast", 2, price_per_hour=1.0)], target_samples_per_s=500.0)


def test_a_budget_too_small_for_two_roles_is_refused():
    with pytest.raises(ValueError, match="no plan within budget_per_hour=4 has a worker for every role"):
        propose(model(PROFILE), [Offer("fast", 9, price_per_hour=3.0)], budget_per_hour=4.0)


def test_a_budget_needs_prices():
    with pytest.raises(ValueError, match="needs price_per_hour of every offer; slow has none"):
        propose(model(PROFILE), [Offer("fast", 1, price_per_hour=1.0), Offer("slow", 1)], budget_per_hour=9.0)
