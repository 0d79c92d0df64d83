"""How each family's stock diffusers pipeline is called by hand: what our models are held against.

stock_of(family) -> Stock
Stock.call(...)      the pipeline's own denoising loop, from given noise
Stock.encoded(...)   the pipeline's own `encode_prompt`, by our names
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from digenrl.models.base import Geometry
from digenrl.models.packing import pack, unpack


@dataclass(frozen=True)
class Stock:
    """One family's pipeline.

    Attributes:
        guidance: scales without and with guidance.
        arguments: of the pipeline's call, from the guidance scale and the number of prompts, beside the common ones.
        encode: what `encode_prompt` gives, by our names; from pipeline, prompts and tokens of the long part.
        packed: latents enter and leave the call as tokens.
        multistep: the pipeline's solver is of second order; at order 1 it is Euler's method.
    """

    guidance: tuple[float, float]
    arguments: Callable[[float, int], dict[str, Any]]
    encode: Callable[[Any, list[str], int], Mapping[str, torch.Tensor]]
    packed: bool = False
    multistep: bool = False

    def encoded(self, pipeline: Any, prompts: Sequence[str], tokens: int) -> Mapping[str, torch.Tensor]:
        """Embeddings of prompts, negative ones included where the family has them."""
        with torch.no_grad():
            return self.encode(pipeline, list(prompts), tokens)

    def prepare(self, pipeline: Any) -> Any:
        """The pipeline with a solver that takes Euler steps."""
        if self.multistep:
            order = {"solver_order": 1, "disable_corrector": list(range(1000))}
            pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, **order)
        return pipeline

    def call(
        self,
        pipeline: Any,
        prompts: Sequence[str],
        latents: torch.Tensor,
        geometry: Geometry,
        *,
        steps: int,
        guidance: float,
        tokens: int | None = None,
        output: str = "latent",
    ) -> Any:
        """Denoise (B, *D) noise.

        Returns:
            Final latents (B, *D), or with another `output` what the pipeline gives, such as pixels in [0, 1].
        """
        arguments = self.call_arguments(
            prompts, latents, geometry, steps=steps, guidance=guidance, tokens=tokens, output=output
        )
        found = pipeline(**arguments)[0]
        return self.leave(found, latents) if output == "latent" else found

    def call_arguments(
        self,
        prompts: Sequence[str],
        latents: torch.Tensor,
        geometry: Geometry,
        *,
        steps: int,
        guidance: float,
        tokens: int | None = None,
        output: str = "latent",
    ) -> dict[str, Any]:
        """What the pipeline is called with."""
        return {
            "prompt": list(prompts),
            "height": geometry.height,
            "width": geometry.width,
            "num_inference_steps": steps,
            "latents": pack(latents) if self.packed else latents.clone(),
            "output_type": output,
            "return_dict": False,
            **({"num_frames": geometry.frames} if latents.ndim == 5 else {}),
            **({} if tokens is None else {"max_sequence_length": tokens}),
            **self.arguments(guidance, len(prompts)),
        }

    def leave(self, found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What a call returned, in the shape (B, *D) of `like`."""
        return unpack(found, *like.shape[-2:]) if self.packed else found


def stock_of(family: str) -> Stock:
    """How the pipeline of a family is called."""
    return _STOCK[family]


def _scale(guidance: float, _: int) -> dict[str, Any]:
    return {"guidance_scale": guidance}


def _true_scale(guidance: float, prompts: int) -> dict[str, Any]:
    return {"true_cfg_scale": guidance, "negative_prompt": [" "] * prompts if guidance > 1 else None}


def _sd3(pipeline: Any, prompts: list[str], tokens: int) -> Mapping[str, torch.Tensor]:
    embeds, negative, pooled, negative_pooled = pipeline.encode_prompt(prompts, None, None, max_sequence_length=tokens)
    return {
        "prompt_embeds": embeds,
        "pooled_prompt_embeds": pooled,
        "negative_prompt_embeds": negative,
        "negative_pooled_prompt_embeds": negative_pooled,
    }


def _flux(pipeline: Any, prompts: list[str], tokens: int) -> Mapping[str, torch.Tensor]:
    embeds, pooled, _ = pipeline.encode_prompt(prompts, max_sequence_length=tokens)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


def _qwen(pipeline: Any, prompts: list[str], tokens: int) -> Mapping[str, torch.Tensor]:
    embeds, mask = pipeline.encode_prompt(prompts, max_sequence_length=tokens)
    negative, _ = pipeline.encode_prompt([" "] * len(prompts), max_sequence_length=tokens)
    return {
        "prompt_embeds": embeds,
        "prompt_embeds_mask": embeds.new_ones(embeds.shape[:2], dtype=torch.long) if mask is None else mask,
        "negative_prompt_embeds": negative,
        "negative_prompt_embeds_mask": negative.new_ones(negative.shape[:2], dtype=torch.long),
    }


def _wan(pipeline: Any, prompts: list[str], tokens: int) -> Mapping[str, torch.Tensor]:
    embeds, negative = pipeline.encode_prompt(prompts, max_sequence_length=tokens)
    return {"prompt_embeds": embeds, "negative_prompt_embeds": negative}


def _hunyuan(pipeline: Any, prompts: list[str], tokens: int) -> Mapping[str, torch.Tensor]:
    embeds, pooled, mask = pipeline.encode_prompt(prompts, max_sequence_length=tokens)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "prompt_attention_mask": mask}


_STOCK = {
    "sd3": Stock((1.0, 4.5), _scale, _sd3),
    "flux": Stock((1.0, 3.5), _scale, _flux, packed=True),
    "qwen": Stock((1.0, 4.0), _true_scale, _qwen, packed=True),
    "wan": Stock((1.0, 5.0), _scale, _wan, multistep=True),
    "hunyuan": Stock((1.0, 6.0), _scale, _hunyuan),
}
