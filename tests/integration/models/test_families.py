"""Every model family against its own diffusers pipeline, and through a training step.

The stock pipeline is the reference: prompts, schedule, guidance, decoding and adapters must be its own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from digenrl.config import FlowGrpoConfig, LoraConfig
from digenrl.config.errors import ConfigError
from digenrl.config.load import load_config
from digenrl.loop import train
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.registry import FAMILIES, load_model, save_lora
from digenrl.models.verify import moved
from digenrl.policy import NumberedAdapter, Policy
from digenrl.preflight_model import check_model
from digenrl.rewards.base import Scored
from digenrl.rollout import RolloutSpec, RolloutState, advance, finish, start_rollout
from digenrl.training import Contribution, train_unit
from digenrl.trajectory import Trajectory
from family_cases import CASES, LORA, PROMPTS, Case, widened
from flows.plan.memory import need_of
from flows.plan.subject import subject_of

STEPS = (0, 1, 2)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """Tiny checkpoints are built anew, once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest, cache: None) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="module")
def policy(case: Case) -> Policy:
    return case.policy()


def _rolled_out(policy: Policy, spec: RolloutSpec, prompts: list[str]):
    """Final state and what is left of it."""
    embeddings = EmbeddingCache(policy.model).encode(prompts)
    state = advance(policy, spec, start_rollout(policy, spec), embeddings, 0, spec.num_steps)
    return state, *finish(policy, spec, state)


def test_every_family_has_a_case() -> None:
    assert CASES.keys() == FAMILIES.keys()


def test_preflight_has_nothing_to_say_and_the_plan_knows_the_size(case: Case) -> None:
    overrides = [f"model.{name}={value}" for name, value in case.model.model_dump().items() if value is not None]
    subject = subject_of("tiny-smoke", [*overrides, "lora.targets=null"])
    problems: list[str] = []
    notes: list[str] = []
    check_model(subject.config.model, subject.config.lora, problems, notes)
    assert problems == notes == []
    need = need_of(subject)
    assert need is not None and 1e5 < need.to_roll_out < need.train(1) < 1e9


def test_adapters_go_where_the_published_lists_say(case: Case, policy: Policy) -> None:
    """Joint blocks have eight projections, the last of SD3 one less; FLUX and Qwen-Image adapt four feed-forward
    layers beside; single blocks have no output projection of that name; HunyuanVideo's text refiner counts as well."""
    layers = {
        "sd3": 8 + 8 + 7,
        "flux": (8 + 4) + 3,
        "qwen": 2 * (8 + 4),
        "wan": 2 * (4 + 4),
        "hunyuan": 4 + 3 + 4,
    }
    assert policy.bound_modules == layers[case.model.family]


def test_prompts_are_encoded_as_by_the_pipeline(case: Case, policy: Policy) -> None:
    expected = case.encoded(policy.model.pipeline, PROMPTS)
    for found in (policy.model.encode(PROMPTS), EmbeddingCache(policy.model).encode(PROMPTS)):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6)
    first, second = (policy.model.encode([prompt])["prompt_embeds"] for prompt in ("042", "917"))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_deterministic_rollout_is_the_pipelines_call(case: Case, policy: Policy, guided: bool) -> None:
    guidance = case.guidance[guided]
    policy.bind(policy.initial_adapter(), 0)
    spec = case.spec(policy, 3, (), guidance)
    start = start_rollout(policy, spec).latents
    state, _, images = _rolled_out(policy, spec, PROMPTS)
    stock = case.stock()
    torch.testing.assert_close(state.latents, case.call(stock, start, 4, guidance, "latent"), rtol=1e-5, atol=1e-5)
    pixels = np.asarray(case.call(stock, start, 4, guidance, "np")).reshape(images.shape)
    assert np.abs(pixels * 255 - images).max() <= 1  # one level where rounding falls on the edge
    assert images.std() > 5 and images.shape[1] == case.model.frames


def test_noise_is_drawn_as_by_the_pipeline(case: Case, policy: Policy) -> None:
    """In the same order, and in the dtype that the pipeline of a bfloat16 transformer asks for."""
    policy.bind(policy.initial_adapter(), 0)
    spec, generator = case.spec(policy, 1, (), case.guidance[0]), torch.Generator()
    noise = torch.randn((1, *policy.model.latent_shape(case.geometry)), generator=generator.manual_seed(3))
    state = advance(policy, spec, RolloutState(0, noise), policy.model.encode(PROMPTS[:1]), 0, 4)
    arguments = case.call_arguments(noise, 4, case.guidance[0], "latent") | {"generator": generator.manual_seed(3)}
    found = case.stock()(**{**arguments, "latents": None})[0]
    torch.testing.assert_close(case.leave(found, noise), state.latents, rtol=1e-5, atol=1e-5)

    narrow = load_model(case.model.model_copy(update={"dtype": "bfloat16"}))
    asked = []

    def prepare_latents(*args: object, **kwargs: object) -> None:
        asked.extend(value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype))
        raise InterruptedError

    narrow.pipeline.prepare_latents = prepare_latents
    with pytest.raises(InterruptedError):
        narrow.pipeline(**arguments)
    assert asked == [narrow.noise_dtype]


def test_guidance_acts(case: Case, policy: Policy) -> None:
    policy.bind(policy.initial_adapter(), 0)
    latents = start_rollout(policy, case.spec(policy, 2, (), 1.0)).latents
    embeddings = policy.model.encode(PROMPTS[:2])
    weak, strong = (
        policy.velocity(latents, torch.full((2,), 0.7), embeddings, guidance).detach() for guidance in case.guidance
    )
    assert (weak - strong).abs().max() > 1e-4


def test_a_saved_adapter_acts_in_the_pipeline_as_here(case: Case, policy: Policy, tmp_path: Path) -> None:
    """alpha / rank is 2: a reader that assumed alpha = rank would halve the adapter."""
    adapter = moved(policy)
    policy.bind(adapter.weights, adapter.theta)
    spec = case.spec(policy, 3, (), case.guidance[0])
    start = start_rollout(policy, spec).latents
    state, _, _ = _rolled_out(policy, spec, PROMPTS)
    save_lora(case.model.family, adapter.weights, LORA, tmp_path)
    stock = case.stock()
    without = case.call(stock, start, 4, case.guidance[0], "latent")
    stock.load_lora_weights(tmp_path)
    found = case.call(stock, start, 4, case.guidance[0], "latent")
    torch.testing.assert_close(found, state.latents, rtol=1e-5, atol=1e-5)
    assert (found - without).abs().max() > 0.01


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_replay_has_ratio_one(case: Case, policy: Policy, guided: bool) -> None:
    """Log-probs at training are those of the rollout, and most of the adapter gets a gradient."""
    spec = case.spec(policy, 4, STEPS, case.guidance[guided])
    trained = _trained(policy, spec, STEPS, _trajectory(policy, spec))
    assert trained.metrics.pairs == 12 and trained.metrics.ratio_max == 1
    assert trained.metrics.logp_gap_max < 1e-6
    moving = [name for name, gradient in trained.gradient.items() if bool(gradient.any())]
    assert len(moving) > len(trained.gradient) / 2


def test_replay_has_ratio_one_in_bfloat16(case: Case) -> None:
    """One timestep at a time: a bfloat16 kernel gives other bits for another batch."""
    narrow = Policy(load_model(case.model.model_copy(update={"dtype": "bfloat16"})), LORA, seed=0)
    spec = case.spec(narrow, 4, STEPS, case.guidance[1])
    trajectory = _trajectory(narrow, spec)
    assert trajectory.next_latents.dtype == torch.float32
    for step in STEPS:
        metrics = _trained(narrow, spec, (step,), trajectory).metrics
        assert metrics.ratio_max == 1 and metrics.logp_gap_max < 1e-6


@pytest.mark.parametrize("guided", [False, True], ids=["unguided", "guided"])
def test_timesteps_may_be_batched(case: Case, guided: bool) -> None:
    """One pass over all steps has the gradient of a pass per step.

    In float64: terms of both signs cancel, and float32 leaves five digits of what remains.
    """
    policy = case.wide_policy()
    spec = case.spec(policy, 4, STEPS, case.guidance[guided])
    trajectory = widened(_trajectory(policy, spec))
    together = _trained(policy, spec, STEPS, trajectory).gradient
    single = [_trained(policy, spec, (step,), trajectory).gradient for step in STEPS]
    whole = torch.cat([gradient.flatten() for gradient in together.values()])
    summed = torch.cat([sum(g[name] for g in single).flatten() for name in together])
    assert (whole - summed).norm() < 1e-6 * summed.norm()


def _trajectory(policy: Policy, spec: RolloutSpec) -> Trajectory:
    adapter = moved(policy)
    policy.bind(adapter.weights, adapter.theta)
    return _rolled_out(policy, spec, [PROMPTS[1]] * len(spec.samples))[1]


def _trained(policy: Policy, spec: RolloutSpec, steps: tuple[int, ...], trajectory: Trajectory) -> Contribution:
    adapter = moved(policy)
    return train_unit(
        policy,
        trajectory,
        EmbeddingCache(policy.model).encode([PROMPTS[1]] * len(spec.samples)),
        steps,
        dict(zip(spec.samples, (1.0, -1.0, 0.5, -0.3), strict=True)),
        current=adapter,
        old=adapter,
        algorithm=FlowGrpoConfig(num_steps=4),
        guidance_scale=spec.guidance_scale,
        normaliser=12,
    )


def test_a_batch_is_as_its_samples_alone(case: Case, policy: Policy) -> None:
    """Kernels depend on the batch, and some on where it lies in memory; apart from rounding nothing else may."""
    adapter = moved(policy)
    policy.bind(adapter.weights, adapter.theta)
    spec = case.spec(policy, 8, STEPS, case.guidance[1])
    prompts = [PROMPTS[i % 3] for i in range(8)]
    state, _, images = _rolled_out(policy, spec, prompts)
    for row, sample in enumerate(spec.samples):
        alone, _, image = _rolled_out(policy, replace(spec, samples=(sample,)), [prompts[row]])
        torch.testing.assert_close(alone.latents[0], state.latents[row], rtol=0, atol=5e-5)
        torch.testing.assert_close(alone.log_probs[1], state.log_probs[1][row : row + 1], rtol=0, atol=1e-6)
        assert np.abs(image[0].astype(int) - images[row]).max() <= 1


def test_a_nan_latent_is_a_failed_sample(case: Case, policy: Policy) -> None:
    latents = start_rollout(policy, case.spec(policy, 4, (), 1.0)).latents
    clean = policy.model.decode(latents)
    latents[1].flatten()[3] = float("nan")
    latents[3] = float("inf")
    decoded = policy.model.decode(latents)
    assert clean.finite.all() and decoded.finite.tolist() == [True, False, True, False]
    assert torch.equal(decoded.images[[0, 2]], clean.images[[0, 2]])


def test_an_adapter_that_binds_nothing_is_an_error(case: Case) -> None:
    with pytest.raises(ConfigError, match=r"lora.targets: 'to_query' matches no linear layer"):
        case.policy(LoraConfig(rank=4, alpha=8, targets=("to_query",)))


def test_bfloat16_leaves_the_decoder_alone_and_checkpointing_the_gradient(case: Case, policy: Policy) -> None:
    narrow = load_model(case.model.model_copy(update={"dtype": "bfloat16"}))
    latents = start_rollout(policy, case.spec(policy, 2, (), 1.0)).latents
    velocity = narrow.velocity(latents, torch.tensor([0.9, 0.1]), narrow.encode(PROMPTS[:2]), case.guidance[1])
    assert velocity.dtype == torch.float32 and bool(velocity.isfinite().all())
    assert narrow.pipeline.vae.dtype == torch.float32 and narrow.transformer.dtype == torch.bfloat16
    frugal = Policy(load_model(case.model.model_copy(update={"gradient_checkpointing": True})), LORA, seed=0)
    embeddings = frugal.model.encode(PROMPTS[:2])
    gradients = []
    for each in (policy, frugal):
        each.bind(moved(each).weights, 1)
        each.velocity(latents, torch.full((2,), 0.5), embeddings, case.guidance[1]).square().sum().backward()
        gradients.append({name: p.grad for name, p in each.trainable().items() if p.grad is not None})
        for parameter in each.trainable().values():
            parameter.grad = None
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_one_iteration_of_training(case: Case) -> None:
    model = case.model
    config = load_config(
        "tiny-smoke",
        [
            *(f"model.{name}={getattr(model, name)}" for name in ("family", "path", "height", "width", "frames")),
            f"model.guidance_scale={case.guidance[1]}",
            "lora.targets=null",
            "data.held_out=null",
            "rewards.0.name=jpeg_incompressibility",
            "iterations=1",
            "evaluation.every=0",
            "algorithm.num_steps=4",
            "algorithm.sde_window_size=2",
            "algorithm.sde_window_range=[0, 3]",
            "algorithm.prompts_per_iteration=2",
        ],
    )
    result = train(config)
    (iteration,) = result.iterations
    scores = [score for score in iteration.scores.values() if isinstance(score, Scored)]
    assert len(scores) == 8 and len({score.value for score in scores}) > 4
    assert [update.metrics.pairs for update in iteration.updates] == [8, 8]
    assert iteration.updates[0].metrics.ratio_max == 1 and iteration.updates[0].metrics.logp_gap_max < 1e-6
    assert all(update.grad_norm > 0 and update.skipped is None for update in iteration.updates)
    assert isinstance(result.adapter, NumberedAdapter) and result.adapter.theta == 2
    assert any(bool(t.any()) for name, t in result.adapter.weights.items() if "lora_B" in name)
