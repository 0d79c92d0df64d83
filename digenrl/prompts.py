"""Prompt sets: reading them, and which prompts an iteration takes.

    load_prompts(spec)         `package:NAME`, a .jsonl file, or a .txt file with one prompt a line
    parse_jsonl, parse_text    the same from bytes that came from elsewhere
    prompts_of_iteration(...)  a pure function of the iteration: the data cursor is its number

A JSONL line is an object {"id": ..., "text": ..., ...}. `id` may be left out, and is then `line<N>` as in a .txt file.
Every other key must hold a string and goes to `PromptRecord.fields`, where rewards find it. Blank lines are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from digenrl.config.errors import ConfigError, did_you_mean, encoding_problem, nearest, shown
from digenrl.identity import draw_rng
from digenrl.rewards.base import PromptRecord

PACKAGE_PREFIX = "package:"
ID, TEXT = "id", "text"
EXPECTED_LINE = 'expected an object such as {"id": "n042", "text": "042", "target": "042"}'


class PromptError(ConfigError):
    """A prompt set cannot be found or read, in a sentence that names file, line, problem and expectation."""


def load_prompts(spec: str) -> tuple[PromptRecord, ...]:
    """Read a prompt set.

    Args:
        spec: `package:NAME` for one that ships with DigenRL, or the path of a .jsonl or .txt file in UTF-8.

    Returns:
        The prompts in file order; at least one, every uid once.

    Raises:
        PromptError: the set is not there, or a line of it is wrong.
    """
    if not spec.strip():
        raise PromptError(f"expected a .jsonl file, a .txt file or package:NAME, got {shown(spec)}")
    if spec.startswith(PACKAGE_PREFIX):
        return parse_jsonl(_packaged(spec.removeprefix(PACKAGE_PREFIX)), spec)
    path = Path(spec).expanduser()
    parsers = {".jsonl": parse_jsonl, ".txt": parse_text}
    if path.suffix not in parsers:
        raise PromptError(f"{spec}: expected a .jsonl file, a .txt file or package:NAME")
    if not path.is_file():
        siblings = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
        close = nearest(path.name, siblings)
        raise PromptError(f"{spec} is not a file" + (f"; did you mean {path.parent / close}?" if close else ""))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PromptError(f"{spec}: cannot be read: {error.strerror}") from error
    return parsers[path.suffix](data, spec)


def _packaged(name: str) -> bytes:
    folder = files("digenrl.data").joinpath("prompts")
    shipped = sorted(f.name.removesuffix(".jsonl") for f in folder.iterdir() if f.name.endswith(".jsonl"))
    if name not in shipped:
        raise PromptError(
            f"{PACKAGE_PREFIX}{name}: no such prompt set ships with DigenRL"
            f"{did_you_mean(name, shipped, 'prompt sets that do')}"
        )
    return folder.joinpath(f"{name}.jsonl").read_bytes()


def parse_text(data: bytes, source: str) -> tuple[PromptRecord, ...]:
    """One prompt a line, with uid `line<N>`. `source` is what errors call the file. Raises PromptError."""
    records = [PromptRecord(f"line{number}", line.strip()) for number, line in _lines(data, source)]
    return _checked(records, source)


def parse_jsonl(data: bytes, source: str) -> tuple[PromptRecord, ...]:
    """One JSON object a line. `source` is what errors call the file. Raises PromptError."""
    first_seen: dict[str, int] = {}
    records = []
    for number, line in _lines(data, source):
        record = _record(line, number, source)
        if record.uid in first_seen:
            raise PromptError(
                f"{source}, line {number}: the id {record.uid!r} was already used in line {first_seen[record.uid]}; "
                f"expected every id once"
            )
        first_seen[record.uid] = number
        records.append(record)
    return _checked(records, source)


def _lines(data: bytes, source: str) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, with their number from 1. A byte order mark is taken for none."""
    for number, raw in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            line = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"{source}, line {number}: byte {error.start + 1} of the line (0x{raw[error.start]:02x}) is not UTF-8; "
                f"expected text saved as UTF-8"
            ) from error
        if line.strip():
            yield number, line


def _checked(records: Sequence[PromptRecord], source: str) -> tuple[PromptRecord, ...]:
    if not records:
        raise PromptError(f"{source}: holds no prompts; expected at least one line")
    return tuple(records)


def _record(line: str, number: int, source: str) -> PromptRecord:
    """Read one JSON object."""
    where = f"{source}, line {number}"
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{where}: not JSON ({error.msg}, column {error.colno}); {EXPECTED_LINE}") from error
    except RecursionError:
        raise PromptError(f"{where}: nested too deeply; {EXPECTED_LINE}") from None
    if not isinstance(item, dict):
        raise PromptError(f"{where}: {shown(item)} is not a JSON object; {EXPECTED_LINE}")
    for key, value in item.items():
        if not isinstance(value, str):
            raise PromptError(
                f"{where}: {key!r} is {shown(value)}; expected a string"
                + (f', such as "{value}"' if isinstance(value, int | float) and not isinstance(value, bool) else "")
            )
        if problem := encoding_problem(key) or encoding_problem(value):
            raise PromptError(f"{where}: {key!r} holds {problem}")
    if TEXT not in item:
        raise PromptError(f"{where}: has no {TEXT!r}; {EXPECTED_LINE}")
    for key in (ID, TEXT):
        if not item.get(key, "default").strip():
            raise PromptError(f"{where}: {key!r} is blank; expected some text")
    fields = {key: value for key, value in item.items() if key not in (ID, TEXT)}
    return PromptRecord(item.get(ID, f"line{number}"), item[TEXT], fields)


def prompts_of_iteration(
    records: Sequence[PromptRecord], run_seed: int, iteration: int, groups: int
) -> tuple[PromptRecord, ...]:
    """The prompts of one iteration's groups.

    Iterations walk through epochs, each a permutation of all records: every prompt is taken once per epoch. No prompt
    is taken twice in one iteration while there are enough, also where an iteration spans two epochs; with fewer
    records than groups, each is taken as often as any other or once more.

    Args:
        records: N prompts.
        run_seed: seed of the run.
        iteration: counted from 0.
        groups: prompts P to take.

    Returns:
        P records, in the order of the group index.

    Raises:
        ValueError: no records, `groups` < 1 or `iteration` < 0.
    """
    size = len(records)
    if not size or groups < 1 or iteration < 0:
        raise ValueError(
            f"prompts of iteration {iteration}: expected iteration >= 0, at least one record (got {size}) and at "
            f"least one group (got {groups})"
        )
    first = iteration * groups
    epochs = range(first // size, (first + groups - 1) // size + 1)
    walk = [index for epoch in epochs for index in _epoch_order(size, groups, run_seed, epoch)]
    start = first - epochs.start * size
    return tuple(records[index] for index in walk[start : start + groups])


def _epoch_order(size: int, groups: int, run_seed: int, epoch: int) -> list[int]:
    """Order in which an epoch takes its N prompts.

    It is a shuffle in which the part that completes an iteration begun in an earlier epoch prefers prompts which that
    iteration does not have yet. That moves nothing beyond the first P places, so with N >= 2P the end of the epoch
    before, all that is needed of it, is that of its plain shuffle. With fewer prompts the orders are followed from
    the last epoch that began together with an iteration, at most P epochs back.
    """
    start = max(0, epoch - 1)
    while size < 2 * groups and (start * size) % groups:
        start -= 1
    order = _shuffled(size, run_seed, start)
    begun: set[int] = set()
    for following in range(start + 1, epoch + 1):
        taken = (following * size) % groups
        if taken < size:
            begun = set(order[size - taken :])
        shuffled = _shuffled(size, run_seed, following)
        fresh = [index for index in shuffled if index not in begun][: groups - taken]
        head = set(fresh)
        order = fresh + [index for index in shuffled if index not in head]
    return order


def _shuffled(size: int, run_seed: int, epoch: int) -> list[int]:
    order = list(range(size))
    draw_rng(run_seed, "prompts", epoch).shuffle(order)
    return order
