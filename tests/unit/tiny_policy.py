"""A randomly initialised tiny StableDiffusion3Pipeline and what is needed to roll it out and train it."""

from __future__ import annotations

from dataclasses import replace

import torch
from diffusers import StableDiffusion3Pipeline
from pydantic import TypeAdapter

from digenrl.config import AlgorithmConfig, LoraConfig
from digenrl.data.tiny_sd3_parts import build_pipeline, build_vae
from digenrl.identity import MicroBatchId, SampleId
from digenrl.models.base import Embeddings, Geometry
from digenrl.models.sd3 import SD3Model
from digenrl.policy import Adapter, NumberedAdapter, Policy
from digenrl.rollout import RolloutSpec, advance, finish, start_rollout
from digenrl.trajectory import Trajectory

GEOMETRY = Geometry(12, 24)
LORA = LoraConfig(rank=4, alpha=8)
PROMPT = "042"


def random_pipeline(seed: int = 0, dtype: torch.dtype = torch.float32) -> StableDiffusion3Pipeline:
    """The tiny pipeline, untrained. The output layer is scaled up so that velocities are of order one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = build_pipeline(build_vae())
    pipeline.vae.register_to_config(shift_factor=0.1, scaling_factor=1.3)
    pipeline.transformer.proj_out.weight.data.mul_(3.0)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.transformer.to(dtype)
    return pipeline


def tiny_policy(dtype: torch.dtype = torch.float32, lora: LoraConfig = LORA) -> Policy:
    """A policy whose base computes in `dtype`. Its adapter is float64 for a float64 base, else float32."""
    adapter_dtype = torch.promote_types(dtype, torch.float32)
    return Policy(SD3Model(random_pipeline(dtype=dtype)), lora, seed=0, dtype=adapter_dtype)


def moved(policy: Policy, theta: int, scale: float = 0.05) -> NumberedAdapter:
    """An adapter away from the start: all matrices, B included, get noise seeded by `theta`."""
    generator = torch.Generator().manual_seed(theta)
    start = policy.initial_adapter()
    weights: Adapter = {
        name: w + scale * torch.randn(w.shape, generator=generator, dtype=torch.float32).to(w.dtype)
        for name, w in start.items()
    }
    return NumberedAdapter(theta, weights)


def rollout_spec(
    policy: Policy,
    size: int = 4,
    steps: tuple[int, ...] = (0, 1, 2),
    num_steps: int = 6,
    sampler: str = "flow_sde",
    guidance_scale: float = 1.0,
) -> RolloutSpec:
    return RolloutSpec(
        micro_batch=MicroBatchId("train", 0, 0),
        samples=tuple(SampleId(7, 0, 0, i) for i in range(size)),
        version=0,
        sigmas=policy.model.sigmas(num_steps, GEOMETRY),
        stochastic=steps,
        steps=steps,
        sampler=sampler,
        noise_level=0.7,
        guidance_scale=guidance_scale,
        geometry=GEOMETRY,
    )


def embeddings_for(policy: Policy, spec: RolloutSpec) -> Embeddings:
    return policy.model.encode([PROMPT] * len(spec.samples))


def roll_out(policy: Policy, spec: RolloutSpec, adapter: NumberedAdapter) -> Trajectory:
    policy.bind(adapter.weights, adapter.theta)
    state = start_rollout(policy, spec)
    state = advance(policy, spec, state, embeddings_for(policy, spec), 0, spec.num_steps)
    return finish(policy, spec, state)[0]


def widened(trajectory: Trajectory) -> Trajectory:
    """The same trajectory in float64."""
    names = ("sigmas", "latents", "next_latents", "log_probs")
    return replace(trajectory, **{name: getattr(trajectory, name).double() for name in names})


def algorithm(**changes: object) -> AlgorithmConfig:
    return TypeAdapter(AlgorithmConfig).validate_python({"num_steps": 6, **changes})
