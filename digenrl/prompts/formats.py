"""Files of prompts, one record after the other, and any one of them again.

    open_records(path, source) -> Records       by the file's suffix; a directory is a Hugging Face dataset
    Records.scan()                              every record: its number, where it begins, its bytes
    Records.item(raw)                           what these bytes say, as a mapping
    Records.read(start, stop)                   the bytes again

A .txt file holds a prompt a line, a .jsonl file an object a line, a .csv file a header and a prompt a row. They are
read in place. Rows of a .parquet file or a Hugging Face dataset are first written to a temporary file, as one row of
those cannot be read without a thousand others; `TMPDIR` decides where that is. Of their columns, those count that hold
text, and `id` and `rewards`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from digenrl.config.errors import did_you_mean, shown
from digenrl.prompts.errors import PromptError
from digenrl.prompts.records import EXAMPLE, ID, REWARDS

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS_AT_ONCE = 1024
#: What names the files of a Hugging Face dataset on disk.
STATE_FILE = "state.json"


class Records(ABC):
    """Lines of an open file. Subclasses say what a record is.

    Args:
        file: opened for reading bytes; it may be closed afterwards.
    """

    #: What a record's number counts.
    unit = "line"

    def __init__(self, file: IO[bytes]) -> None:
        # A descriptor of its own, read at offsets: no position that threads could take from one another.
        self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def scan(self) -> Iterator[tuple[int, int, bytes]]:
        """(number from 1, offset, bytes) of every line that is not blank."""
        start = 0
        for number, line in enumerate(self._lines(), start=1):
            if line.strip():
                yield number, start, line
            start += len(line)

    def _lines(self) -> Iterator[bytes]:
        """All lines. Those that change between two scans are somebody else's doing."""
        with os.fdopen(os.dup(self._descriptor), "rb", buffering=1 << 16) as file:
            file.seek(0)
            yield from file

    def read(self, start: int, stop: int | None) -> bytes:
        """Bytes from one record's offset to that of the next; None: to the end."""
        size = (os.fstat(self._descriptor).st_size if stop is None else stop) - start
        return os.pread(self._descriptor, size, start)

    @abstractmethod
    def item(self, raw: bytes) -> dict[str, Any]:
        """What a record says.

        Raises:
            ValueError: what is wrong with it, without the place.
        """


class TextRecords(Records):
    """One prompt a line, under the key `text`."""

    def __init__(self, file: IO[bytes], key: str) -> None:
        super().__init__(file)
        self._key = key

    def item(self, raw: bytes) -> dict[str, Any]:
        """See Records."""
        return {self._key: decoded(raw).strip()}


class JsonRecords(Records):
    """One JSON object a line."""

    def item(self, raw: bytes) -> dict[str, Any]:
        """See Records."""
        try:
            item = json.loads(decoded(raw))
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON ({error.msg}, column {error.colno}); {EXAMPLE}") from None
        except RecursionError:
            raise ValueError(f"nested too deeply; {EXAMPLE}") from None
        if not isinstance(item, dict):
            raise ValueError(f"{shown(item)} is not a JSON object; {EXAMPLE}")
        return item


class CsvRecords(Records):
    """Comma-separated values with a header; cells in double quotes may hold commas and line breaks. Empty: absent."""

    def __init__(self, file: IO[bytes], source: str, text_key: str) -> None:
        super().__init__(file)
        self._header: list[str] = []
        self._begin = 0
        for _, stop, cells in self._rows(source):
            self._header, self._begin = [cell.strip() for cell in cells], stop
            break
        if len(set(self._header)) != len(self._header) or text_key not in self._header:
            problem = "holds a name twice" if text_key in self._header else f"has no column {text_key!r}"
            hint = "" if text_key in self._header else did_you_mean(text_key, self._header, "its columns")
            raise PromptError(f"{source}, line 1: the header {shown(','.join(self._header))} {problem}{hint}")
        self._source = source

    def scan(self) -> Iterator[tuple[int, int, bytes]]:
        """See Records; a row is numbered by its first line."""
        start, number = 0, 1
        for line, stop, cells in self._rows(self._source):
            if start >= self._begin and any(cells):
                yield number, start, self.read(start, stop)
            start, number = stop, line + 1

    def _rows(self, source: str) -> Iterator[tuple[int, int, list[str]]]:
        """(last line, offset after it, cells) of every row, the header included."""
        line, offset = 0, 0

        def text() -> Iterator[str]:
            nonlocal line, offset
            for raw in self._lines():
                line, offset = line + 1, offset + len(raw)
                yield decoded(raw)

        rows = csv.reader(text(), strict=True)
        try:
            for cells in rows:
                yield line, offset, cells
        except (csv.Error, ValueError) as error:
            raise PromptError(f"{source}, line {line}: {error}; expected comma-separated values in UTF-8") from None

    def item(self, raw: bytes) -> dict[str, Any]:
        """See Records."""
        cells = next(csv.reader(io.StringIO(decoded(raw), newline=""), strict=True))
        if len(cells) != len(self._header):
            raise ValueError(
                f"has {len(cells)} cells, the header {len(self._header)}; a cell that holds a comma needs double quotes"
            )
        return {name: cell for name, cell in zip(self._header, cells, strict=True) if cell}


class RowRecords(JsonRecords):
    """Rows of a table, copied to a temporary file that has no name."""

    unit = "row"


def open_records(path: Path, source: str, text_key: str) -> Records:
    """Open a file or directory of prompts.

    Args:
        path: that exists.
        source: what errors call it.
        text_key: key or column that holds the prompt.

    Raises:
        PromptError: it is of another kind, or cannot be read.
    """
    try:
        if path.is_dir() or path.suffix == ".parquet":
            return _copied(path, source)
        with path.open("rb") as file:
            if path.suffix == ".csv":
                return CsvRecords(file, source, text_key)
            return JsonRecords(file) if path.suffix == ".jsonl" else TextRecords(file, text_key)
    except OSError as error:
        raise PromptError(f"{source}: cannot be read: {error.strerror or error}") from error


def decoded(raw: bytes) -> str:
    """UTF-8 as text. A byte order mark is taken for none."""
    try:
        return raw.removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"byte {error.start + 1} of the line (0x{error.object[error.start]:02x}) is not UTF-8; expected text saved "
            f"as UTF-8"
        ) from None


def _copied(path: Path, source: str) -> Records:
    with tempfile.TemporaryFile() as file:
        for batch in _dataset(path, source) if path.is_dir() else _parquet(path, source):
            for row in batch.to_pylist():
                item = {name: str(value) if name == ID and value is not None else value for name, value in row.items()}
                file.write(json.dumps(item, ensure_ascii=False).encode() + b"\n")
        file.flush()
        return RowRecords(file)


def _parquet(path: Path, source: str) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            columns = _columns(file.schema_arrow)
            yield from file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns)
    except pa.ArrowException as error:
        raise PromptError(f"{source}: is no Parquet file: {error}") from None


def _dataset(path: Path, source: str) -> Iterator[Any]:
    """Batches of what `datasets.Dataset.save_to_disk` wrote: Arrow streams, named by state.json."""
    import pyarrow as pa

    try:
        names = [entry["filename"] for entry in json.loads((path / STATE_FILE).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError):
        splits = sorted(entry.parent.name for entry in path.glob(f"*/{STATE_FILE}"))
        hint = f"; give one of its splits: {', '.join(str(Path(source) / split) for split in splits)}" if splits else ""
        raise PromptError(f"{source}: is no Hugging Face dataset (it has no {STATE_FILE}){hint}") from None
    for name in names:
        try:
            with pa.OSFile(str(path / name)) as file, pa.ipc.open_stream(file) as stream:
                columns = _columns(stream.schema)
                for batch in stream:
                    yield batch.select(columns)
        except (pa.ArrowException, OSError) as error:
            raise PromptError(f"{source}: {name} cannot be read: {error}") from None


def _columns(schema: Any) -> list[str]:
    """Columns of text, and the id and the names of rewards of whatever type."""
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        kind = kind.value_type if types.is_dictionary(kind) else kind
        return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))

    return [
        field.name
        for field in schema
        if is_text(field.type)
        or (field.name == ID and types.is_integer(field.type))
        or (field.name == REWARDS and types.is_list(field.type))
    ]
