"""A tiny HunyuanVideo: one joint and one single block, VAE factors 8 and 4, and a tokenizer that cuts the prompt
template as the real one.
"""

from __future__ import annotations

from typing import Any

from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoPipeline, HunyuanVideoTransformer3DModel
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

from digenrl.models.published import published
from digenrl.models.tiny.parts import HEAD_AXES, HEADS, WIDTH, byte_pairs, clip_parts, scaled, scheduler_of

_MARKS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
#: How LLaMA 3 cuts a text into what it then makes tokens of.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def build() -> Any:
    """A HunyuanVideoPipeline with freshly drawn weights."""
    tokenizer = _tokenizer()
    tokenizer_2, text_encoder_2 = clip_parts()
    llama = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=3,  # the pipeline takes the hidden states of the third from last
        num_attention_heads=HEADS,
    )
    return HunyuanVideoPipeline(
        text_encoder=scaled(LlamaModel(llama)),
        tokenizer=tokenizer,
        transformer=HunyuanVideoTransformer3DModel(
            num_attention_heads=HEADS,
            attention_head_dim=sum(HEAD_AXES),
            num_layers=1,
            num_single_layers=1,
            num_refiner_layers=1,
            text_embed_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            rope_axes_dim=HEAD_AXES,
        ),
        vae=AutoencoderKLHunyuanVideo(block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4),
        scheduler=scheduler_of("hunyuan"),
        text_encoder_2=text_encoder_2,
        tokenizer_2=tokenizer_2,
    )


def _tokenizer() -> PreTrainedTokenizerFast:
    """Not a LlamaTokenizer: given a vocabulary, transformers builds that one as LLaMA 2's, which is another kind."""
    vocabulary, merges = byte_pairs(published("hunyuan").prompt_template or "", _MARKS, _PATTERN)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    begin, *_, end = _MARKS
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, vocabulary[begin])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=begin,
        eos_token=end,
        pad_token=end,
        additional_special_tokens=list(_MARKS[1:3]),
        padding_side="right",
    )
