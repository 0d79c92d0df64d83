"""Prompts of different lengths in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.config import ModelConfig
from digenrl.models.base import Embeddings
from digenrl.models.embeddings import EmbeddingCache, cache_folder
from digenrl.models.pipeline import PipelineModel
from digenrl.models.registry import load_model


class _Words:
    """One token per word, nothing padded; stands in for a model."""

    def encode(self, prompts: list[str]) -> Embeddings:
        (prompt,) = prompts
        lengths = torch.tensor([float(len(word)) for word in prompt.split()])
        return {
            "embeds": lengths[None, :, None].expand(1, -1, 3),
            "mask": torch.ones((1, len(lengths)), dtype=torch.long),
            "pooled": lengths.mean().reshape(1, 1),
        }


def test_shorter_prompts_are_padded_with_zeros_at_the_end() -> None:
    found = EmbeddingCache(_Words()).encode(["a bcd", "ab", "a b c"])
    assert found["embeds"][..., 0].tolist() == [[1, 3, 0], [2, 0, 0], [1, 1, 1]]
    assert found["embeds"].shape == (3, 3, 3)
    assert found["mask"].tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]] and found["mask"].dtype == torch.long
    assert found["pooled"].tolist() == [[2.0], [2.0], [1.0]]


def test_a_batch_of_one_length_is_not_padded() -> None:
    found = EmbeddingCache(_Words()).encode(["a bcd", "ab c"])
    assert found["embeds"].shape == (2, 2, 3) and bool(found["mask"].all())


class _Counted(_Words):
    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, prompts: list[str]) -> Embeddings:
        self.encoded += prompts
        return super().encode(prompts)


def test_what_was_used_last_is_kept_up_to_the_capacity() -> None:
    model = _Counted()
    cache = EmbeddingCache(model, capacity_bytes=60)  # a word takes 12 bytes, 8 of mask and 4 pooled
    for prompt in ("a", "b", "a", "c", "a"):
        cache.encode([prompt])
    assert model.encoded == ["a", "b", "c"]
    cache.encode(["b"])
    assert model.encoded == ["a", "b", "c", "b"]


def test_text_encoders_are_freed_and_embeddings_found_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = ModelConfig(text_encoders="free")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = load_model(checkpoint), load_model(checkpoint)
    assert isinstance(first, PipelineModel) and first.frees_text_encoders
    expected = EmbeddingCache(first).encode(["042", "917"])
    cache = EmbeddingCache(first)
    cache.prepare(["042", "917", "042"])
    assert first.text_encoders == {} and len(list(cache_folder().glob("*/*"))) == 2
    for name, tensor in cache.encode(["042", "917"]).items():
        assert torch.equal(tensor, expected[name])
    with pytest.raises(RuntimeError, match=r"'123' cannot be encoded.*model.text_encoders=keep"):
        cache.encode(["123"])

    def encode(prompts: list[str]) -> Embeddings:
        raise AssertionError(f"{prompts} are on disk")

    monkeypatch.setattr(second, "encode", encode)
    EmbeddingCache(second).prepare(["917", "042"])


def test_other_encoders_have_other_names(tmp_path: Path) -> None:
    model = load_model(ModelConfig())
    assert isinstance(model, PipelineModel) and not model.frees_text_encoders
    before = model.encoding_key()
    assert load_model(ModelConfig()).encoding_key() == before
    next(model.text_encoders["text_encoder"].parameters()).data += 0.01
    assert model.encoding_key() != before
