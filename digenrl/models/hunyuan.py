"""HunyuanVideo: HunyuanVideoPipeline behind the FlowModel protocol.

The checkpoint is distilled to be guided: the guidance scale, times 1000, is an input of its transformer, in rollout
and training alike, and there is no second forward pass.
"""

from __future__ import annotations

import torch

from digenrl.models.base import Embeddings
from digenrl.models.pipeline import PipelineModel, quiet

with quiet():
    from diffusers import HunyuanVideoPipeline


class HunyuanModel(PipelineModel):
    """One HunyuanVideo checkpoint."""

    family = "hunyuan"
    pipeline_class = HunyuanVideoPipeline
    #: DanceGRPO's list. It includes the attention of the text refiner.
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    default_tokens = 256

    def _encode(self, prompts: list[str]) -> Embeddings:
        """`prompt_embeds` (B, L, C) of LLaMA, less the template, `prompt_attention_mask` (B, L), and CLIP's
        `pooled_prompt_embeds` (B, P)."""
        embeds, pooled, mask = self.pipeline.encode_prompt(prompts, device=self.device, max_sequence_length=self.tokens)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled, "prompt_attention_mask": mask}

    def blank_embeddings(self, prompts: int) -> Embeddings:
        """See PipelineModel."""
        config = self.pipeline.transformer.config
        found = self._blank(
            prompts,
            prompt_embeds=(self.tokens, config.text_embed_dim),
            pooled_prompt_embeds=(config.pooled_projection_dim,),
        )
        mask = torch.ones((prompts, self.tokens), dtype=torch.long, device=self.device)
        return {**found, "prompt_attention_mask": mask}

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Velocity (B, C, f, h, w) in the dtype of `latents`.

        Unlike FLUX's, this transformer takes timestep and guidance as they are: the caller multiplies by 1000, the
        guidance in the transformer's dtype.
        """
        output: torch.Tensor = self._transform(
            hidden_states=latents.to(self._dtype),
            timestep=self._timestep(sigma),
            encoder_hidden_states=embeddings["prompt_embeds"].to(self._dtype),
            encoder_attention_mask=embeddings["prompt_attention_mask"].to(self._dtype),
            pooled_projections=embeddings["pooled_prompt_embeds"].to(self._dtype),
            guidance=torch.full_like(sigma, guidance_scale, dtype=self._dtype) * 1000.0,
            return_dict=False,
        )[0]
        return output.to(latents.dtype)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipeline.vae
        videos: torch.Tensor = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return videos
