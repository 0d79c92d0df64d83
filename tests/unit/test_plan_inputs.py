"""What is planned, what it costs, and what memory allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from digenrl.config.errors import ConfigError
from digenrl.config.load import load_config
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.units import RolloutUnit
from digenrl.scheduling.workloads import load
from flows.plan.costs import Known, costs_of, for_fleet
from flows.plan.fleet import Member
from flows.plan.memory import need_of
from flows.plan.place import place_of
from flows.plan.schedules import schedule_of, schedules
from flows.plan.subject import Subject, subject_of
from storage.runs import RunDirectory

COSTS = {"rollout_step_s": 0.1, "decode_s": 0.2, "train_s": {"3": 0.9}, "score_s": 0.4, "update_s": 0.05, "gap_s": 0.01}
AUTO = "schedule.timestep_batch=auto"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIGENRL_HOME", str(tmp_path / "runs"))
    return tmp_path / "runs"


def seconds(model: CostModel, kind: str) -> tuple[float, float]:
    """Of a whole rollout and of a train unit."""
    shape = model.shape
    batch = shape.micro_batches(0)[0]
    return model.seconds(RolloutUnit(batch, 0, shape.num_steps), kind), model.seconds(shape.train_units(batch)[0], kind)


# --- subjects ---


@pytest.mark.parametrize("name", list(load()))
def test_a_workload_has_the_shape_it_describes(name: str) -> None:
    found, wanted = subject_of(name, []).shape, load()[name].shape(4)
    for field in ("groups", "group_size", "micro_batch", "num_steps", "updates", "timestep_batch"):
        assert getattr(found, field) == getattr(wanted, field), field
    assert found.trained_steps(3) == wanted.trained_steps(3)


def test_overrides_change_a_workload_and_its_costs() -> None:
    plain, changed = (subject_of("wan2.1-14b", overrides) for overrides in ([], ["schedule.micro_batch=1"]))
    assert (plain.trainers, changed.shape.micro_batch) == (None, 1)
    small, large = (costs_of(subject, None).model for subject in (changed, plain))
    assert seconds(small, "rate-1.0")[0] == pytest.approx(seconds(large, "rate-1.0")[0] / 2)
    assert subject_of("wan2.1-14b", ["cluster.trainers=5"]).trainers == 5


def test_a_timestep_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"timestep_batch=7 does not fit into the memory of NVIDIA H100.*: 4 of 7"):
        subject_of("wan2.1-14b", ["schedule.timestep_batch=7"])


@pytest.mark.parametrize("algorithm", ["flow_grpo", "dance_grpo", "grpo_guard"])
def test_a_workload_trains_as_many_steps_whatever_the_algorithm(algorithm: str) -> None:
    for name, workload in load().items():
        shape = subject_of(name, [f"algorithm.name={algorithm}"]).shape
        assert len(shape.trained_steps(0)) == workload.run.trained_steps


def test_a_misspelt_workload_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'wan2.1-14'; did you mean wan2.1-14b\?"):
        subject_of("wan2.1-14", [])


# --- costs ---


def trained(home: Path, preset: str, *overrides: str) -> Path:
    directory = RunDirectory.create(home, preset, load_config(preset, list(overrides)))
    directory.profile_path.write_text(json.dumps({"kinds": {"guess": {"rollout_step_s": 9.0}, "cpu": COSTS}}))
    return directory.path


def test_the_newest_run_that_costs_the_same_is_used(home: Path) -> None:
    trained(home, "tiny-smoke")
    other = trained(home, "tiny-smoke", "lora.rank=8")
    known = costs_of(subject_of("tiny-smoke", ["iterations=9"]), None)
    assert (known.source, known.model.kinds) == ("measured by the run tiny-smoke-1", ("cpu",))
    assert seconds(known.model, "cpu") == pytest.approx((10 * 0.1 + 0.2, 0.9))
    assert costs_of(subject_of("tiny-smoke", ["lora.rank=8"]), None).source == f"measured by the run {other.name}"


def test_costs_are_in_proportion_to_the_samples_of_a_micro_batch(home: Path) -> None:
    trained(home, "tiny-smoke")
    known = costs_of(subject_of("tiny-ocr", []), None)
    assert known.source == "measured by the run tiny-smoke-1, scaled from micro-batches of 4 to 16"
    assert seconds(known.model, "cpu") == pytest.approx((4 * 1.2, 4 * 0.9))
    assert known.model.of_kind("cpu").gap_s == 0.01


def test_without_any_evidence_it_says_what_to_type(home: Path) -> None:
    trained(home, "tiny-smoke", "model.width=32")
    with pytest.raises(ConfigError, match=r"nobody has measured what tiny-smoke costs.*digenrl train tiny-smoke"):
        costs_of(subject_of("tiny-smoke", []), None)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("- 1\n", "must map kinds of worker to their costs"),
        ("gpu: 3\n", "gpu must map costs"),
        ("gpu: {rollout_stp_s: 1}\n", "profile.gpu.rollout_stp_s is not a cost; did you mean rollout_step_s?"),
        ("gpu: {rollout_step_s: -1}\n", "profile.gpu.rollout_step_s=-1 must be a number of seconds"),
        ("gpu: {score_s: 1}\n", "must give rollout_step_s or train_s"),
    ],
)
def test_a_profile_is_checked(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"profile\.yaml") as refused:
        costs_of(subject_of("tiny-smoke", []), path)
    assert fragment in str(refused.value)


def test_an_automatic_timestep_batch_is_that_of_the_run(home: Path) -> None:
    trained(home, "tiny-smoke", "schedule.timestep_batch=2")
    assert place_of(subject_of("tiny-smoke", [AUTO]), None, None).subject.shape.timestep_batch == 2
    asked = subject_of("tiny-smoke", ["schedule.timestep_batch=1"])
    assert place_of(asked, None, None).subject.shape.timestep_batch == 1


def test_an_automatic_timestep_batch_is_the_best_of_a_profile(tmp_path: Path) -> None:
    subject, path = profiled(tmp_path, AUTO)
    assert place_of(subject, None, path).subject.shape.timestep_batch == 3
    path.write_text(json.dumps({"cpu": COSTS | {"train_s": {"1": 0.1, "3": 0.9}}}))
    assert place_of(subject, None, path).subject.shape.timestep_batch == 1


# --- fleets ---


def profiled(tmp_path: Path, *overrides: str) -> tuple[Subject, Path]:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"cpu": COSTS, "slow": {"rollout_step_s": 0.5}}))
    return subject_of("tiny-smoke", overrides), path


def test_rates_scale_computing_only(tmp_path: Path) -> None:
    subject, path = profiled(tmp_path)
    members = (
        Member(kind="half", count=1, rate=0.5),
        Member(kind="slow", count=1),
        Member(kind="x", count=1, profile="cpu"),
    )
    model = for_fleet(costs_of(subject, path), members)
    assert model.kinds == ("half", "slow", "x")
    assert seconds(model, "half") == pytest.approx((2 * 1.2, 2 * 0.9))
    assert seconds(model, "x") == pytest.approx((1.2, 0.9))
    assert seconds(model, "slow")[1] == pytest.approx(5 * 0.9), "estimated from what is known of it"
    assert model.of_kind("half").gap_s == 0.01


@pytest.mark.parametrize(
    ("member", "fragment"),
    [
        (Member(kind="gpu", count=1), "how fast is kind 'gpu'? Give rate"),
        (Member(kind="gpu", count=1, profile="slwo"), "profile='slwo' of kind 'gpu' is not known; did you mean slow?"),
    ],
)
def test_a_kind_of_unknown_speed_is_refused(tmp_path: Path, member: Member, fragment: str) -> None:
    subject, path = profiled(tmp_path)
    with pytest.raises(ConfigError) as refused:
        for_fleet(costs_of(subject, path), [member])
    assert fragment in str(refused.value)


def test_memory_takes_away_what_does_not_fit(tmp_path: Path) -> None:
    subject = subject_of("wan2.1-14b", [])
    large, small = Member(kind="large", count=2, rate=1.0), Member(kind="small", count=2, rate=0.5, memory_gib=48)
    place = place_of(subject, [large, small], None)
    assert [sorted(pool.capabilities) for pool in place.pools] == [["rollout", "score", "train"], ["rollout", "score"]]
    (note,) = place.notes
    assert "memory: small has 48 GiB" in note and "schedule.timestep_batch=1" in note
    with pytest.raises(ConfigError, match=r"no worker with the capability train: memory: small has 48 GiB"):
        place_of(subject, [small], None)


def test_the_tiny_model_needs_little(tmp_path: Path) -> None:
    subject, _ = profiled(tmp_path)
    need = need_of(subject)
    assert need is not None
    assert 4 * 1.1e6 < need.to_roll_out < 20e6, "1.2 M parameters of four bytes, and some activations"
    assert need.to_roll_out < need.train(1) < need.train(3) < 200e6


def test_full_fine_tuning_needs_a_multiple_of_the_model(tmp_path: Path) -> None:
    full = subject_of("tiny-smoke", ["method=full", "algorithm.updates_per_iteration=1"])
    lora, need = need_of(profiled(tmp_path)[0]), need_of(full)
    assert lora is not None and need is not None
    transformer = (lora.base - need.base) / 4
    assert 0.5e6 < transformer < 1.2e6, "parameters, without text encoders and VAE"
    # Bound and current, two moments, a gradient, new weights and moments, and a sum of gradients in float64.
    assert need.states == pytest.approx((2 + 2 + 1 + 3 + 2) * 4 * transformer, rel=0.01)


# --- schedules ---


def test_each_row_of_a_comparison_changes_one_thing() -> None:
    rows = {row.name: row for row in schedules(subject_of("wan2.1-14b", []))}
    assert list(rows) == [
        "genrl (timestep batch 1)",
        "colocated",
        "disaggregated",
        "+ GAP",
        "+ TAG",
        "+ TCSS (12 of 48 groups)",
        "GAP, TAG, streaming",
    ]
    assert schedule_of(subject_of("wan2.1-14b", [])).helps
    assert not rows["disaggregated"].gap and rows["+ GAP"].gap
    assert rows["+ TCSS (12 of 48 groups)"].stale_groups == 12


def test_the_configured_schedule_is_among_them() -> None:
    names = [row.name for row in schedules(subject_of("wan2.1-14b", ["schedule.trainer_assist=greedy"]))]
    assert names[-1] == "as configured"
    assert "GAP, TAG, streaming" not in [row.name for row in schedules(subject_of("flux.1-12b", []))]


def test_full_fine_tuning_is_not_compared_with_what_it_cannot_do() -> None:
    rows = schedules(subject_of("tiny-smoke", ["method=full", "algorithm.updates_per_iteration=1"]))
    assert [row.name for row in rows][-3:] == ["colocated", "disaggregated", "+ GAP"]


def test_known_says_where_from() -> None:
    known = costs_of(subject_of("flux.1-12b", []), None)
    assert isinstance(known, Known)
    assert known.source.startswith("derived from FLOPs and bytes for NVIDIA H100")
