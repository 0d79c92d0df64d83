"""FLUX.1: FluxPipeline behind the FlowModel protocol.

FLUX.1-dev is distilled to be guided: the guidance scale is an input of its transformer, in rollout and training alike,
and there is no second forward pass. A transformer without that input (FLUX.1-schnell) ignores the scale.
"""

from __future__ import annotations

import torch

from digenrl.models.base import Embeddings
from digenrl.models.packing import pack, unpack
from digenrl.models.pipeline import JOINT_ATTENTION, PipelineModel, decode_pictures, quiet

with quiet():
    from diffusers import FluxPipeline


class FluxModel(PipelineModel):
    """One FLUX.1 checkpoint."""

    family = "flux"
    pipeline_class = FluxPipeline
    #: Flow-GRPO's list for FLUX: attention of both kinds of blocks, feed-forward layers of the joint ones.
    lora_targets = (
        *JOINT_ATTENTION,
        "ff.net.0.proj",
        "ff.net.2",
        "ff_context.net.0.proj",
        "ff_context.net.2",
    )
    default_tokens = 512

    def _encode(self, prompts: list[str]) -> Embeddings:
        """`prompt_embeds` (B, L, C) of T5, padded to its length without a mask, and `pooled_prompt_embeds` (B, P)."""
        embeds, pooled, _ = self.pipeline.encode_prompt(prompts, device=self.device, max_sequence_length=self.tokens)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def blank_embeddings(self, prompts: int) -> Embeddings:
        """See PipelineModel."""
        config = self.pipeline.transformer.config
        return self._blank(
            prompts,
            prompt_embeds=(self.tokens, config.joint_attention_dim),
            pooled_prompt_embeds=(config.pooled_projection_dim,),
        )

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Velocity (B, C, h, w) in the dtype of `latents`.

        The transformer takes timestep and guidance unscaled, and multiplies both by 1000.
        """
        height, width = latents.shape[-2:]
        text = embeddings["prompt_embeds"].to(self._dtype)
        distilled = self.pipeline.transformer.config.guidance_embeds
        tokens: torch.Tensor = self._transform(
            hidden_states=pack(latents).to(self._dtype),
            # In this order, as the pipeline does: the quotient is not sigma to the last bit.
            timestep=self._timestep(sigma) / 1000,
            guidance=torch.full_like(sigma, guidance_scale, dtype=torch.float32) if distilled else None,
            pooled_projections=embeddings["pooled_prompt_embeds"].to(self._dtype),
            encoder_hidden_states=text,
            txt_ids=text.new_zeros(text.shape[1], 3),
            img_ids=_positions(height // 2, width // 2).to(text),
            return_dict=False,
        )[0]
        return unpack(tokens.to(latents.dtype), height, width)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        return decode_pictures(self.pipeline.vae, latents)


def _positions(rows: int, columns: int) -> torch.Tensor:
    """(rows * columns, 3): 0, row and column of every token."""
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.stack([torch.zeros_like(row), row, column], dim=-1).flatten(0, 1)
