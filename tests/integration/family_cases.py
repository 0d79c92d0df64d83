"""One small case of every model family, and how its stock pipeline is called by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from digenrl.config import LoraConfig, ModelConfig
from digenrl.identity import MicroBatchId, SampleId
from digenrl.models.base import Geometry
from digenrl.models.packing import pack, unpack
from digenrl.models.registry import load_model
from digenrl.policy import NumberedAdapter, Policy
from digenrl.rollout import RolloutSpec
from digenrl.trajectory import Trajectory

#: Of different lengths.
PROMPTS = ["042", "two dogs", "a cat"]
LORA = LoraConfig(rank=4, alpha=8)


@dataclass(frozen=True)
class Case:
    """A family on its tiny checkpoint.

    Attributes:
        model: what to load.
        guidance: without and with.
        arguments: of the pipeline's call, from the guidance scale and the number of prompts, beside the common ones.
        encoded: what `encode_prompt` of the pipeline gives, by our names.
        enter, leave: latents as the pipeline takes and returns them.
    """

    model: ModelConfig
    guidance: tuple[float, float]
    arguments: Callable[[float, int], dict[str, Any]]
    encoded: Callable[[Any, list[str]], Mapping[str, torch.Tensor]]
    enter: Callable[[torch.Tensor], torch.Tensor] = torch.clone
    leave: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda latents, like: latents

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.model.height, self.model.width, self.model.frames)

    def policy(self, lora: LoraConfig = LORA) -> Policy:
        return Policy(load_model(self.model), lora, seed=0)

    def wide_policy(self) -> Policy:
        """The same in float64."""
        model = load_model(self.model)
        model.transformer.double()
        model._dtype = torch.float64
        return Policy(model, LORA, seed=0, dtype=torch.float64)

    def stock(self) -> Any:
        """The family's pipeline, freshly loaded."""
        pipeline = load_model(self.model).pipeline
        if self.model.family == "wan":  # whose multistep solver is Euler's method at order 1
            order = {"solver_order": 1, "disable_corrector": list(range(1000))}
            pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **order)
        return pipeline

    def call(self, pipeline: Any, latents: torch.Tensor, steps: int, guidance: float, output: str) -> Any:
        """Final latents (B, *D), or pixels in [0, 1] as an array (B, [F,] H, W, 3)."""
        found = pipeline(**self.call_arguments(latents, steps, guidance, output))[0]
        return self.leave(found, latents) if output == "latent" else found

    def call_arguments(self, latents: torch.Tensor, steps: int, guidance: float, output: str) -> dict[str, Any]:
        """What the pipeline is called with, for as many of the prompts as there are (B, *D) latents."""
        prompts = PROMPTS[: len(latents)]
        return {
            "prompt": prompts,
            "height": self.model.height,
            "width": self.model.width,
            "num_inference_steps": steps,
            "latents": self.enter(latents),
            "output_type": output,
            "return_dict": False,
            **({"num_frames": self.model.frames} if latents.ndim == 5 else {}),
            **self.arguments(guidance, len(prompts)),
        }

    def spec(self, policy: Policy, size: int, steps: Sequence[int], guidance: float, num_steps: int = 4) -> RolloutSpec:
        return RolloutSpec(
            micro_batch=MicroBatchId("train", 0, 0),
            samples=tuple(SampleId(7, 0, 0, i) for i in range(size)),
            version=0,
            sigmas=policy.model.sigmas(num_steps, self.geometry),
            stochastic=tuple(steps),
            steps=tuple(steps),
            sampler="flow_sde",
            noise_level=0.7,
            guidance_scale=guidance,
            geometry=self.geometry,
        )


def moved(policy: Policy, scale: float = 0.1) -> NumberedAdapter:
    """An adapter away from the start, both matrices of every layer."""
    generator = torch.Generator().manual_seed(1)
    start = policy.initial_adapter()
    noise = {name: torch.randn(w.shape, generator=generator).to(w) for name, w in start.items()}
    return NumberedAdapter(1, {name: w + scale * noise[name] for name, w in start.items()})


def widened(trajectory: Trajectory) -> Trajectory:
    """The same trajectory in float64."""
    names = ("sigmas", "latents", "next_latents", "log_probs")
    return replace(trajectory, **{name: getattr(trajectory, name).double() for name in names})


def _sd3_encoded(pipeline: Any, prompts: list[str]) -> Mapping[str, torch.Tensor]:
    embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(prompts, None, None, max_sequence_length=0)
    return {
        "prompt_embeds": embeds,
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": negative,
        "negative_pooled_prompt_embeds": negative_pooled,
    }


def _flux_encoded(pipeline: Any, prompts: list[str]) -> Mapping[str, torch.Tensor]:
    embeds, pooled, _ = pipeline.encode_prompt(prompts, max_sequence_length=512)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def _qwen_encoded(pipeline: Any, prompts: list[str]) -> Mapping[str, torch.Tensor]:
    embeds, mask = pipeline.encode_prompt(prompts, max_sequence_length=512)
    negative, none = pipeline.encode_prompt([" "] * len(prompts), max_sequence_length=512)
    assert mask is not None and none is None
    return {
        "prompt_embeds": embeds,
        "prompt_embeds_mask": mask,
        "negative_prompt_embeds": negative,
        "negative_prompt_embeds_mask": torch.ones(negative.shape[:2], dtype=torch.long),
    }


def _qwen_arguments(guidance: float, prompts: int) -> dict[str, Any]:
    return {"true_cfg_scale": guidance, "negative_prompt": [" "] * prompts if guidance > 1 else None}


def _wan_encoded(pipeline: Any, prompts: list[str]) -> Mapping[str, torch.Tensor]:
    embeds, negative = pipeline.encode_prompt(prompts, max_sequence_length=512)
    return {"prompt_embeds": embeds, "negative_prompt_embeds": negative}


def _hunyuan_encoded(pipeline: Any, prompts: list[str]) -> Mapping[str, torch.Tensor]:
    embeds, pooled, mask = pipeline.encode_prompt(prompts)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "prompt_attention_mask": mask}


def _unpacked(latents: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return unpack(latents, *like.shape[-2:])


CASES = {
    "sd3": Case(
        ModelConfig(),
        (1.0, 4.5),
        lambda guidance, _: {"guidance_scale": guidance, "max_sequence_length": 0},
        _sd3_encoded,
    ),
    "flux": Case(
        ModelConfig(family="flux", path="tiny:flux", height=32, width=64),
        (1.0, 3.5),
        lambda guidance, _: {"guidance_scale": guidance},
        _flux_encoded,
        pack,
        _unpacked,
    ),
    "qwen": Case(
        ModelConfig(family="qwen", path="tiny:qwen", height=32, width=64),
        (1.0, 4.0),
        _qwen_arguments,
        _qwen_encoded,
        pack,
        _unpacked,
    ),
    "wan": Case(
        ModelConfig(family="wan", path="tiny:wan", height=32, width=48, frames=5),
        (1.0, 5.0),
        lambda guidance, _: {"guidance_scale": guidance},
        _wan_encoded,
    ),
    "hunyuan": Case(
        ModelConfig(family="hunyuan", path="tiny:hunyuan", height=32, width=48, frames=5),
        (1.0, 6.0),
        lambda guidance, _: {"guidance_scale": guidance},
        _hunyuan_encoded,
    ),
}
