"""From uint8 pictures to what a pretrained vision model is fed, with Pillow and numpy alone.

    ImagePreparation    resize, crop, scale and normalise as a checkpoint's preprocessor_config.json says
    chunks_of           slices of at most so many pictures

The same arithmetic as the Pillow image processors of transformers. Written out because those, and all the others
there, use torchvision where it is installed, whose resizing gives other pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

#: Pictures that go through a model at a time.
CHUNK = 64


@dataclass(frozen=True)
class ImagePreparation:
    """What is done to every picture, in this order.

    Attributes:
        shortest_edge: the picture is resized until its shorter side has so many pixels, aspect kept; None: see `size`.
        size: (height, width) it is resized to, if there is no shortest edge; None: it is not resized.
        crop: (height, width) of the middle that is kept; None: all of it.
        resample: Pillow's number of the filter.
        scale: what pixels are multiplied by.
        mean, std: by channel, of the normalisation.
    """

    shortest_edge: int | None
    size: tuple[int, int] | None
    crop: tuple[int, int] | None
    resample: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ImagePreparation:
        """Read a preprocessor_config.json, of any age.

        Raises:
            ValueError: a size is given in a way that is not known here.
        """
        cropped = settings.get("do_center_crop", "crop_size" in settings)
        edge, size = None, None
        if settings.get("do_resize", True):
            wanted = settings.get("size", 224)
            if isinstance(wanted, int):
                # Before sizes had names, a number was the shortest edge where a crop followed.
                wanted = {"shortest_edge": wanted} if cropped else {"height": wanted, "width": wanted}
            edge, size = wanted.get("shortest_edge"), _pair(wanted)
            if edge is None and size is None:
                raise ValueError(f"size must give a shortest_edge or height and width, got {wanted}")
        crop = settings.get("crop_size", 224) if cropped else None
        normalised = settings.get("do_normalize", True)
        return cls(
            shortest_edge=edge,
            size=size,
            crop=(crop, crop) if isinstance(crop, int) else _pair(crop or {}),
            resample=int(settings.get("resample", Image.Resampling.BILINEAR)),
            scale=float(settings.get("rescale_factor", 1 / 255)) if settings.get("do_rescale", True) else 1.0,
            mean=tuple(settings.get("image_mean", (0.5, 0.5, 0.5))) if normalised else (0.0, 0.0, 0.0),
            std=tuple(settings.get("image_std", (0.5, 0.5, 0.5))) if normalised else (1.0, 1.0, 1.0),
        )

    def __call__(self, pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
        """(N, H, W, 3) uint8 RGB -> (N, 3, h, w) float32."""
        shown = np.stack([self._cropped(self._resized(picture)) for picture in pictures])
        scaled = shown.astype(np.float32) * np.float32(self.scale)
        normalised = (scaled - np.asarray(self.mean, np.float32)) / np.asarray(self.std, np.float32)
        return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))

    def _resized(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        height, width = picture.shape[:2]
        if self.shortest_edge is not None:
            short, long = min(height, width), max(height, width)
            longer = int(self.shortest_edge * long / short)
            size = (longer, self.shortest_edge) if height >= width else (self.shortest_edge, longer)
        elif self.size is not None:
            size = self.size
        else:
            return picture
        return np.asarray(Image.fromarray(picture).resize((size[1], size[0]), Image.Resampling(self.resample)))

    def _cropped(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The middle; where the picture is smaller, black fills up."""
        if self.crop is None:
            return picture
        (height, width), (tall, wide) = picture.shape[:2], self.crop
        if tall > height or wide > width:
            above, left = -(-max(tall - height, 0) // 2), -(-max(wide - width, 0) // 2)
            below, right = max(tall - height, 0) - above, max(wide - width, 0) - left
            picture = np.pad(picture, ((above, below), (left, right), (0, 0)))
            height, width = picture.shape[:2]
        top, left = (height - tall) // 2, (width - wide) // 2
        return picture[top : top + tall, left : left + wide]


def chunks_of(count: int, size: int = CHUNK) -> Iterator[slice]:
    """Slices that cover `count` pictures in order."""
    return (slice(first, min(first + size, count)) for first in range(0, count, size))


def _pair(size: Mapping[str, int]) -> tuple[int, int] | None:
    return (size["height"], size["width"]) if "height" in size and "width" in size else None
