"""Prompt embeddings: encoded once, one prompt at a time, and gathered into batches.

    EmbeddingCache   text -> embeddings; on disk too, by content hash, where the encoders are to be freed
    select           rows of a batch, in any order and as often as wanted

A prompt is encoded alone because the same text in another batch can differ in the last bits, and which prompts share
a batch must not matter.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from digenrl.models.base import Embeddings, FlowModel


class EmbeddingCache:
    """Embeddings of the prompts used last.

    Args:
        model: encodes.
        capacity_bytes: of embeddings kept in memory; the least recently used ones go first.
    """

    def __init__(self, model: FlowModel, capacity_bytes: int = 2**30) -> None:
        self._model = model
        self._capacity_bytes = capacity_bytes
        self._held_bytes = 0
        self._rows: OrderedDict[str, Embeddings] = OrderedDict()
        self._folder: Path | None = None

    def prepare(self, prompts: Sequence[str]) -> None:
        """Encode all prompts there will be, onto disk, and free the model's text encoders.

        A file's name is a hash of encoders and prompt: other processes of the machine, and later runs, find it.
        """
        key = self._model.encoding_key()
        self._folder = cache_folder() / key
        self._folder.mkdir(parents=True, exist_ok=True)
        for prompt in dict.fromkeys(prompts):
            path = self._path(prompt)
            if not path.is_file():
                _save(self._model.encode([prompt]), path)
        self._model.free_text_encoders()

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
            row = self._rows[prompt] = self._found(prompt)
            self._held_bytes += _bytes_of(row)
            while self._held_bytes > self._capacity_bytes and len(self._rows) > 1:
                self._held_bytes -= _bytes_of(self._rows.popitem(last=False)[1])
        self._rows.move_to_end(prompt)
        return row

    def _found(self, prompt: str) -> Embeddings:
        if self._folder is not None and self._path(prompt).is_file():
            return load_file(self._path(prompt), device=str(self._model.device))
        return self._model.encode([prompt])

    def _path(self, prompt: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(prompt.encode()).hexdigest()}.safetensors"


def cache_folder() -> Path:
    """Where embeddings are kept: below $XDG_CACHE_HOME (~/.cache). It may be removed at any time."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "digenrl" / "embeddings"


def _save(embeddings: Embeddings, path: Path) -> None:
    """Whole or not at all: another process may be writing the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        save_file({name: tensor.cpu().contiguous() for name, tensor in embeddings.items()}, written)
        written.replace(path)


def _bytes_of(row: Embeddings) -> int:
    return sum(tensor.nbytes for tensor in row.values())


def _batch(rows: list[torch.Tensor]) -> torch.Tensor:
    """(B, ...) from B tensors (1, L, ...) or (1, P) of one prompt each."""
    longest = max(row.shape[1] for row in rows)
    return torch.cat([pad(row, (0, 0) * (row.ndim - 2) + (0, longest - row.shape[1])) for row in rows])


def select(embeddings: Embeddings, rows: torch.Tensor) -> Embeddings:
    """Rows (N,) int64 of the batch axis, with repeats."""
    return {name: tensor.index_select(0, rows.to(tensor.device)) for name, tensor in embeddings.items()}
