"""Where text stands in a picture: PP-OCRv4's detector, which ships in the wheel of `rapidocr-onnxruntime`.

    TextLines      a picture -> its lines of text as small pictures, from top to bottom

It runs on one thread, so the same picture gives the same lines anywhere.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class TextLines:
    """Finds and cuts out lines of text. Import `digenrl.rewards.ocr` first: it turns onnxruntime's telemetry off."""

    def __init__(self) -> None:
        from rapidocr_onnxruntime import RapidOCR

        self._engine: Any = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1)

    def __call__(self, picture: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The lines of one (H, W, 3) uint8 RGB picture, each (h, w, 3) and upright; empty if there is no text."""
        reversed_channels = np.ascontiguousarray(picture[..., ::-1])
        boxes, _ = self._engine.auto_text_det(reversed_channels)
        if boxes is None:
            return []
        lines = self._engine.get_crop_img_list(reversed_channels, boxes)
        return [np.ascontiguousarray(line[..., ::-1]) for line in lines]
