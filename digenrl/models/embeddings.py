"""Prompt embeddings: encoded once, one prompt at a time, and gathered into batches.

    EmbeddingCache   text -> embeddings
    select           rows of a batch, in any order and as often as wanted

A prompt is encoded alone because the same text in another batch can differ in the last bits, and which prompts share
a batch must not matter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch

from digenrl.models.base import Embeddings, FlowModel


class EmbeddingCache:
    """Embeddings of the prompts used last.

    Args:
        model: encodes.
        capacity: prompts kept; the least recently used one goes first.
    """

    def __init__(self, model: FlowModel, capacity: int = 4096) -> None:
        self._model = model
        self._capacity = capacity
        self._rows: OrderedDict[str, Embeddings] = OrderedDict()

    def encode(self, prompts: Sequence[str]) -> Embeddings:
        """Embeddings of B >= 1 prompts, batch axis B."""
        rows = [self._row(prompt) for prompt in prompts]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _row(self, prompt: str) -> Embeddings:
        row = self._rows.get(prompt)
        if row is None:
            row = self._rows[prompt] = self._model.encode([prompt])
            if len(self._rows) > self._capacity:
                self._rows.popitem(last=False)
        self._rows.move_to_end(prompt)
        return row


def select(embeddings: Embeddings, rows: torch.Tensor) -> Embeddings:
    """Rows (N,) int64 of the batch axis, with repeats."""
    return {name: tensor.index_select(0, rows.to(tensor.device)) for name, tensor in embeddings.items()}
