"""Prompts of different lengths in one batch."""

from __future__ import annotations

import torch

from digenrl.models.base import Embeddings
from digenrl.models.embeddings import EmbeddingCache


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
