"""A tiny Wan2.1: two blocks, VAE factors 8 and 4."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from digenrl.models.tiny.parts import HEAD_AXES, HEADS, WIDTH, scaled, scheduler_of, t5_tokenizer


def build() -> Any:
    """A WanPipeline with freshly drawn weights."""
    tokenizer = t5_tokenizer()
    umt5 = UMT5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=1, num_heads=2)
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=scaled(UMT5EncoderModel(umt5)),
        vae=AutoencoderKLWan(base_dim=4, num_res_blocks=1),
        scheduler=scheduler_of("wan"),
        transformer=WanTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=sum(HEAD_AXES),
            text_dim=WIDTH,
            freq_dim=WIDTH,
            ffn_dim=2 * WIDTH,
            num_layers=2,
            rope_max_seq_len=64,
        ),
    )
