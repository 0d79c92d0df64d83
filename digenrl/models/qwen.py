"""Qwen-Image: QwenImagePipeline behind the FlowModel protocol.

Guidance is the pipeline's "true CFG": against the prompt " ", in a second forward pass, the result scaled back to the
norm of the unguided velocity. Prompts are not padded to a fixed length: a batch is as long as its longest prompt, and
a mask says what is padding.
"""

from __future__ import annotations

import torch

from digenrl.models.base import Embeddings
from digenrl.models.packing import pack, unpack
from digenrl.models.pipeline import JOINT_ATTENTION, PipelineModel, quiet, unstandardised

with quiet():
    from diffusers import QwenImagePipeline


class QwenModel(PipelineModel):
    """One Qwen-Image checkpoint."""

    family = "qwen"
    pipeline_class = QwenImagePipeline
    #: Flow-GRPO's list for Qwen-Image: attention and feed-forward layers of both streams.
    lora_targets = (
        *JOINT_ATTENTION,
        *(f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")),
    )
    negative_prompt = " "
    default_tokens = 512

    def _encode(self, prompts: list[str]) -> Embeddings:
        """`prompt_embeds` (B, L, C) and `prompt_embeds_mask` (B, L) int64, 1 where a token is no padding."""
        embeds, mask = self.pipeline.encode_prompt(prompts, device=self.device, max_sequence_length=self.tokens)
        if mask is None:  # the pipeline's word for: no padding
            mask = embeds.new_ones(embeds.shape[:2], dtype=torch.long)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": mask}

    def blank_embeddings(self, prompts: int) -> Embeddings:
        """See PipelineModel."""
        return self._blank(prompts, prompt_embeds=(self.tokens, self.pipeline.transformer.config.joint_attention_dim))

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Velocity (B, C, h, w) in the dtype of `latents`."""
        tokens = self._forward(latents, sigma, embeddings, "")
        if guidance_scale > 1:
            tokens = true_cfg(tokens, self._forward(latents, sigma, embeddings, "negative_"), guidance_scale)
        return unpack(tokens, *latents.shape[-2:])

    def _forward(self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, prefix: str) -> torch.Tensor:
        """(B, S, 4C) packed velocity for one kind of prompts."""
        mask = embeddings.get(f"{prefix}prompt_embeds_mask")  # None: there is no padding
        height, width = latents.shape[-2:]
        output: torch.Tensor = self._transform(
            hidden_states=pack(latents).to(self._dtype),
            # In this order, as the pipeline does: the quotient is not sigma to the last bit.
            timestep=self._timestep(sigma) / 1000,
            encoder_hidden_states=embeddings[f"{prefix}prompt_embeds"].to(self._dtype),
            encoder_hidden_states_mask=None if mask is None or bool(mask.all()) else mask,
            img_shapes=[[(1, height // 2, width // 2)]] * len(latents),
            return_dict=False,
        )[0]
        return output.to(latents.dtype)

    def _decode(self, latents: torch.Tensor) -> torch.Tensor:
        vae = self.pipeline.vae  # of videos: a picture is one frame
        pictures: torch.Tensor = vae.decode(unstandardised(latents.unsqueeze(2), vae.config), return_dict=False)[0]
        return pictures


def true_cfg(conditional: torch.Tensor, unconditional: torch.Tensor, scale: float) -> torch.Tensor:
    """Classifier-free guidance that keeps every token's norm: p |c| / |p| with p = u + scale (c - u).

    Norms are over the last axis. Gradients flow through them.

    Args:
        conditional: c, (B, S, C) velocity under the prompts.
        unconditional: u, the same under the negative prompt.
        scale: of the guidance.
    """
    guided = unconditional + scale * (conditional - unconditional)
    kept: torch.Tensor = torch.linalg.vector_norm(conditional, dim=-1, keepdim=True)
    found: torch.Tensor = torch.linalg.vector_norm(guided, dim=-1, keepdim=True)
    return guided * (kept / found)
