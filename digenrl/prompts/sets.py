"""The prompts of a run: those it trains on and those it is evaluated on.

    load_data(config.data, check) -> RunPrompts     both
    load_prompts(sources, check) -> PromptSet       one set, from one or several sources
    PromptSet                                       a sequence of records that are read when they are asked for

A prompt is held out by the hash of its id alone, so it stays on its side when lines are added or moved.
"""

from __future__ import annotations

import hashlib
import operator
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import overload

import numpy as np
from numpy.typing import NDArray

from digenrl.config.data import DataConfig, PromptSource, sources_of
from digenrl.prompts.errors import PromptError
from digenrl.prompts.files import Check, PromptFile, prompt_file
from digenrl.rewards.base import PromptRecord

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """What a set has of one source.

    Attributes:
        file: the source.
        positions: (N,) of the records in it.
    """

    file: PromptFile
    positions: Positions


class PromptSet(Sequence[PromptRecord]):
    """Prompts in order, every id once. Only an index of them is in memory; see `PromptFile`.

    Args:
        parts: of one or several sources.
        order: (N,) which record of the parts, one after the other, is the i-th; None: as they are.

    Raises:
        PromptError: an id is given twice.
    """

    def __init__(self, parts: Sequence[Part], order: Positions | None = None) -> None:
        self._parts = tuple(parts)
        self._ends = list(accumulate(len(part.positions) for part in self._parts))
        self._order = order
        self.keys = np.concatenate([part.file.keys[part.positions] for part in self._parts])
        self._occurrences = self._count()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Prompts of each source."""
        return tuple(len(part.positions) for part in self._parts)

    @property
    def weights(self) -> tuple[float, ...]:
        """Weight of each source."""
        return tuple(part.file.source.weight for part in self._parts)

    @property
    def fingerprint(self) -> str:
        """SHA-256 that changes with any record and with which records of the sources there are."""
        content = hashlib.sha256()
        for part in self._parts:
            content.update(f"{part.file.fingerprint}/{len(part.positions)}/".encode())
        return content.hexdigest()

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> PromptRecord: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[PromptRecord, ...]: ...
    def __getitem__(self, index: int | slice) -> PromptRecord | tuple[PromptRecord, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        index = self._stored(index)
        part, position = self._find(index)
        record = part.file.record(position)
        occurrence = self._occurrences[index]
        return record if occurrence == 1 else replace(record, uid=f"{record.uid}-{occurrence}")

    def place(self, index: int) -> str:
        """Where a record is, for a sentence: `FILE, line N`."""
        part, position = self._find(self._stored(index))
        return part.file.place(position)

    def shared_with(self, other: PromptSet) -> list[tuple[int, int]]:
        """Indices, here and there, of prompts that both have."""
        _, here, there = np.intersect1d(self.keys, other.keys, return_indices=True)
        pairs = [(self._shown(int(i)), other._shown(int(j))) for i, j in zip(here, there, strict=True)]
        return [(i, j) for i, j in pairs if self[i].uid == other[j].uid]  # equal keys are no proof

    def _stored(self, index: int) -> int:
        index = operator.index(index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        index %= len(self)
        return index if self._order is None else int(self._order[index])

    def _shown(self, stored: int) -> int:
        return stored if self._order is None else int(np.flatnonzero(self._order == stored)[0])

    def _find(self, stored: int) -> tuple[Part, int]:
        number = bisect_right(self._ends, stored)
        part = self._parts[number]
        return part, int(part.positions[stored - self._ends[number] + len(part.positions)])

    def _count(self) -> NDArray[np.int32]:
        """(N,) the how-manieth of the prompts without an id and with the same text each is; 1 where an id was given."""
        derived = np.concatenate([part.file.derived[part.positions] for part in self._parts])
        order = np.lexsort((derived, self.keys))  # stable: equal ones stay in the order of the files
        keys, unnamed = self.keys[order], derived[order]
        same = np.zeros(len(order), dtype=bool)
        same[1:] = (keys[1:] == keys[:-1]) & (unnamed[1:] == unnamed[:-1])
        self._refuse_repeated(order[:-1][(same & ~unnamed)[1:]], order[same & ~unnamed])
        places = np.arange(len(order))
        began = np.maximum.accumulate(np.where(same, 0, places))
        counts = np.ones(len(order), dtype=np.int32)
        counts[order] = np.where(unnamed, places - began + 1, 1)
        return counts

    def _refuse_repeated(self, earlier: Positions, later: Positions) -> None:
        """Refuse the first given id that was given before. Equal keys are no proof."""
        for second, first in sorted(zip(later.tolist(), earlier.tolist(), strict=True)):
            (part, position), (before, place) = self._find(second), self._find(first)
            uid = part.file.record(position).uid
            if uid == before.file.record(place).uid:
                where = before.file.place(place)
                if part.file is before.file:
                    where = where.removeprefix(f"{part.file.source.path}, ")
                raise PromptError(
                    f"{part.file.place(position)}: the id {uid!r} was already used in {where}; expected every id once"
                )


@dataclass(frozen=True)
class RunPrompts:
    """Prompts of a run.

    Attributes:
        train: to train on.
        held_out: to evaluate on, in the order in which evaluations take them; empty if there are none.
    """

    train: PromptSet
    held_out: Sequence[PromptRecord] = ()


def load_prompts(given: str | Sequence[PromptSource], check: Check | None = None) -> PromptSet:
    """Read a set of prompts.

    Args:
        given: a path or `package:NAME`, or several sources.
        check: asked about every record.

    Raises:
        PromptError: a source is not there, or a record of it is wrong.
    """
    sources = sources_of(given if isinstance(given, str) else tuple(given))
    return PromptSet([_whole(prompt_file(source, check)) for source in sources])


def load_data(data: DataConfig, check: Check | None = None) -> RunPrompts:
    """Read the prompts of a run.

    Raises:
        PromptError: see `load_prompts`; or a share leaves nothing to train on or nothing to evaluate.
    """
    if data.held_out_share == 0:
        train = load_prompts(data.prompts, check)
        return RunPrompts(train, load_held_out(data, check) if data.holds_out else ())
    return _split(data, check)


def load_held_out(data: DataConfig, check: Check | None = None) -> PromptSet:
    """Read the prompts for evaluation; there must be some (`data.holds_out`).

    Those of several sources take turns by weight, so that the first ones stand for all.
    """
    if data.held_out is None:
        held_out = _split(data, check).held_out
        assert isinstance(held_out, PromptSet)
        return held_out
    parts = [_whole(prompt_file(source, check)) for source in sources_of(data.held_out)]
    return PromptSet(parts, _in_turn(parts) if len(parts) > 1 else None)


def _split(data: DataConfig, check: Check | None) -> RunPrompts:
    """Cut the sources in two. Held-out prompts come in the order of their hashes: any prefix is a fair sample."""
    files = [prompt_file(source, check) for source in sources_of(data.prompts)]
    bound = np.uint64(data.held_out_share * 2**64)
    train = [Part(file, np.flatnonzero(file.keys >= bound)) for file in files]
    chosen = [np.flatnonzero(file.keys < bound) for file in files]
    held_out = [Part(f, c[np.argsort(f.keys[c], kind="stable")]) for f, c in zip(files, chosen, strict=True)]
    total = sum(map(len, files))
    for part in train:
        if not len(part.positions):
            raise PromptError(
                f"{part.file.source.path}: held_out_share={data.held_out_share:g} leaves none of its "
                f"{len(part.file)} prompts to train on; use a smaller share"
            )
    if not any(len(part.positions) for part in held_out):
        raise PromptError(
            f"held_out_share={data.held_out_share:g} holds out none of its {total} prompts; use a larger share, or 0"
        )
    return RunPrompts(PromptSet(train), PromptSet(held_out, _in_turn(held_out) if len(held_out) > 1 else None))


def _whole(file: PromptFile) -> Part:
    return Part(file, np.arange(len(file)))


def _in_turn(parts: Sequence[Part]) -> Positions:
    """An order in which any prefix has of every source what its weight says, while there are enough."""
    turns = [(np.arange(len(part.positions)) + 0.5) / part.file.source.weight for part in parts]
    return np.argsort(np.concatenate(turns), kind="stable")
