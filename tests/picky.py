"""A user's reward that has no value for every third picture or so: `python:picky:picky`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from digenrl.rewards.base import PromptRecord


def picky(images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[float | None]:
    """Mean brightness, except of pictures whose checksum it does not like."""
    liked = [zlib.crc32(image.tobytes()) % 3 > 0 for image in images]
    return [float(image.mean()) / 255 if good else None for image, good in zip(images, liked, strict=True)]
