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
from torch.nn.functional import pad

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
        """Embeddings of B >= 1 prompts, batch axis B.

        Where a family's prompts differ in length, the shorter ones are padded with zeros at the end of the token axis,
        masks included: 0 is padding there.
        """
        rows = [self._row(prompt) for prompt in prompts]
        return {name: _batch([row[name] for row in rows]) for name in rows[0]}

    def _row(self, prompt: str) -> Embeddings:
        row = self._rows.get(prompt)
        if row is None:
            row = self._rows[prompt] = self._model.encode([prompt])
            if len(self._rows) > self._capacity:
                self._rows.popitem(last=False)
        self._rows.move_to_end(prompt)
        return row


def _batch(rows: list[torch.Tensor]) -> torch.Tensor:
    """(B, ...) from B tensors (1, L, ...) or (1, P) of one prompt each."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([pad(row, (0, 0) * (row.ndim - 2) + (0, longest - row.shape[1])) for row in rows])


def select(embeddings: Embeddings, rows: torch.Tensor) -> Embeddings:
    """Rows (N,) int64 of the batch axis, with repeats."""
    return {name: tensor.index_select(0, rows.to(tensor.device)) for name, tensor in embeddings.items()}
