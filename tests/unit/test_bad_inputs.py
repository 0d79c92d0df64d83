"""The table of bad inputs, asked of the functions behind the command line."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from digenrl.configure import ConfigError, explain, load_config
from digenrl.preflight import check
from storage.runs import RunDirectory

TABLE = runpy.run_path(str(Path(__file__).parents[1] / "acceptance" / "bad_inputs.py"))["BAD_INPUTS"]


def carry_out(argv: tuple[str, ...], home: Path) -> None:
    """What the command line does before anything is started."""
    match argv:
        case ("train", preset, *rest):
            name = rest[rest.index("--name") + 1] if "--name" in rest else None
            config = load_config(preset, rest if name is None else rest[: rest.index("--name")])
            check(config, home)
            RunDirectory.create(home, preset, config, name)
        case ("resume" | "sample", name, *_):
            RunDirectory.open(home, name)
        case ("config", "show", preset):
            load_config(preset)
        case ("config", "explain", key):
            explain(key)
        case _:
            raise AssertionError(f"no such command: {argv}")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_bad_input_is_refused_with_a_sentence(row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in row.files.items():
        Path(name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        carry_out(row.argv, tmp_path / "runs")
    message = str(caught.value)
    assert all(fragment in message for fragment in row.fragments), message


def test_the_table_is_large_and_its_names_are_unique() -> None:
    names = [row.name for row in TABLE]
    assert len(names) >= 28
    assert len(set(names)) == len(names)
