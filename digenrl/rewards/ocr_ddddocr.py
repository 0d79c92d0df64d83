"""A second reader of rendered text, to judge by and not to train on: the recogniser of `ddddocr`.

    DdddocrReward   1 - levenshtein(read, target) / len(target), clipped to [0, 1], as `ocr` but by another engine

Range [0, 1]. Engine and weights (14 MB ONNX) come in the wheel `ddddocr` (MIT), the extra `digenrl[gold]`. Of it only
the weights and their alphabet are read: importing the package itself would import OpenCV.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.rewards.base import RewardCard, RewardError
from digenrl.rewards.ocr import OcrReward

PACKAGE = "ddddocr"
MODEL_FILE = "common_old.onnx"
INPUT_HEIGHT = 64
MISSING = (
    "reward ocr_ddddocr needs the package ddddocr; install it with pip install 'digenrl[gold]' wherever workers run, "
    "or go without it: guard.gold=[]"
)


class Reader:
    """The recogniser, one line of text per picture.

    Raises:
        RewardError: `ddddocr` is not installed.
    """

    def __init__(self) -> None:
        found = find_spec(PACKAGE)
        if found is None or found.origin is None:
            raise RewardError(MISSING)
        folder = Path(found.origin).parent
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # see `ocr`
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.use_deterministic_compute = True
        options.log_severity_level = 3
        model = (folder / MODEL_FILE).read_bytes()
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        # Class 0 is the CTC blank.
        self._alphabet = _alphabet(folder / "charsets.py")

    def __call__(self, pictures: NDArray[np.uint8]) -> list[str]:
        """Read B pictures of one line each, (B, H, W, 3) uint8 RGB; the model takes one at a time."""
        return [self._read(picture) for picture in pictures]

    def _read(self, picture: NDArray[np.uint8]) -> str:
        height, width = picture.shape[:2]
        size = (max(1, width * INPUT_HEIGHT // height), INPUT_HEIGHT)
        grey = Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS).convert("L")
        pixels = np.asarray(grey, dtype=np.float32)[None, None] / 255.0
        classes = self._session.run(None, {self._input: pixels})[0][:, 0].argmax(axis=1)
        first_of_run = np.concatenate(([True], classes[1:] != classes[:-1]))
        return "".join(self._alphabet[c] for c in classes[first_of_run])


class DdddocrReward(OcrReward):
    """As `ocr`, by what ddddocr reads."""

    name = "ocr_ddddocr"
    card = RewardCard(
        "text that another engine reads, against the target",
        "[0, 1]",
        licence="MIT",
        weights="common_old.onnx in the wheel of ddddocr (the extra digenrl[gold])",
    )

    def problem(self) -> str | None:
        """See `Reward`."""
        return None if installed() else MISSING

    @cached_property
    def recogniser(self) -> Callable[[NDArray[np.uint8]], list[str]]:
        """See `OcrReward`."""
        return Reader()


def installed() -> bool:
    """Whether the engine is there."""
    return find_spec(PACKAGE) is not None


def _alphabet(path: Path) -> Sequence[str]:
    """The characters by class, from the file that holds nothing else."""
    spec = spec_from_file_location("_ddddocr_charsets", path)
    assert spec is not None and spec.loader is not None, f"{path} is a Python file"
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    characters: list[str] = module.CHARSET_OLD
    return characters
