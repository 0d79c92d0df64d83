"""A tiny Qwen-Image: two joint blocks, VAE factor 8, and a tokenizer that cuts the prompt template as the real one."""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from digenrl.models.published import published
from digenrl.models.tiny.parts import HEAD_AXES, HEADS, WIDTH, byte_pairs, scaled, scheduler_of

_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build() -> Any:
    """A QwenImagePipeline with freshly drawn weights."""
    tokenizer = _tokenizer()
    return QwenImagePipeline(
        scheduler=scheduler_of("qwen"),
        vae=AutoencoderKLQwenImage(base_dim=4, num_res_blocks=1),
        text_encoder=scaled(_text_encoder(len(tokenizer))),
        tokenizer=tokenizer,
        transformer=QwenImageTransformer2DModel(
            num_layers=2,
            attention_head_dim=sum(HEAD_AXES),
            num_attention_heads=HEADS,
            joint_attention_dim=WIDTH,
            axes_dims_rope=HEAD_AXES,
        ),
    )


def _tokenizer() -> Qwen2Tokenizer:
    vocabulary, merges = byte_pairs(published("qwen").prompt_template or "", _MARKS, PRETOKENIZE_REGEX)
    pairs: Any = merges  # annotated as strings, but handed on to what takes pairs
    return Qwen2Tokenizer(vocab=vocabulary, merges=pairs, additional_special_tokens=list(_MARKS[1:]))


def _text_encoder(vocabulary: int) -> Qwen2_5_VLForConditionalGeneration:
    text = {
        "vocab_size": vocabulary,
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "max_position_embeddings": 2048,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "depth": 1,
        "hidden_size": WIDTH,
        "intermediate_size": WIDTH,
        "num_heads": HEADS,
        "out_hidden_size": WIDTH,
    }
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
