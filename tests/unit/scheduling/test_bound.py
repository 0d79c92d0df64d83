"""The work bound on fleets small enough to solve by hand."""

from __future__ import annotations

import pytest
from cost_models import FAST, model

from digenrl.scheduling import Colocated, Disaggregated
from digenrl.scheduling.bound import Pool, critical_path_s, demand, work_bound
from digenrl.scheduling.predict import predict

ROLLOUT, TRAIN, SCORE, UPDATE = 32 * 1.1, 32 * 1.0, 32 * 0.2, 0.1


def test_one_worker_does_everything_one_after_the_other_and_scores_beside_it():
    bound = work_bound(model(), [Pool("fast", 1)])
    assert bound.seconds == pytest.approx(ROLLOUT + TRAIN + UPDATE)
    assert bound.samples_per_s == pytest.approx(64 / bound.seconds)
    assert bound.busy[0, "device"] == pytest.approx(1.0)
    assert bound.busy[0, "cpu"] == pytest.approx(SCORE / bound.seconds)


def test_equal_workers_share_evenly():
    assert work_bound(model(), [Pool("fast", 7)]).seconds == pytest.approx((ROLLOUT + TRAIN + UPDATE) / 7)


def test_half_as_fast_counts_half():
    assert work_bound(model(), [Pool("fast", 2), Pool("slow", 2)]).seconds == pytest.approx(
        (ROLLOUT + TRAIN + UPDATE) / 3
    )


def test_capabilities_are_respected():
    pools = [Pool("fast", 1, frozenset({"rollout", "score"})), Pool("fast", 1, frozenset({"train"}))]
    bound = work_bound(model(), pools)
    assert bound.seconds == pytest.approx(ROLLOUT)
    assert bound.busy[1, "device"] == pytest.approx((TRAIN + UPDATE) / ROLLOUT)
    assert bound.binding == ("rollout",)


def test_comparative_advantage():
    # `roller` rolls out twice as fast as `trainer`, which trains twice as fast as `roller`: each does what it is
    # good at, and the one that ends first helps the other.
    profile = {
        "roller": FAST | {"rollout_step_s": 0.05, "decode_s": 0.05, "train_s": {4: 2.0}},
        "trainer": FAST | {"train_s": {4: 1.0}},
    }
    bound = work_bound(model(profile), [Pool("roller", 1), Pool("trainer", 1)])
    # Roller: 32 rollouts of 0.55 s, the update (0.1 s on both), then x of the trainer's 32 micro-batches at 2 s.
    x = (32 * 1.0 - 32 * 0.55 - 0.1) / (2.0 + 1.0)
    assert bound.seconds == pytest.approx(32 * 0.55 + 0.1 + 2.0 * x)
    assert bound.seconds_by_activity[1, "rollout"] == pytest.approx(0.0, abs=1e-9)


def test_the_bound_takes_the_best_timestep_batch_whatever_the_run_uses():
    small, large = model(timestep_batch=1), model(timestep_batch=4)
    assert work_bound(small, [Pool("fast", 3)]).seconds == work_bound(large, [Pool("fast", 3)]).seconds


def test_scoring_can_bind():
    bound = work_bound(model({"fast": FAST | {"score_s": 10.0}}), [Pool("fast", 4)])
    assert bound.seconds == pytest.approx(32 * 10.0 / 4)
    assert bound.binding == ("score",)


def test_forwards_under_the_old_adapter_are_work():
    assert demand(model(updates=2))["train"] == pytest.approx(32 * 4 * (1 + 0.5 / 3))


def test_overheads_are_no_work():
    costly = FAST | {"switch_s": 9.0, "install_s": 9.0, "gather_s": 9.0, "gap_s": 9.0, "transfer_s": 9.0}
    assert work_bound(model({"fast": costly}), [Pool("fast", 2)]) == work_bound(
        model({"fast": FAST}), [Pool("fast", 2)]
    )


def test_a_missing_capability_is_named():
    with pytest.raises(ValueError, match="no worker with the capability 'train'; there are 2 x fast"):
        work_bound(model(), [Pool("fast", 2, frozenset({"rollout", "score"}))])


def test_critical_path():
    assert critical_path_s(model(), [Pool("fast", 99)]) == pytest.approx(1.1 + 0.2 + 1.0 + 0.1)
    # The second update waits for the first one and pays the forward under the version's adapter.
    assert critical_path_s(model(updates=2), [Pool("slow", 9), Pool("fast", 1)]) == pytest.approx(
        1.1 + 0.2 + 1.0 + 0.1 + 4 / 3 + 0.1
    )


@pytest.mark.parametrize("layout", [Colocated(), Disaggregated(1), Disaggregated(2)])
@pytest.mark.parametrize("updates", [1, 2])
def test_no_schedule_beats_the_bound_or_the_critical_path(layout: object, updates: int):
    free = FAST | {"switch_s": 0, "install_s": 0, "gather_s": 0, "gap_s": 0, "transfer_s": 0}
    costs = model({"fast": free, "slow": {"rollout_step_s": 0.2}}, updates=updates)
    pools = [Pool("fast", 2), Pool("slow", 2)]
    predicted = predict(costs, pools, layout)  # type: ignore[arg-type]
    assert predicted.iteration_s >= work_bound(costs, pools).seconds - 1e-9
    assert predicted.iteration_s >= critical_path_s(costs, pools) - 1e-9
