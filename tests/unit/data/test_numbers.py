"""The numbers set and its pictures."""

import random
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from digenrl.data.numbers import CLEAN, FONTS, Style, draw_style, render, split, write_prompts


def test_split_is_a_fixed_partition() -> None:
    train, held_out = split()
    assert (len(train), len(held_out)) == (800, 200)
    assert sorted(train + held_out) == [f"{n:03d}" for n in range(1000)]
    assert split() == (train, held_out) and train != sorted(train)


@pytest.mark.parametrize("name", ["numbers-train", "numbers-held-out"])
def test_shipped_prompt_sets_are_what_the_script_writes(tmp_path: Path, name: str) -> None:
    write_prompts(tmp_path)
    shipped = files("digenrl.data") / "prompts" / f"{name}.jsonl"
    assert (tmp_path / f"{name}.jsonl").read_bytes() == shipped.read_bytes()


def test_pictures_are_grey_dark_on_white_and_follow_their_style() -> None:
    pictures = render(["042"] * 4, [CLEAN, CLEAN, Style(font=FONTS[1]), Style(dx=1.0)])
    assert pictures.shape == (4, 12, 24, 3) and pictures.dtype == np.uint8
    assert (pictures[..., :1] == pictures).all() and pictures.max() == 255 and pictures.min() < 64
    assert (pictures[0] == pictures[1]).all() and (pictures[0] != pictures[2]).any()
    assert (pictures[3][:, 1:] == pictures[0][:, :-1]).all(), "dx moves by whole pixels of the finished picture"


def test_styles_are_drawn_from_the_generator_alone() -> None:
    assert draw_style(random.Random(0)) == draw_style(random.Random(0)) != draw_style(random.Random(1))
