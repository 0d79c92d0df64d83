"""The "numbers" set: three-digit numbers and their pictures, 12 x 24 pixels, black on white.

    split()           which numbers are trained on and which are held out (of pre-training and of RL)
    write_prompts()   the two prompt sets that ship with the package, cut by the same split
    render()          pictures of numbers, drawn large by Pillow and box-downsampled
    Style             typeface, size and position of one picture; CLEAN is the plain one

A prompt is the number itself: the tiny pipeline's tokenizers read one token per digit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 12, 24
FONTS = ("DejaVuSans-Bold", "DejaVuSans", "DejaVuSansMono-Bold")
HELD_OUT = 200
SPLIT_SEED = 123
#: Pictures are drawn this many times larger and averaged down, which places glyphs at fractions of a pixel.
OVERSAMPLING = 3
FONT_SIZE, SIZE_JITTER, POSITION_JITTER = 11.0, 0.7, 1.0


@dataclass(frozen=True)
class Style:
    """How one number is drawn. `size`, `dx` (right) and `dy` (down) are in pixels of the finished picture."""

    font: str = FONTS[0]
    size: float = FONT_SIZE
    dx: float = 0.0
    dy: float = 0.0


CLEAN = Style()


def split() -> tuple[list[str], list[str]]:
    """(800 training numbers, 200 held-out numbers), both in shuffled order, so that any prefix is a fair sample."""
    numbers = [f"{n:03d}" for n in range(1000)]
    random.Random(SPLIT_SEED).shuffle(numbers)
    return numbers[HELD_OUT:], numbers[:HELD_OUT]


def write_prompts(directory: Path) -> None:
    """Write `numbers-train.jsonl` and `numbers-held-out.jsonl`, one {"id", "text", "target"} object a line."""
    directory.mkdir(parents=True, exist_ok=True)
    train, held_out = split()
    for name, numbers in (("numbers-train", train), ("numbers-held-out", held_out)):
        lines = [json.dumps({"id": f"n{number}", "text": number, "target": number}) for number in numbers]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw_style(rng: random.Random) -> Style:
    """A random typeface, with jittered size and position."""
    return Style(
        font=rng.choice(FONTS),
        size=FONT_SIZE + rng.uniform(-SIZE_JITTER, SIZE_JITTER),
        dx=rng.uniform(-POSITION_JITTER, POSITION_JITTER),
        dy=rng.uniform(-POSITION_JITTER, POSITION_JITTER),
    )


def render(numbers: Sequence[str], styles: Sequence[Style]) -> NDArray[np.uint8]:
    """Draw B numbers.

    Args:
        numbers: B texts.
        styles: B styles, in the same order.

    Returns:
        (B, 12, 24, 3) uint8.
    """
    return np.stack([_draw(number, style) for number, style in zip(numbers, styles, strict=True)])


def _draw(number: str, style: Style) -> NDArray[np.uint8]:
    k = OVERSAMPLING
    canvas = Image.new("L", (WIDTH * k, HEIGHT * k), 255)
    centre = ((WIDTH / 2 + style.dx) * k, (HEIGHT / 2 + style.dy) * k)
    font = _font(style.font, round(style.size * k, 1))
    ImageDraw.Draw(canvas).text(centre, number, fill=0, font=font, anchor="mm")
    small = canvas.resize((WIDTH, HEIGHT), Image.Resampling.BOX)
    return np.repeat(np.asarray(small, dtype=np.uint8)[..., None], 3, axis=2)


@cache
def _font(name: str, size: float) -> ImageFont.FreeTypeFont:
    """A typeface out of matplotlib's wheel, so that no system font is needed."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{name}.ttf"), size)
