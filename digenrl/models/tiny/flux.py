"""A tiny FLUX.1: one joint and one single block, VAE factor 8."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKL, FluxPipeline, FluxTransformer2DModel
from transformers import T5Config, T5EncoderModel

from digenrl.models.tiny.parts import HEAD_AXES, HEADS, WIDTH, clip_parts, scaled, scheduler_of, t5_tokenizer


def build() -> Any:
    """A FluxPipeline with freshly drawn weights."""
    tokenizer, text_encoder = clip_parts()
    tokenizer_2 = t5_tokenizer()
    t5 = T5Config(vocab_size=len(tokenizer_2), d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=1, num_heads=2)
    return FluxPipeline(
        scheduler=scheduler_of("flux"),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=16,
            norm_num_groups=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        text_encoder_2=scaled(T5EncoderModel(t5)),
        tokenizer_2=tokenizer_2,
        transformer=FluxTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=sum(HEAD_AXES),
            num_attention_heads=HEADS,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            guidance_embeds=True,
            axes_dims_rope=HEAD_AXES,
        ),
    )
