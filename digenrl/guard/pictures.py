"""Statistics of pictures that move when a reward is gamed: blank, garish, noisy, tiled or all alike.

    picture_statistics(frames)   of one sample
    diversity(images)            of the samples of one group
    mean_statistics(many)        their means

Brightness is Rec. 601 luma in [0, 1]. All are plain numpy and look at nothing but pixels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
#: Brightness below which a pixel is dark, and change of brightness per pixel from which on it lies on an edge.
DARK, EDGE = 0.1, 0.1
#: Cycles per pixel from which on a frequency is high: half of the highest.
HIGH = 0.25
#: Periods of a grid in pixels, the first that fits a picture counts: patches of a transformer behind a VAE are 16 wide.
PERIODS = (16, 8, 4)
#: A grid must repeat at least this often along the shorter side to be seen.
REPEATS = 3
#: Variance of brightness below which a picture has no spectrum worth looking at: half a level of 8 bits, squared.
BLANK = (0.5 / 255) ** 2
#: Frames of a video that are looked at, evenly spaced.
FRAMES = 4
#: Side of the pictures that are compared for diversity: what they show counts, not their texture.
COARSE = 16


@dataclass(frozen=True)
class PictureStatistics:
    """Of one picture, or the mean of several.

    Attributes:
        dark: share of dark pixels.
        saturation: mean of the largest minus the smallest channel, in [0, 1].
        edges: share of pixels that lie on an edge.
        high_frequency: share of the spectrum's energy at high frequencies; 0 for a blank picture.
        grid: share of it at the harmonics of a grid; 0 for a blank picture.
    """

    dark: float
    saturation: float
    edges: float
    high_frequency: float
    grid: float


def picture_statistics(frames: NDArray[np.uint8]) -> PictureStatistics:
    """Statistics of one sample, the mean of its frames.

    Args:
        frames: (F, H, W, 3) uint8.
    """
    shown = np.unique(np.linspace(0, len(frames) - 1, min(len(frames), FRAMES)).round().astype(int))
    return mean_statistics([_of_picture(frames[index]) for index in shown])


def mean_statistics(many: Iterable[PictureStatistics]) -> PictureStatistics:
    """Means of at least one."""
    return PictureStatistics(*(float(mean) for mean in np.mean([astuple(one) for one in many], axis=0)))


def diversity(images: NDArray[np.uint8]) -> float | None:
    """Mean distance between two pictures of one group: root of the mean squared difference, in [0, 1].

    Args:
        images: (B, F, H, W, 3) uint8, samples of one prompt; of videos the middle frame is compared.

    Returns:
        None for fewer than two samples.
    """
    count = len(images)
    if count < 2:
        return None
    coarse = np.stack([_coarse(frames[len(frames) // 2]) for frames in images]).reshape(count, -1)
    first, second = np.triu_indices(count, k=1)
    return float(np.sqrt(((coarse[first] - coarse[second]) ** 2).mean(axis=1)).mean())


def _of_picture(picture: NDArray[np.uint8]) -> PictureStatistics:
    pixels = picture.astype(np.float32) / 255.0
    brightness = pixels @ LUMA
    high, grid = _spectrum(brightness)
    return PictureStatistics(
        dark=float((brightness < DARK).mean()),
        saturation=float((pixels.max(axis=-1) - pixels.min(axis=-1)).mean()),
        edges=_edges(brightness),
        high_frequency=high,
        grid=grid,
    )


def _edges(brightness: Floats) -> float:
    """Share of pixels at which brightness changes by EDGE or more per pixel, by central differences."""
    if min(brightness.shape) < 2:
        return 0.0
    down, right = np.gradient(brightness)
    return float((np.hypot(down, right) >= EDGE).mean())


def _spectrum(brightness: Floats) -> tuple[float, float]:
    """Shares of the energy without the mean: at high frequencies, and at harmonics of a grid."""
    period = next((p for p in PERIODS if min(brightness.shape) >= REPEATS * p), 1)
    # Whole periods, so that the harmonics of a grid are frequencies of the transform.
    height, width = (side - side % period for side in brightness.shape)
    cut = brightness[:height, :width] - brightness[:height, :width].mean()
    if cut.var() < BLANK:
        return 0.0, 0.0
    energy = np.abs(np.fft.rfft2(cut)) ** 2
    # rfft2 keeps one of two frequencies that mirror each other, where they differ.
    energy[:, 1 : (width + 1) // 2] *= 2
    energy /= energy.sum()
    down, right = np.fft.fftfreq(height), np.fft.rfftfreq(width)
    high = float(energy[np.hypot(down[:, None], right[None]) >= HIGH].sum())
    grid = float(energy[:: height // period, :: width // period].sum()) if period > 1 else 0.0
    return high, grid


def _coarse(picture: NDArray[np.uint8]) -> Floats:
    """Means of COARSE x COARSE boxes, or of single pixels where there are fewer."""
    height, width = picture.shape[:2]
    down, right = (np.linspace(0, side, min(side, COARSE) + 1).astype(int)[:-1] for side in (height, width))
    sums = np.add.reduceat(np.add.reduceat(picture.astype(np.float32), down, axis=0), right, axis=1)
    rows, columns = np.diff([*down, height]), np.diff([*right, width])
    boxes: Floats = sums / (255.0 * rows[:, None, None] * columns[None, :, None])
    return boxes
