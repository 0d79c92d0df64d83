"""Stable Diffusion 3 and 3.5: StableDiffusion3Pipeline behind the FlowModel protocol.

Guidance is classifier-free, against the prompt "", in one forward pass over [negative, positive] as in the pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from digenrl.models.base import Embeddings
from digenrl.models.pipeline import JOINT_ATTENTION, PipelineModel, decode_pictures, quiet

with quiet():
    from diffusers import StableDiffusion3Pipeline


class SD3Model(PipelineModel):
    """One SD3 checkpoint.

    Args:
        pipeline: a StableDiffusion3Pipeline on its device.
        max_sequence_length: tokens of the T5 part of a prompt. None: 256 as in the pipeline's call, or none at all
            if the checkpoint has no T5 (the pipeline would append 256 zero vectors).
    """

    family = "sd3"
    pipeline_class = StableDiffusion3Pipeline
    #: The list of Flow-GRPO's SD3.5 recipes.
    lora_targets = JOINT_ATTENTION
    negative_prompt = ""
    default_tokens = 256
    fewest_tokens = 0
    spacing = "scheduler"

    def __init__(self, pipeline: Any, max_sequence_length: int | None = None) -> None:
        if max_sequence_length is None and pipeline.text_encoder_3 is None:
            max_sequence_length = 0
        super().__init__(pipeline, max_sequence_length)

    def _encode(self, prompts: list[str]) -> Embeddings:
        """`prompt_embeds` (B, L, C) and `pooled_prompt_embeds` (B, P)."""
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompts,
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.tokens,
        )
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def blank_embeddings(self, prompts: int) -> Embeddings:
        """See PipelineModel."""
        config = self.pipeline.transformer.config
        return self._blank(
            prompts,
            prompt_embeds=(self.pipeline.tokenizer_max_length + self.tokens, config.joint_attention_dim),
            pooled_prompt_embeds=(config.pooled_projection_dim,),
        )

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Velocity (B, C, h, w) in the dtype of `latents`."""
        guided = guidance_scale > 1
        names = ("negative_", "") if guided else ("",)
        copies = len(names)
        output: torch.Tensor = self._transform(
            hidden_states=latents.to(self._dtype).repeat(copies, 1, 1, 1),
            timestep=self._timestep(sigma).repeat(copies),
            encoder_hidden_states=_join(embeddings, names, "prompt_embeds").to(self._dtype),
            pooled_projections=_join(embeddings, names, "pooled_prompt_embeds").to(self._dtype),
            return_dict=False,
        )[0].to(latents.dtype)
        if not guided:
            return output
        negative, positive = output.chunk(2)
        guided_output: torch.Tensor = negative + guidance_scale * (positive - negative)
        return guided_output

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        return decode_pictures(self.pipeline.vae, latents)


def _join(embeddings: Embeddings, prefixes: Sequence[str], name: str) -> torch.Tensor:
    return torch.cat([embeddings[prefix + name] for prefix in prefixes])
