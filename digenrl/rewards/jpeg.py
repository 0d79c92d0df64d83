"""Rewards from the size of the picture's JPEG file, as in DDPO (Black et al. 2023, section 5).

    JpegIncompressibility   size in kB (1000 bytes): in (0, inf), rises with detail
    JpegCompressibility     minus the size in kB: in (-inf, 0), rises as the picture gets plain

The size is that of Pillow's encoder at quality 95 with its default chroma subsampling. Neither reward looks at the
prompt, so both end in noise or in blank pictures: useful to show over-optimisation, and in tests.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.rewards.base import PromptRecord, Reward, RewardCard, Score, frames_of, means_of, score_of

QUALITY = 95
BYTES_PER_KB = 1000


class JpegIncompressibility(Reward):
    """Size of the JPEG file in kB; a video's value is the mean of its frames."""

    name = "jpeg_incompressibility"
    card = RewardCard("size of the JPEG file in kB", "(0, inf)")
    sign = 1.0

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        frames, per_sample = frames_of(images, prompts)
        sizes = np.asarray([jpeg_kilobytes(frame) for frame in frames])
        return [score_of(self.name, self.sign * size) for size in means_of(sizes, per_sample)]


class JpegCompressibility(JpegIncompressibility):
    """Minus the size of the JPEG file in kB."""

    name = "jpeg_compressibility"
    card = RewardCard("minus the size of the JPEG file in kB", "(-inf, 0)")
    sign = -1.0


def jpeg_kilobytes(picture: NDArray[np.uint8]) -> float:
    """Size in kB of one (H, W, 3) uint8 picture as a JPEG file."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.tell() / BYTES_PER_KB
