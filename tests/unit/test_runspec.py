"""What a configuration means in units, seeds and numbers."""

from __future__ import annotations

import pytest
import torch

from digenrl import runspec
from digenrl.algorithms.dance_grpo import shifted_sigmas
from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.identity import MicroBatchId, SampleId
from digenrl.models.sd3 import SD3Model
from digenrl.prompts import load_prompts, prompts_of_iteration
from digenrl.rewards.base import Scored
from tiny_policy import GEOMETRY, random_pipeline


def _config(*overrides: str) -> RunConfig:
    return load_config("tiny-ocr", overrides)


def test_shape_resolves_every_auto() -> None:
    shape = runspec.shape(_config("evaluation.prompts=500"), num_held_out=200, start_iteration=4)
    assert (shape.micro_batch, shape.timestep_batch, shape.micro_batches_per_group) == (16, 3, 1)
    assert (shape.start_iteration, shape.iterations, shape.groups, shape.updates) == (4, 60, 8, 4)
    assert shape.eval_prompts == 200 and shape.eval_num_steps == 10
    assert [len(shape.trained_steps(i)) for i in range(20)] == [3] * 20
    assert {shape.trained_steps(i)[0] for i in range(50)} == {0, 1, 2}


def test_explicit_sizes_are_kept_and_bounded_by_the_trained_steps() -> None:
    shape = runspec.shape(_config("schedule.micro_batch=4", "schedule.timestep_batch=2"), 0)
    assert (shape.micro_batch, shape.timestep_batch) == (4, 2)
    assert [unit.steps for unit in shape.train_units(MicroBatchId("train", 0, 0))] == [
        shape.trained_steps(0)[:2],
        shape.trained_steps(0)[2:],
    ]
    assert runspec.shape(_config("schedule.timestep_batch=9"), 0).timestep_batch == 3


@pytest.mark.parametrize(
    ("overrides", "versions"),
    [
        (("evaluation.every=25",), [0, 25, 50, 60]),
        (("evaluation.every=30",), [0, 30, 60]),
        (("evaluation.every=0",), []),
    ],
)
def test_evaluated_versions(overrides: tuple[str, ...], versions: list[int]) -> None:
    shape = runspec.shape(_config(*overrides), 200)
    assert [v for v in range(61) if shape.evaluated(v)] == versions
    assert bool(shape.eval_prompts) == bool(versions)


def test_detailed_iterations() -> None:
    def detailed(*overrides: str) -> list[int]:
        shape = runspec.shape(_config(*overrides), 0)
        return [i for i in range(7) if shape.detailed(i)]

    assert detailed("schedule.observe.every=3") == [0, 3, 6]
    assert detailed("schedule.observe.every=0") == [0]
    assert detailed("schedule.observe.detail=unit") == list(range(7))


def test_normaliser_is_the_nominal_size_of_an_update() -> None:
    assert runspec.normaliser(_config()) == 2 * 16 * 3
    assert runspec.normaliser(_config("algorithm.sde_window_size=0")) == 2 * 16 * 9


def test_training_and_evaluation_rollouts() -> None:
    config = _config("evaluation.num_steps=7", "evaluation.seed=5")
    shape, model = runspec.shape(config, 200), SD3Model(random_pipeline())
    train = runspec.rollout_spec(config, shape, model, MicroBatchId("train", 3, 2), version=3)
    assert train.steps == shape.trained_steps(3) and train.num_steps == 10 and train.version == 3
    assert train.geometry == GEOMETRY and train.noise_level == 0.7 and len(train.samples) == 16
    first, second = (
        runspec.rollout_spec(config, shape, model, MicroBatchId("eval", version, 7), version) for version in (0, 10)
    )
    assert first.steps == () and first.num_steps == 7 and len(first.samples) == 25
    assert first.samples == second.samples  # the same noise at every evaluation
    assert first.samples[0].run_seed == 5 and first.samples[0].group == 7 * 25


def test_an_algorithm_may_draw_more_steps_than_it_trains_along_a_schedule_of_its_own() -> None:
    config = _config("algorithm.name=dance_grpo", "algorithm.sigma_shift=3")
    shape, model = runspec.shape(config, 200), SD3Model(random_pipeline())
    train = runspec.rollout_spec(config, shape, model, MicroBatchId("train", 3, 2), version=3)
    assert train.stochastic == tuple(range(9))
    assert train.steps == shape.trained_steps(3) and len(train.steps) == 5 == runspec.trained_step_count(config)
    assert (train.sampler, train.noise_level) == ("dance_sde", 0.3)
    assert torch.equal(train.sigmas, shifted_sigmas(10, 3.0))
    evaluation = runspec.rollout_spec(config, shape, model, MicroBatchId("eval", 0, 7), 0)
    assert evaluation.stochastic == evaluation.steps == ()
    assert torch.equal(evaluation.sigmas, model.sigmas(10, GEOMETRY))


def _scored(group: int, *parts: tuple[float, ...]) -> dict[SampleId, Scored]:
    names = ("ocr", "jpeg_compressibility")
    named = [dict(zip(names, values, strict=False)) for values in parts]
    return {SampleId(0, 0, group, i): Scored(sum(values.values()), values) for i, values in enumerate(named)}


def test_advantages_are_of_the_sum_of_rewards_or_of_each() -> None:
    """The second reward is a hundred times as large, but both disagree to the same degree."""
    rewards = "rewards=[{name: ocr}, {name: jpeg_compressibility}]"
    groups = [_scored(0, (0.0, 100.0), (1.0, 0.0), (0.5, 50.0))]
    of_sum, of_each = (
        runspec.advantages_of(_config(rewards, f"algorithm.reward_aggregation={kind}"), groups)
        for kind in ("rewards", "advantages")
    )
    assert [round(a, 3) for a in of_sum.values.values()] == [1.225, -1.225, 0.0]
    assert list(of_each.values.values()) == pytest.approx([0, 0, 0], abs=1e-3)
    ranked = _config(
        "rewards=[{name: ocr, normalise: rank}, {name: jpeg_compressibility, weight: 0.5, normalise: rank}]"
    )
    found = runspec.advantages_of(ranked, groups).values.values()
    assert [round(a, 3) for a in found] == [-1.224, 1.224, 0.0], "ranks are of equal size, so the weights decide"


def test_everybody_who_takes_no_part_is_excluded_with_a_reason() -> None:
    judge = runspec.advantage_rule(_config("algorithm.best_of_n=2"))
    verdict = judge([_scored(0, (0.1,), (0.9,), (0.5,)), _scored(1, (0.5,), (0.5,))])
    assert list(verdict.advantages) == [SampleId(0, 0, 0, 0), SampleId(0, 0, 0, 1)]
    assert dict(verdict.excluded) == {
        SampleId(0, 0, 0, 2): "not among the best and worst",
        **dict.fromkeys((SampleId(0, 0, 1, 0), SampleId(0, 0, 1, 1)), "zero variance"),
    }


def test_prompts_follow_the_samples() -> None:
    config = _config("schedule.micro_batch=8")
    prompts, held_out = load_prompts("package:numbers-train"), load_prompts("package:numbers-held-out")
    shape = runspec.shape(config, len(held_out))
    drawn = [runspec.prompts_of(shape, m, prompts, held_out) for m in shape.micro_batches(1)]
    assert all(len({p.uid for p in batch}) == 1 and len(batch) == 8 for batch in drawn)
    assert drawn[0] == drawn[1] and len({batch[0].uid for batch in drawn}) == 8
    evaluated = [p for m in shape.eval_micro_batches(0) for p in runspec.prompts_of(shape, m, prompts, held_out)]
    assert evaluated == list(held_out)


def test_seeds_and_rates() -> None:
    assert runspec.adapter_seed(_config()) != runspec.adapter_seed(_config("seed=1"))
    rates = [runspec.learning_rate(_config(), i) for i in range(60)]
    assert rates[2] == pytest.approx(1e-3) and rates[59] == pytest.approx(1e-4)


def test_texts_of_a_run_are_those_it_draws_and_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, held_out = (load_prompts(f"package:numbers-{part}") for part in ("train", "held-out"))

    def texts(*overrides: str, start: int = 0) -> tuple[str, ...]:
        config = _config("iterations=3", "evaluation.prompts=5", *overrides)
        return runspec.texts_of(config, runspec.shape(config, len(held_out), start), prompts, held_out)

    drawn = [p.text for i in range(3) for p in prompts_of_iteration(prompts, 0, i, 8)]
    evaluated = [prompt.text for prompt in held_out[:5]]
    assert sorted(texts()) == sorted({*drawn, *evaluated})
    assert sorted(texts(start=2)) == sorted({*drawn[16:], *evaluated}), "a resumed run encodes what is left"
    assert sorted(texts("iterations=100000")) == sorted({*(p.text for p in prompts), *evaluated}), "each once"
    assert texts("model.text_encoders=keep") == ()
    monkeypatch.setattr(runspec, "MOST_TEXTS", 20)
    assert texts() == () and len(texts("model.text_encoders=free")) == 29
