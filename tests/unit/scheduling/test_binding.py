"""What keeps a schedule from being faster."""

from __future__ import annotations

import pytest
from cost_models import FAST, model

from digenrl.scheduling import Colocated, Disaggregated
from digenrl.scheduling.binding import binding, load_of
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.predict import Prediction, predict

FREE = FAST | {"switch_s": 0.0, "install_s": 0.0, "gather_s": 0.0, "gap_s": 0.0, "transfer_s": 0.0}


def split(trainers: int, workers: int, costs: dict[str, object], **changes: object) -> tuple[Prediction, list[str]]:
    found = predict(model({"fast": costs}, **changes), [Pool("fast", workers)], Disaggregated(trainers))
    return found, [f"fast-{number}" for number in range(trainers)]


def test_few_rollout_workers_bind():
    found = binding(*split(3, 4, FREE | {"rollout_step_s": 1.0}))
    assert found.constraint == "rollout rate"
    assert found.why.startswith("rollout workers are busy 9")
    assert "trainers wait for samples" in found.why


def test_few_trainers_bind():
    found = binding(*split(1, 4, FREE | {"train_s": {1: 4.0, 4: 16.0}}))
    assert found.constraint == "train rate"
    assert "rollout workers wait for weights" in found.why


def test_neither_role_binds_where_both_wait():
    # Of equal loads, each waits for the other at the ends of the iteration.
    found = binding(*split(2, 4, FREE | {"rollout_step_s": 0.09, "decode_s": 0.1, "train_s": {4: 1.0}}))
    assert found.constraint == "updates barrier"
    assert "trainers are busy" in found.why and "rollout workers" in found.why


def test_slow_rewards_bind_though_rollout_waits_for_weights():
    found = binding(*split(2, 4, FREE | {"score_s": 30.0}))
    assert found.constraint == "reward"
    assert "rollout workers 7% and wait for weights" in found.why


@pytest.mark.parametrize(("gap_s", "wanted"), [(0.0, "device time"), (2.0, "orchestration")])
def test_a_single_worker_is_bound_by_its_time_or_by_what_lies_between(gap_s: float, wanted: str):
    found = predict(model({"fast": FREE | {"score_s": 0.0, "gap_s": gap_s}}), [Pool("fast", 1)], Colocated())
    assert binding(found, []).constraint == wanted


def test_busy_and_idle_make_up_the_time():
    found, trainers = split(2, 5, FAST)
    load = load_of(found, found.kinds)
    assert load.busy == pytest.approx(found.utilisation)
    assert load.busy + sum(load.idle.values()) == pytest.approx(1.0)
    assert load_of(found, trainers).busy != pytest.approx(load.busy)
