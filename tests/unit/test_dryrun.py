"""Dry runs apart from the run: what they shrink, what they refuse to call passed, what they say is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from digenrl import runspec
from digenrl.config.load import load_config
from digenrl.config.presets import presets
from digenrl.contributions import UnitMetrics
from flows.dryrun.needs import FLEET, memory_of, pace_of, smallest_gpu
from flows.dryrun.report import passed
from flows.dryrun.shrink import shrink
from flows.dryrun.witness import Witness
from flows.errors import ExpectedError
from workers.listener import IterationReport

NAMES = [preset.name for preset in presets()]


@pytest.mark.parametrize("name", NAMES)
def test_what_decides_what_is_computed_stays(name: str) -> None:
    given = load_config(name)
    small = shrink(given)
    ignored = {"prompts_per_iteration", "samples_per_prompt", "best_of_n"}
    assert small.algorithm.model_dump(exclude=ignored) == given.algorithm.model_dump(exclude=ignored)
    assert small.model.guidance_scale == given.model.guidance_scale
    assert (small.lora, small.data, small.seed) == (given.lora, given.data, given.seed)
    steps = [runspec.shape(config, 2).trained_steps(0) for config in (small, given)]
    assert steps[0] == steps[1]
    assert small.schedule.model_copy(update={"micro_batch": given.schedule.micro_batch}) == given.schedule


@pytest.mark.parametrize("name", NAMES)
def test_what_runs_is_small_and_here(name: str) -> None:
    given, small = load_config(name), shrink(load_config(name))
    assert small.iterations == 1 and small.model.path.startswith(("tiny:", "package:"))
    assert (small.cluster.address, small.cluster.device, small.cluster.workers) == ("local", "cpu", 2)
    assert small.algorithm.prompts_per_iteration * small.algorithm.samples_per_prompt <= 16
    several = [config.micro_batch < config.algorithm.samples_per_prompt for config in (small, given)]
    assert several[0] == several[1], "a group has several micro-batches, or one"


@pytest.mark.parametrize(
    ("overrides", "groups"),
    [
        ((), 2),
        (("algorithm.updates_per_iteration=1",), 2),
        (("algorithm.updates_per_iteration=16",), 16),
        (("schedule.stale_fraction=0.25",), 4),
        (("schedule.advantage=streaming", "algorithm.std_scope=group"), 2),
        (("schedule.layout=colocated", "cluster.workers=1"), 2),
        (("algorithm.samples_per_prompt=2", "schedule.micro_batch=1"), 2),
        (("algorithm.best_of_n=24",), 2),
        (("optimizer.warmup_iterations=50", "tracking.uri=http://elsewhere:5000"), 2),
        (("cluster.address=tcp://nowhere:8786", "cluster.workers=64", "cluster.trainers=32"), 2),
    ],
)
def test_groups_are_as_few_as_the_run_allows(overrides: tuple[str, ...], groups: int) -> None:
    small = shrink(load_config("sd35-medium-flow_grpo", overrides))
    assert small.algorithm.prompts_per_iteration == groups
    assert small.tracking.uri == "managed"


def test_several_rewards_stay_several() -> None:
    terms = "rewards=[{name: ocr}, {name: jpeg_compressibility, weight: 0.1}]"
    assert len(shrink(load_config("flux1-dev-mix_grpo", [terms])).rewards) == 2


def test_a_tiny_preset_keeps_its_model_and_reward() -> None:
    given = load_config("tiny-ocr")
    assert (shrink(given).model, shrink(given).rewards) == (given.model, given.rewards)


def test_its_checkpoint_goes_nowhere_else() -> None:
    elsewhere = ["checkpoint.url=s3://bucket/x", "checkpoint.endpoint=http://h", "checkpoint.credentials_block=key"]
    given = load_config("tiny-smoke", [*elsewhere, "checkpoint.keep.best=1"])
    assert shrink(given).checkpoint == load_config("tiny-smoke", ["checkpoint.keep.best=1"]).checkpoint


# What is called passed


def witness(trained: int = 8, skipped: int = 0, grad_norm: float = 0.0, **changes: object) -> Witness:
    report = IterationReport(0, 1.0, [0.5], {}, trained, {"zero variance": 4}, skipped, {"grad_norm": grad_norm}, {})
    first = UnitMetrics(pairs=4, ratio=4.0, ratio_max=1.0, logp_gap_max=1e-7)
    return replace(Witness(report, first, layers=3, outputs=True), **changes)


def test_gates_that_passed_are_named() -> None:
    lines = dict(passed(witness()))
    assert "1 ± 1.0e-07" in lines["replay"]
    assert lines["weights"].startswith("LoRA on 3 layers, moved")
    assert "8 (sample, step) pairs; 4 left out" in lines["gradients"]
    assert dict(passed(witness(layers=0, outputs=False, grad_norm=0.1)))["weights"] == "all, moved by the updates"
    assert "exactly 1" in dict(passed(witness(first=UnitMetrics(pairs=4))))["replay"]
    assert "none" in dict(passed(witness(first=UnitMetrics(pairs=4, forward=4))))["replay"]


@pytest.mark.parametrize(
    ("shown", "why"),
    [
        (witness(trained=0), "trained nothing .zero variance: 4."),
        (witness(report=None), "trained nothing"),
        (witness(first=UnitMetrics()), "trained nothing"),
        (witness(outputs=False), "changed no weights"),
        (witness(skipped=1), "1 were skipped"),
        (witness(layers=0, outputs=False), "changed no weights"),
    ],
)
def test_an_iteration_that_shows_nothing_has_not_passed(shown: Witness, why: str) -> None:
    with pytest.raises(ExpectedError, match=why):
        passed(shown)


# What is needed


def test_memory_follows_from_sizes() -> None:
    found = memory_of(load_config("flux1-dev-flow_grpo"))
    assert found is not None
    # 11.9e9 parameters of two bytes; the adapter's states and four samples' activations come on top.
    assert 23.8e9 < found.rollout < 26e9 and found.rollout < found.train < 40e9
    assert found.download == pytest.approx(2 * (11.90e9 + 4.97e9), rel=0.01)
    assert found.most == found.train + found.beside


def test_half_the_groups_take_about_half_the_time() -> None:
    seconds = []
    for groups in (16, 8):
        sizes = ["algorithm.samples_per_prompt=8", f"algorithm.prompts_per_iteration={groups}"]
        pace = pace_of(load_config("flux1-dev-flow_grpo_fast", sizes))
        assert pace is not None and pace.iteration_s is not None and 0 < pace.trainers < FLEET
        seconds.append(pace.iteration_s)
    assert 0.5 <= seconds[1] / seconds[0] < 0.65, "of few units, some devices have one more than others"


def test_what_fits_no_h100_needs_memory_but_takes_no_time() -> None:
    config = load_config("wan2.1-14b-dance_grpo", ["schedule.micro_batch=16"])
    memory, pace = memory_of(config), pace_of(config)
    assert memory is not None and memory.train > 80e9
    assert pace is not None and pace.iteration_s is None


def test_needs_of_an_unknown_checkpoint_are_not_made_up() -> None:
    for config in (load_config("flux1-dev-flow_grpo", ["model.path=me/my-flux"]), load_config("tiny-ocr")):
        assert memory_of(config) is None and pace_of(config) is None


@pytest.mark.parametrize(("size", "gpu"), [(10e9, 24), (24e9, 48), (70e9, 80), (100e9, 141), (500e9, None)])
def test_the_smallest_gpu_with_room(size: float, gpu: int | None) -> None:
    assert smallest_gpu(size) == gpu


def test_every_published_preset_fits_one_gpu_a_worker() -> None:
    for preset in presets():
        memory = memory_of(preset.config)
        assert (memory is None) == (not preset.is_published)
        assert memory is None or memory.most < 0.9 * 80e9, preset.name
