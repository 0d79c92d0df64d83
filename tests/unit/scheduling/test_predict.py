"""A schedule on the virtual clock with modelled costs."""

from __future__ import annotations

import pytest
from cost_models import FAST, model

from digenrl.scheduling import Colocated, Disaggregated
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.predict import joining, predict

FREE = {"switch_s": 0.0, "install_s": 0.0, "gather_s": 0.0, "gap_s": 0.0, "transfer_s": 0.0}


def test_one_colocated_worker_takes_the_sum_of_its_units():
    predicted = predict(model({"fast": FAST | FREE | {"score_s": 0.0}}), [Pool("fast", 1)], Colocated())
    assert predicted.iteration_s == pytest.approx(32 * 1.1 + 32 * 1.0 + 0.1)
    assert predicted.samples_per_s == pytest.approx(64 / predicted.iteration_s)
    assert predicted.utilisation == pytest.approx(1.0)
    assert sum(predicted.bubble_s.values()) == pytest.approx(0.0, abs=1e-9)


def test_gaps_and_switches_are_added_between_units():
    free = FAST | FREE | {"score_s": 0.0}
    without = predict(model({"fast": free}), [Pool("fast", 1)], Colocated())
    gaps = predict(model({"fast": free | {"gap_s": 0.01, "switch_s": 2.0}}), [Pool("fast", 1)], Colocated())
    # 32 rollouts, 32 train units, one update; the role changes twice. Two scores beside the device do not count.
    units = 32 + 32 + 1
    assert gaps.iteration_s - without.iteration_s == pytest.approx(units * 0.01 + 2 * 2.0, rel=0.01)
    assert gaps.bubble_s["orchestration"] == pytest.approx(gaps.iteration_s - without.iteration_s, rel=0.02)


def test_busy_time_and_bubbles_fill_the_window():
    predicted = predict(model(), [Pool("fast", 2), Pool("slow", 3)], Disaggregated(2), std_scope="iteration")
    busy = sum(seconds for name, seconds in predicted.activity_s.items() if name != "score")
    assert busy + sum(predicted.bubble_s.values()) == pytest.approx(5 * predicted.iteration_s)
    assert predicted.utilisation == pytest.approx(busy / (5 * predicted.iteration_s))
    assert predicted.bubble_s["std scope"] > 0


def test_the_cost_of_samples():
    pools = [Pool("fast", 2, price_per_hour=3.6)]
    predicted = predict(model(), pools, Disaggregated(1))
    assert predicted.cost_per_1000_samples == pytest.approx(7.2 / 3600 * 1000 / predicted.samples_per_s)
    assert predict(model(), [Pool("fast", 2)], Disaggregated(1)).cost_per_1000_samples is None


def test_workers_join_pool_by_pool_under_distinct_names():
    events = joining([Pool("a", 1), Pool("b", 2), Pool("a", 1)])
    assert [event.worker for event in events] == ["a-0", "b-0", "b-1", "a-1"]


def test_a_fleet_that_cannot_train_is_refused_with_what_is_missing():
    with pytest.raises(ValueError, match="does not come to its end: waiting for a worker that can train"):
        predict(model(), [Pool("fast", 1, frozenset({"rollout", "score"}))], Disaggregated(1))


def test_too_few_iterations_are_refused():
    with pytest.raises(ValueError, match="iterations=2 must be at least 3"):
        predict(model(), [Pool("fast", 1)], Colocated(), iterations=2)


def test_the_model_is_not_changed():
    costs = model()
    before = costs.to_json()
    predict(costs, [Pool("fast", 1)], Colocated())
    assert costs.to_json() == before
