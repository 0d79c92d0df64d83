"""`digenrl rewards list` and `digenrl rewards check`."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from digenrl.data.numbers import CLEAN, render
from digenrl.rewards.registry import reward_names
from flows.cli import app


def digenrl(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.fixture
def picture(tmp_path: Path) -> str:
    Image.fromarray(render(["042"], [CLEAN])[0]).save(tmp_path / "042.png")
    return str(tmp_path / "042.png")


def test_list_shows_every_reward() -> None:
    code, said = digenrl("rewards", "list")
    assert code == 0 and [line.split()[0] for line in said.splitlines()] == ["name", *reward_names()]


def test_check_prints_the_value_and_compares_it(picture: str) -> None:
    ocr = ("rewards", "check", "ocr", "--image", picture, "--field", "target=042")
    assert digenrl(*ocr) == (0, "ocr 1\n")
    assert digenrl(*ocr, "--expect", "1")[0] == 0
    code, said = digenrl(*ocr, "--expect", "0.5")
    assert code == 1 and "ocr is 1, not 0.5 ± 0.001" in said
    code, said = digenrl("rewards", "check", "ocr", "match=exact", "--image", picture, "--field", "target=043")
    assert (code, said) == (0, "ocr 0\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("ocr", "--field", "target"), 2, "must be KEY=VALUE"),
        (("ocr", "path=x", "--field", "target=042"), 2, "ocr has no use for path"),
        (("clip_score", "path=/nowhere"), 2, "path='/nowhere'"),
        (("python:operator:eq",), 1, "gave no value: reward eq returned"),
    ],
)
def test_check_says_what_is_wrong(picture: str, arguments: tuple[str, ...], code: int, words: str) -> None:
    found, said = digenrl("rewards", "check", *arguments, "--image", picture)
    assert found == code and words in said, said


def test_a_picture_that_is_not_there_is_named() -> None:
    code, said = digenrl("rewards", "check", "jpeg_compressibility", "--image", "/nowhere.png")
    assert code == 1 and "--image /nowhere.png cannot be read" in said
