"""What a model's tokenizers make of a prompt that a person typed."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from digenrl.models.base import FlowModel


def prompt_notes(model: FlowModel, prompt: str) -> list[str]:
    """Sentences about what of the prompt the model does not see; empty if it sees everything.

    A character counts as unseen if no tokenizer of the pipeline knows it, a tail if every one of them cuts it off.
    """
    tokenizers = tokenizers_of(model)
    if not tokenizers:
        return []
    notes = []
    unknown = set.intersection(*(_unknown(tokenizer, prompt) for tokenizer in tokenizers))
    if unknown:
        characters = " ".join(sorted(unknown, key=prompt.index))
        notes.append(f"prompt {prompt!r}: the model's tokenizers do not know: {characters}")
    read = [_room(tokenizer) for tokenizer in tokenizers]
    tokens = [len(_encode(tokenizer, prompt)) for tokenizer in tokenizers]
    if all(count > room for count, room in zip(tokens, read, strict=True)):
        notes.append(f"prompt {prompt!r}: the model reads its first {max(read)} tokens of {max(tokens)}")
    return notes


def tokenizers_of(model: FlowModel) -> list[PreTrainedTokenizerBase]:
    """The fast tokenizers of the model's pipeline: those that say where each token came from."""
    components = getattr(getattr(model, "pipeline", None), "components", {})
    return [part for part in components.values() if isinstance(part, PreTrainedTokenizerBase) and part.is_fast]


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> Sequence[int]:
    ids: list[int] = tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def _room(tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of a prompt that fit beside the special ones."""
    return int(tokenizer.model_max_length) - tokenizer.num_special_tokens_to_add()


def _unknown(tokenizer: PreTrainedTokenizerBase, prompt: str) -> set[str]:
    """Characters that became the unknown token."""
    encoded = tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return {c for token, (first, last) in pairs if token == tokenizer.unk_token_id for c in prompt[first:last]}
