"""One source of prompts: an index of it in memory, the records on disk.

    prompt_file(source, check) -> PromptFile    reads all of it, unless that was done a moment ago
    PromptFile.record(position)                 reads one record again
    PromptFile.place(position)                  where that is, for a sentence

Of each prompt 21 bytes are kept: its offset, its line, 64 bits of its id, and whether that id was given.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from digenrl.config.data import PromptSource
from digenrl.config.errors import did_you_mean, nearest, shown
from digenrl.prompts.errors import PromptError
from digenrl.prompts.formats import STATE_FILE, Records, open_records
from digenrl.prompts.records import ID, key_of, record_of
from digenrl.rewards.base import PromptRecord

PACKAGE_PREFIX = "package:"
SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet")
_KINDS = f"expected a file ending in {', '.join(SUFFIXES)}, the directory of a Hugging Face dataset or package:NAME"

#: Files whose index is kept for the next who asks: a run looks at its prompts before it starts, and then starts.
_MOST_KEPT = 8
_kept: dict[tuple[PromptSource, int, int, int], PromptFile] = {}

#: Refuses a record by a ValueError that says why.
Check = Callable[[PromptRecord], None]


class PromptFile:
    """The prompts of one source, in the order of the file.

    Args:
        source: where, and how to read it.
        check: asked about every record.

    Attributes:
        keys: (N,) uint64, of the ids; equal texts without an id have equal ones.
        derived: (N,) whether a prompt came without an id.
        fingerprint: SHA-256 of all records.

    Raises:
        PromptError: the source is not there, or a record of it is wrong.
    """

    def __init__(self, source: PromptSource, check: Check | None = None) -> None:
        self.source = source
        path = _path_of(source.path)
        self._records: Records = open_records(path, source.path, source.text_key)
        starts, numbers, keys, derived = array("Q"), array("I"), array("Q"), array("B")
        content = hashlib.sha256()
        for number, start, raw in self._records.scan():
            try:
                item = self._records.item(raw)
                record = record_of(item, source)
                if check is not None:
                    check(record)
            except ValueError as error:
                raise PromptError(f"{source.path}, {self._records.unit} {number}: {error}") from None
            starts.append(start)
            numbers.append(number)
            keys.append(key_of(record.uid))
            derived.append(item.get(ID) is None)
            content.update(raw)
        if not starts:
            raise PromptError(f"{source.path}: holds no prompts; expected at least one line")
        self._starts, self._numbers = starts, numbers
        self.keys: NDArray[np.uint64] = np.frombuffer(keys, dtype=np.uint64)
        self.derived: NDArray[np.bool_] = np.frombuffer(derived, dtype=np.bool_)
        self.fingerprint = content.hexdigest()

    def __len__(self) -> int:
        return len(self._starts)

    def record(self, position: int) -> PromptRecord:
        """Read a record. Prompts without an id have that of their text, whichever of equal ones they are.

        Raises:
            PromptError: the file was overwritten since it was opened.
        """
        last = position + 1 == len(self._starts)
        raw = self._records.read(self._starts[position], None if last else self._starts[position + 1])
        try:
            record = record_of(self._records.item(raw), self.source)
        except ValueError:
            record = None
        if record is None or key_of(record.uid) != self.keys[position]:
            raise PromptError(f"{self.place(position)}: changed while it was in use; leave the prompts of a run alone")
        return record

    def place(self, position: int) -> str:
        """`FILE, line N`."""
        return f"{self.source.path}, {self._records.unit} {self._numbers[position]}"


def prompt_file(source: PromptSource, check: Check | None = None) -> PromptFile:
    """Open a source. One that has not changed since it was last opened is read again only if there is a `check`.

    Raises:
        PromptError: the source is not there, or a record of it is wrong.
    """
    path = _path_of(source.path)
    try:
        found = (path / STATE_FILE if path.is_dir() else path).stat()
    except OSError:
        return PromptFile(source, check)  # which says what is wrong
    key = (source, found.st_ino, found.st_size, found.st_mtime_ns)
    if check is not None or key not in _kept:
        file = PromptFile(source, check)
        _kept.pop(key, None)
        _kept[key] = file
        while len(_kept) > _MOST_KEPT:
            del _kept[next(iter(_kept))]
    return _kept[key]


def _path_of(name: str) -> Path:
    """Find a file or directory of prompts. Raises PromptError."""
    if name.startswith(PACKAGE_PREFIX):
        return _packaged(name.removeprefix(PACKAGE_PREFIX))
    path = Path(name).expanduser()
    if not name.strip():
        raise PromptError(f"{_KINDS}, got {shown(name)}")
    if path.is_dir() or (path.is_file() and path.suffix in SUFFIXES):
        return path
    if path.suffix in SUFFIXES or not path.exists():
        siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        hint = f"; did you mean {path.parent / close}?" if close else "" if path.suffix in SUFFIXES else f"; {_KINDS}"
        raise PromptError(f"{name} is not a file{hint}")
    raise PromptError(f"{name}: {_KINDS}")


def _packaged(name: str) -> Path:
    folder = Path(str(files("digenrl.data").joinpath("prompts")))
    shipped = sorted(path.stem for path in folder.glob("*.jsonl"))
    if name not in shipped:
        raise PromptError(
            f"{PACKAGE_PREFIX}{name}: no such prompt set ships with DigenRL"
            f"{did_you_mean(name, shipped, 'prompt sets that do')}"
        )
    return folder / f"{name}.jsonl"
