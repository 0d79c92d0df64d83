"""Parts that several tiny checkpoints have: schedulers, tokenizers, text encoders."""

from __future__ import annotations

import json
import re
import string
from typing import Any

import diffusers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Tokenizer

from digenrl.data.tiny_sd3_parts import build_tokenizer
from digenrl.models.published import published

#: Width of all text embeddings and transformers.
WIDTH = 32
#: Heads of the transformers, and how the 16 numbers of one are shared between time, row and column.
HEADS = 2
HEAD_AXES = (4, 6, 6)


def scheduler_of(family: str) -> Any:
    """The scheduler of the published checkpoint."""
    config = published(family).scheduler
    return getattr(diffusers, config["_class_name"]).from_config(config)


def clip_parts() -> tuple[CLIPTokenizer, CLIPTextModel]:
    """CLIP's tokenizer, one token per character, at its published length, and a text encoder."""
    tokenizer = build_tokenizer(max_tokens=77)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=77,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return tokenizer, scaled(CLIPTextModel(config))


def t5_tokenizer() -> T5Tokenizer:
    """One token per character: T5's unigram tokenizer with a vocabulary of characters."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    characters = [("▁", -2.0), *((c, -2.0) for c in string.ascii_letters + string.digits + string.punctuation)]
    return T5Tokenizer(vocab=[*special, *characters], extra_ids=0)


def byte_pairs(text: str, marks: tuple[str, ...], pattern: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a byte-level tokenizer: every word of `text` is one token, other text is in bytes.

    The published tokenizers know every word of their prompt templates, and pipelines cut off a fixed number of tokens.

    Args:
        text: the prompt template.
        marks: special tokens, which get the last numbers.
        pattern: what separates words.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=2000, min_frequency=1, show_progress=False, initial_alphabet=alphabet)
    pieces = re.split("|".join(re.escape(mark) for mark in (*marks, "{}")), text)
    tokenizer.train_from_iterator(pieces, trainer=trainer)
    model = json.loads(tokenizer.to_str())["model"]
    vocabulary: dict[str, int] = model["vocab"]
    vocabulary |= {mark: len(vocabulary) + i for i, mark in enumerate(marks)}
    return vocabulary, [(left, right) for left, right in model["merges"]]


def scaled(encoder: Any) -> Any:
    """A text encoder with embeddings large enough to condition on: freshly drawn ones are all nearly 0."""
    encoder.get_input_embeddings().weight.data.normal_()
    return encoder
