"""The untrained parts of the tiny StableDiffusion3Pipeline: stock classes, 1.2 million parameters in all.

    build_vae()          AutoencoderKL, 12 x 24 RGB -> 4 latent channels of 6 x 12
    build_pipeline(vae)  that VAE with two CLIP text encoders, their tokenizers, the MMDiT and the scheduler
    CountedPadding       attention in which one padding token stands for many

There is no T5 (`text_encoder_3` is None). The stock pipeline then appends `max_sequence_length` zero vectors to the
context, 256 by default; leaving them out is twelve times faster. SD3 masks nothing, so the flow has to be trained to
read prompts either way, and CountedPadding does that at the cost of one token.
"""

from __future__ import annotations

import string
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch.nn import functional as F
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer

#: Tokens per prompt: start, three digits, end.
MAX_TOKENS = 5
#: Text width per encoder; the MMDiT sees both side by side.
TEXT_WIDTH = 32
#: In this order: pad 0, end 1, start 2, unknown 3. An end token of 2 would switch transformers to legacy pooling.
SPECIAL_TOKENS = ("<pad>", "</s>", "<s>", "<unk>")
#: CLIP initialises embeddings with std 0.02, and SD3 reads a hidden state that no final norm has scaled: at this
#: width the context would be so close to zero that conditioning never starts.
EMBEDDING_SCALE = 30.0


def build_vae() -> AutoencoderKL:
    """The image autoencoder, downsampling by 2."""
    vae: AutoencoderKL = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=24,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    return vae


def build_tokenizer(max_tokens: int = MAX_TOKENS) -> CLIPTokenizer:
    """One token per character: CLIP's byte-pair tokenizer with a vocabulary of characters and no merges.

    CLIP marks the last character of a word with `</w>`, and takes every digit for a word.

    Args:
        max_tokens: to which prompts are padded and cut, start and end included.
    """
    end = "</w>"
    characters = [c + end for c in string.digits]
    characters += [*string.ascii_lowercase, *(c + end for c in string.ascii_lowercase)]
    pad, eos, bos, unk = SPECIAL_TOKENS
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])},
        merges=[],
        pad_token=pad,
        eos_token=eos,
        bos_token=bos,
        unk_token=unk,
        model_max_length=max_tokens,
    )


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    """A two-layer CLIP text encoder with embeddings large enough to condition on."""
    encoder = CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=MAX_TOKENS,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )
    embeddings = encoder.text_model.embeddings
    with torch.no_grad():
        embeddings.token_embedding.weight.mul_(EMBEDDING_SCALE)
        embeddings.position_embedding.weight.mul_(EMBEDDING_SCALE)
        encoder.text_projection.weight.normal_(std=TEXT_WIDTH**-0.5)
    return encoder


def build_transformer() -> SD3Transformer2DModel:
    """The MMDiT: 3 layers of 4 x 24, 18 image tokens for a 12 x 24 picture."""
    transformer: SD3Transformer2DModel = SD3Transformer2DModel(
        sample_size=12,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        num_attention_heads=4,
        attention_head_dim=24,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=96,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=6,
        qk_norm="rms_norm",
    )
    return transformer


def build_pipeline(vae: AutoencoderKL) -> StableDiffusion3Pipeline:
    """A complete stock pipeline around `vae`; text encoders and transformer are freshly initialised."""
    tokenizer, tokenizer_2 = build_tokenizer(), build_tokenizer()
    pipeline_class: Any = StableDiffusion3Pipeline  # its annotations do not admit the None it supports
    pipeline: StableDiffusion3Pipeline = pipeline_class(
        vae=vae,
        text_encoder=build_text_encoder(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=build_text_encoder(tokenizer_2),
        tokenizer_2=tokenizer_2,
        text_encoder_3=None,
        tokenizer_3=None,
        transformer=build_transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )
    return pipeline


class CountedPadding:
    """SD3's joint attention, where the last context token counts as any number of copies of itself.

    Context tokens have no positions, so N equal ones stay equal through all layers and a softmax over them is a
    softmax over one with log N added to its logit. For training only; the saved pipeline has stock attention.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        padding_counts: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend over B samples of I image and L context tokens.

        Args:
            attn: the layer, a diffusers Attention.
            hidden_states: (B, I, C).
            encoder_hidden_states: (B, L, C), the padding token last.
            padding_counts: (B,) float32, how many padding tokens there are; may be 0.
            attention_mask: unused, as in SD3.

        Returns:
            (B, I, C) and (B, L, C).
        """

        def heads(x: torch.Tensor) -> torch.Tensor:
            return torch.unflatten(x, -1, (attn.heads, -1)).transpose(1, 2)

        image, text = hidden_states, encoder_hidden_states
        query = [attn.norm_q(heads(attn.to_q(image))), attn.norm_added_q(heads(attn.add_q_proj(text)))]
        key = [attn.norm_k(heads(attn.to_k(image))), attn.norm_added_k(heads(attn.add_k_proj(text)))]
        value = [heads(attn.to_v(image)), heads(attn.add_v_proj(text))]
        bias = F.pad(padding_counts.log()[:, None], (image.shape[1] + text.shape[1] - 1, 0))
        mixed = F.scaled_dot_product_attention(
            torch.cat(query, 2), torch.cat(key, 2), torch.cat(value, 2), attn_mask=bias[:, None, None, :]
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        image, text = mixed[:, : image.shape[1]], mixed[:, image.shape[1] :]
        return attn.to_out[0](image), text if attn.context_pre_only else attn.to_add_out(text)
