"""Small pictures of evaluation samples, for grids that people look at."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.identity import SampleId

#: Held-out prompts whose pictures are kept, the first ones.
PREVIEWED = 32

#: Longer side of a preview in pixels; larger samples are scaled down.
MAX_SIDE = 256


def previews(samples: Sequence[SampleId], images: NDArray[np.uint8]) -> dict[int, bytes]:
    """PNG files by prompt index, of the samples among the first PREVIEWED prompts.

    Args:
        samples: B evaluation samples.
        images: (B, F, H, W, 3); of a video the middle frame is shown.
    """
    pictures = {}
    for sample, frames in zip(samples, images, strict=True):
        if sample.group < PREVIEWED:
            picture = Image.fromarray(frames[len(frames) // 2])
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            pictures[sample.group] = buffer.getvalue()
    return pictures
