"""The cost model: what it answers, how it estimates, how it learns."""

from __future__ import annotations

import json
import math

import pytest
from cost_models import FAST, MB, model
from schedules import ALL, shape

from digenrl.identity import MicroBatchId
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel, KindCosts
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, UpdateUnit

WHOLE = RolloutUnit(MB, 0, 10)
STEP = RolloutUnit(MB, 3, 4)
TRAIN = TrainUnit(MB, (0, 1, 2, 3))


def test_units_cost_what_the_profile_says():
    costs = model()
    assert costs.seconds(WHOLE, "fast") == pytest.approx(10 * 0.1 + 0.1)
    assert costs.seconds(STEP, "fast") == pytest.approx(0.1)
    assert costs.seconds(ScoreUnit(MB), "fast") == 0.2
    assert costs.seconds(UpdateUnit(1), "fast") == 0.1


def test_gathering_takes_time_but_is_no_work():
    costs = model()
    assert costs.seconds(TRAIN, "fast") == pytest.approx(1.3)
    assert costs.work_s(TRAIN, "fast") == pytest.approx(1.0)


def test_a_later_update_also_pays_the_forward_under_the_old_adapter():
    costs = model(updates=2)
    later = TrainUnit(MicroBatchId("train", 0, 31), (0, 1, 2, 3))
    assert costs.seconds(TRAIN, "fast") == pytest.approx(1.3)
    assert costs.seconds(later, "fast") == pytest.approx(1.0 * (1 + 1 / 3) + 0.3)


def test_evaluation_costs_in_proportion_to_its_samples():
    costs = model(eval_prompts=5, eval_micro_batch=4, eval_num_steps=6)
    whole, rest = MicroBatchId("eval", 1, 0), MicroBatchId("eval", 1, 1)
    assert costs.seconds(RolloutUnit(whole, 0, 6), "fast") == pytest.approx(2 * (6 * 0.1 + 0.1))
    assert costs.seconds(RolloutUnit(rest, 0, 6), "fast") == pytest.approx(0.5 * (6 * 0.1 + 0.1))
    assert costs.seconds(ScoreUnit(rest), "fast") == pytest.approx(0.1)


@pytest.mark.parametrize(("batch", "seconds"), [(1, 0.4), (2, 0.6), (3, 0.8), (4, 1.0), (8, 2.0)])
def test_timestep_batches_between_and_beyond_the_profiled_ones(batch: int, seconds: float):
    assert model().work_s(TrainUnit(MB, tuple(range(batch))), "fast") == pytest.approx(seconds)


def test_what_a_kind_lacks_is_scaled_by_its_relative_speed():
    costs = model()
    assert costs.seconds(WHOLE, "slow") == pytest.approx(10 * 0.2 + 0.2)
    assert costs.work_s(TRAIN, "slow") == pytest.approx(2.0)
    assert costs.seconds(ScoreUnit(MB), "slow") == pytest.approx(0.4)


def test_overheads_do_not_scale_with_the_device():
    costs = model().of_kind("slow")
    assert (costs.gap_s, costs.switch_s, costs.gather_s) == (0.005, 0.05, 0.3)


def test_an_unknown_kind_is_taken_for_the_reference():
    assert model().seconds(WHOLE, "never seen") == model().seconds(WHOLE, "fast")


def test_training_nobody_measured_counts_three_forwards_per_timestep_and_the_other_way_round():
    rolls = model({"cpu": {"rollout_step_s": 0.1}})
    assert rolls.seconds(TRAIN, "cpu") == pytest.approx(4 * 3 * 0.1)
    assert rolls.seconds(ScoreUnit(MB), "cpu") == 0
    trains = model({"cpu": {"train_s": {1: 0.3}}})
    assert trains.seconds(STEP, "cpu") == pytest.approx(0.1)


def test_between_units_lies_the_gap_and_a_switch_if_the_role_changes():
    costs = model()
    assert costs.between_s(None, WHOLE, "fast") == 0.005
    assert costs.between_s(TRAIN, UpdateUnit(1), "fast") == 0.005
    assert costs.between_s(WHOLE, TRAIN, "fast") == pytest.approx(0.055)
    assert costs.between_s(TRAIN, WHOLE, "fast") == pytest.approx(0.055)
    assert costs.between_s(WHOLE, ScoreUnit(MB), "fast") == 0.005


def test_copies_cost_what_the_receiving_kind_takes():
    costs = model({"fast": FAST, "far": {"rollout_step_s": 0.1, "install_s": 7.0, "transfer_s": 3.0}})
    costs.observe(m.WorkerJoined("w", "far", ALL))
    assert costs.move_s(m.Install(1, "w", None)) == 7.0
    assert costs.move_s(m.Transfer(m.TrajectoryRef(MB), "v", "w")) == 3.0
    assert costs.move_s(m.Install(1, "stranger", None)) == 0.1
    assert costs.move_s(m.Commit(1, "w", None)) == costs.move_s(m.Reduce(1, "w", (), {})) == 7.0
    assert costs.move_s(m.Finished()) == 0


def finished(unit: object, seconds: float, worker: str = "w") -> m.UnitFinished:
    return m.UnitFinished(unit, worker, seconds, m.RolloutDone())  # type: ignore[arg-type]


def test_observations_move_the_estimate_by_their_weight():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(finished(STEP, 0.2))
    assert costs.seconds(STEP, "fast") == pytest.approx(0.8 * 0.1 + 0.2 * 0.2)


def test_a_whole_rollout_scales_steps_and_decoding_alike():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(finished(WHOLE, 2.2))
    assert costs.of_kind("fast").rollout_step_s == pytest.approx(0.1 * 1.2)
    assert costs.of_kind("fast").decode_s == pytest.approx(0.1 * 1.2)


def test_constant_observations_are_learned():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    for _ in range(60):
        costs.observe(finished(TRAIN, 2.6))
    assert costs.seconds(TRAIN, "fast") == pytest.approx(2.6, rel=1e-4)


def test_one_slow_first_unit_does_not_spoil_the_estimate():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(finished(STEP, 100.0))
    assert costs.seconds(STEP, "fast") == pytest.approx(0.1 * (1 + 0.2 * 3))


def test_the_first_report_of_a_new_kind_is_taken_as_it_is_and_tells_its_speed():
    costs = model()
    costs.observe(m.WorkerJoined("w", "new", ALL))
    costs.observe(finished(STEP, 0.4))
    assert costs.seconds(STEP, "new") == pytest.approx(0.4)
    assert costs.work_s(TRAIN, "new") == pytest.approx(4.0)


def test_costs_that_nobody_knew_are_learned_from_the_first_report():
    costs = model({"cpu": {"rollout_step_s": 0.1}})
    costs.observe(m.WorkerJoined("w", "cpu", ALL))
    costs.observe(finished(ScoreUnit(MB), 0.7))
    assert costs.seconds(ScoreUnit(MB), "cpu") == pytest.approx(0.7)


def test_reports_of_workers_that_never_joined_are_left_out():
    costs = model()
    costs.observe(finished(STEP, 9.0, worker="ghost"))
    assert costs.seconds(STEP, "fast") == 0.1


def test_noted_costs_are_averaged_too():
    costs = model()
    costs.note("gap_s", "fast", 0.105)
    costs.note("switch_s", "new", 2.0)
    assert costs.of_kind("fast").gap_s == pytest.approx(0.8 * 0.005 + 0.2 * 0.105)
    assert costs.of_kind("new").switch_s == 2.0


def test_an_average_of_differences_is_never_below_zero():
    costs = model()
    for seconds in (-3.0, 0.1, -9.0):
        costs.note("switch_s", "new", seconds)
    assert costs.of_kind("new").switch_s == 0.0


def behind(unit: object, seconds: float, gap_s: float | None, outcome: m.Outcome | None = None) -> m.UnitFinished:
    return m.UnitFinished(unit, "w", seconds, outcome or m.RolloutDone(), gap_s)  # type: ignore[arg-type]


def test_gaps_between_units_of_one_role_are_averaged():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    for gap_s in (None, 0.105, None):
        costs.observe(behind(STEP, 0.1, gap_s))
    assert costs.of_kind("fast").gap_s == pytest.approx(0.8 * 0.005 + 0.2 * 0.105)
    assert costs.of_kind("fast").switch_s == 0.05


def test_what_the_first_unit_in_a_new_role_takes_longer_is_the_switch():
    """Before it and within it; it tells nothing of what such a unit takes."""
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    usual_s = costs.seconds(TRAIN, "fast")
    for _ in range(60):
        costs.observe(behind(TRAIN, usual_s, 0.005))
        costs.observe(behind(STEP, 0.1, None))
        costs.observe(behind(TRAIN, usual_s + 0.3, 0.105))
    learned = costs.of_kind("fast")
    assert learned.switch_s == pytest.approx(0.4, rel=1e-3)
    assert learned.gap_s == pytest.approx(0.005)
    assert costs.seconds(TRAIN, "fast") == pytest.approx(usual_s)


def test_a_change_of_roles_that_nobody_timed_is_no_switch():
    """The lane may have stood still for want of work, and the simulation reports no gap."""
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(behind(STEP, 0.1, None))
    costs.observe(behind(TRAIN, 2.6, None))
    assert costs.of_kind("fast").switch_s == 0.05
    assert costs.seconds(TRAIN, "fast") == pytest.approx(0.8 * 1.3 + 0.2 * 2.6)


def test_copies_that_were_timed_are_averaged():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(m.VersionInstalled("w", 1, 1.1))
    costs.observe(m.VersionInstalled("w", 2))
    costs.observe(m.Transferred(m.TrajectoryRef(MB), "w", 0.52))
    costs.observe(m.Transferred(m.AccumulatorRef(1, "v"), "w", 99.0))
    assert costs.of_kind("fast").install_s == pytest.approx(0.8 * 0.1 + 0.2 * 1.1)
    assert costs.of_kind("fast").transfer_s == pytest.approx(0.8 * 0.02 + 0.2 * 0.52)


def test_a_streamed_unit_takes_longer_and_tells_of_ordinary_ones():
    costs = CostModel.from_profile(model().shape, {"fast": FAST}, streamed=1.5)
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    assert costs.seconds(TRAIN, "fast", streamed=True) == pytest.approx(1.5 * 1.0 + 0.3)
    costs.observe(behind(TRAIN, 2 * 1.8, None, m.Trained((TRAIN,), streamed=True)))
    assert costs.seconds(TRAIN, "fast") == pytest.approx(1.2 * 1.3)


def test_timestep_batches_that_no_unit_has_change_with_the_one_they_have():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(finished(TRAIN, 2.6))
    assert costs.of_kind("fast").train_s == pytest.approx({1: 0.48, 2: 0.72, 4: 1.2})


def test_timestep_batches_that_units_have_are_learned_each_for_itself():
    costs = model(timestep_batch=3)
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(finished(TrainUnit(MB, (0, 1, 2)), 2 * 1.1))
    # Units of 3 and of the 1 that is left; 3 was only estimated.
    assert costs.of_kind("fast").train_s == pytest.approx({1: 0.4, 2: 1.2 * 0.6, 3: 2 * 0.8, 4: 1.2 * 1.0})


def test_a_guess_is_forgotten_once_something_is_known():
    costs = CostModel.guess(model().shape)
    costs.observe(m.WorkerJoined("w", "cpu", ALL))
    costs.observe(finished(ScoreUnit(MB), 0.7))
    assert costs.seconds(WHOLE, "cpu") == pytest.approx(10.0)
    costs.observe(finished(WHOLE, 0.5))
    assert costs.kinds == ("cpu",)
    assert costs.seconds(WHOLE, "another") == pytest.approx(0.5)
    assert costs.seconds(TRAIN, "cpu") == pytest.approx(4 * 3 * 0.05)


def test_lost_workers_are_forgotten():
    costs = model()
    costs.observe(m.WorkerJoined("w", "fast", ALL))
    costs.observe(m.WorkerLost("w"))
    assert costs.to_json()["workers"] == {}
    costs.observe(finished(STEP, 9.0))
    assert costs.seconds(STEP, "fast") == 0.1


def test_json_round_trip_answers_the_same():
    costs = model(updates=2)
    costs.observe(m.WorkerJoined("w", "odd", ALL))
    costs.observe(finished(WHOLE, 1.7))
    again = CostModel.from_json(costs.shape, json.loads(json.dumps(costs.to_json())))
    assert again.to_json() == costs.to_json()
    for kind in ("fast", "slow", "odd", "unknown"):
        for unit in (WHOLE, STEP, TRAIN, ScoreUnit(MB), UpdateUnit(3)):
            assert again.seconds(unit, kind) == costs.seconds(unit, kind)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        ({}, "must give rollout_step_s or train_s"),
        ({"cpu": {"score_s": 1.0}}, "must give rollout_step_s or train_s"),
        ({"cpu": {"rolout_step_s": 1.0}}, "profile.cpu.rolout_step_s is not a cost; did you mean rollout_step_s?"),
        ({"cpu": {"rollout_step_s": -1}}, "profile.cpu.rollout_step_s=-1 must be a number of seconds, 0 or more"),
        ({"cpu": {"rollout_step_s": math.nan}}, "must be a number of seconds"),
        ({"cpu": {"train_s": 3.0}}, "profile.cpu.train_s=3.0 must map timestep batches"),
        ({"cpu": {"train_s": {0: 3.0}}}, "must map timestep batches"),
    ],
)
def test_a_bad_profile_is_refused_with_the_reason(profile: dict[str, dict[str, object]], message: str):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("?", r"\?")):
        CostModel.from_profile(shape(), profile)


def test_kind_costs_accept_json_keys():
    assert KindCosts.of("cpu", {"train_s": {"2": 1, "1": 0.6}}) == KindCosts(train_s={1: 0.6, 2: 1.0})
