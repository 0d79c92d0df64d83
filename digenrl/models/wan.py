"""Wan2.1 text-to-video: WanPipeline behind the FlowModel protocol.

Guidance is classifier-free, against the prompt "", in a second forward pass, the two combined in float32. The
transformer is told integer timesteps. Deterministic steps are Euler steps along the scheduler's own sigmas, where the
pipeline takes multistep ones of UniPC; a stochastic step has no other form.
"""

from __future__ import annotations

from typing import Any

import torch

from digenrl.models.base import Embeddings
from digenrl.models.checkpoint import CheckpointError
from digenrl.models.pipeline import PipelineModel, quiet, unstandardised

with quiet():
    from diffusers import WanPipeline


class WanModel(PipelineModel):
    """One Wan2.1 T2V checkpoint.

    Raises:
        CheckpointError: a Wan2.2 checkpoint, which has two transformers or a timestep for every token.
    """

    family = "wan"
    pipeline_class = WanPipeline
    #: Flow-GRPO's list for Wan2.1, less the image projections, which text-to-video does not have.
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    negative_prompt = ""
    default_tokens = 512
    spacing = "scheduler"

    def __init__(self, pipeline: Any, max_sequence_length: int | None = None) -> None:
        if pipeline.config.boundary_ratio is not None or pipeline.config.expand_timesteps:
            raise CheckpointError(
                "model.family=wan needs a Wan2.1 text-to-video checkpoint, but this one is of Wan2.2 "
                f"(boundary_ratio={pipeline.config.boundary_ratio}, "
                f"expand_timesteps={pipeline.config.expand_timesteps})"
            )
        super().__init__(pipeline, max_sequence_length)

    def _encode(self, prompts: list[str]) -> Embeddings:
        """`prompt_embeds` (B, L, C) of UMT5: zeros after a prompt's own length, without a mask."""
        embeds, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=False, max_sequence_length=self.tokens
        )
        return {"prompt_embeds": embeds}

    def blank_embeddings(self, prompts: int) -> Embeddings:
        """See PipelineModel."""
        return self._blank(prompts, prompt_embeds=(self.tokens, self.pipeline.transformer.config.text_dim))

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Velocity (B, C, f, h, w) in the dtype of `latents`."""
        positive = self._forward(latents, sigma, embeddings["prompt_embeds"])
        if guidance_scale <= 1:
            return positive
        negative = self._forward(latents, sigma, embeddings["negative_prompt_embeds"])
        return negative + guidance_scale * (positive - negative)

    def _forward(self, latents: torch.Tensor, sigma: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self._transform(
            hidden_states=latents.to(self._dtype),
            timestep=self._timestep(sigma).long(),  # truncated, as UniPC's are
            encoder_hidden_states=text.to(self._dtype),
            return_dict=False,
        )[0]
        return output.to(latents.dtype)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipeline.vae
        videos: torch.Tensor = vae.decode(unstandardised(latents, vae.config), return_dict=False)[0]
        return videos
