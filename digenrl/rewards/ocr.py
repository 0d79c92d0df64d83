"""Reward for rendered text: what a pretrained OCR model reads, compared with the target.

The recogniser is PP-OCRv4 (recognition only), which ships inside the wheel `rapidocr-onnxruntime`. It runs through
onnxruntime directly, one batch per call and on one thread, so the same pictures give the same values anywhere.

    OcrReward      reward = 1 - levenshtein(read, target) / len(target), clipped to [0, 1]
    Recogniser     pictures -> texts
    exact_match    whether a reading is the target
    levenshtein    edit distance

The case rule: readings and targets are compared case-folded and without white space. The whole picture is taken for
one line of text; nothing locates text in a larger scene.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from importlib.resources import files
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from digenrl.rewards.base import (
    PromptRecord,
    Reward,
    RewardCard,
    Score,
    field_of,
    frames_of,
    means_of,
    score_of,
)

MODEL_FILE = "ch_PP-OCRv4_rec_infer.onnx"
#: Height the recogniser is fed. Its own default is 48; 32 is read as well and costs half.
INPUT_HEIGHT = 32
#: Columns of replicated border on the left and on the right: text that touches the edge is misread.
BORDER = 8
FIELD = "target"


class Recogniser:
    """PP-OCRv4's text-line recogniser."""

    def __init__(self) -> None:
        # Read by onnxruntime when it is imported. Its wheels otherwise send telemetry to Microsoft and keep a device
        # identifier in the user's cache directory.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
        options.use_deterministic_compute = True
        options.log_severity_level = 3
        model = files("rapidocr_onnxruntime").joinpath("models", MODEL_FILE).read_bytes()
        self._session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self._input = self._session.get_inputs()[0].name
        characters = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        # Class 0 is the CTC blank and the last class is the space; the list in the file names what is between.
        self._alphabet = ["", *characters, " "]

    def __call__(self, pictures: NDArray[np.uint8]) -> list[str]:
        """Read B pictures of one line each, (B, H, W, 3) uint8 RGB, in one batch."""
        if not len(pictures):
            return []
        probabilities = self._session.run(None, {self._input: _prepare(pictures)})[0]
        return [self._decode(row) for row in probabilities.argmax(axis=2)]

    def _decode(self, classes: NDArray[np.int64]) -> str:
        """Greedy CTC: runs of one class are one character, blanks separate."""
        first_of_run = np.concatenate(([True], classes[1:] != classes[:-1]))
        return "".join(self._alphabet[c] for c in classes[first_of_run])


class OcrReward(Reward):
    """Closeness of the text that is read to a field of the record, in [0, 1]. A video's value is its frames' mean.

    Args:
        field: of the prompt record, that holds the text to be read.
        match: "distance" by edit distance; "exact" 1 for the very text, else 0.
    """

    name = "ocr"
    card = RewardCard(
        "text that is read, against the target",
        "[0, 1]",
        licence="Apache-2.0",
        weights="PP-OCRv4 in the wheel of rapidocr-onnxruntime",
    )

    def __init__(self, *, field: str = FIELD, match: Literal["distance", "exact"] = "distance") -> None:
        self.field = field
        self.match = match

    @cached_property
    def recogniser(self) -> Recogniser:
        """Loaded when it is first asked for."""
        return Recogniser()

    def load(self) -> None:
        """See `Reward`."""
        assert self.recogniser

    def validate(self, prompts: Sequence[PromptRecord]) -> None:
        """Refuse prompts without a target; see `Reward`."""
        for prompt in prompts:
            target_of(prompt, self.field)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        frames, per_sample = frames_of(images, prompts)
        readings = self.recogniser(frames)
        targets = [target_of(prompt, self.field) for prompt in prompts for _ in range(per_sample)]
        judge = exact_match if self.match == "exact" else text_reward
        closeness = [float(judge(reading, target)) for reading, target in zip(readings, targets, strict=True)]
        return [score_of(self.name, mean) for mean in means_of(np.asarray(closeness), per_sample)]


def target_of(prompt: PromptRecord, field: str = FIELD) -> str:
    """The text a prompt wants to see. It is never looked for in the prompt's own text.

    Raises:
        ValueError: the record has none.
    """
    return field_of("ocr", prompt, field, "the text to be read in the picture")


def text_reward(reading: str, target: str) -> float:
    """1 - levenshtein / len(target), clipped to [0, 1]: readings much longer than the target would fall below 0."""
    reading, target = normalise(reading), normalise(target)
    return max(0.0, 1.0 - levenshtein(reading, target) / len(target))


def exact_match(reading: str, target: str) -> bool:
    """Whether a reading is the target, by the case rule of this module."""
    return normalise(reading) == normalise(target)


def normalise(text: str) -> str:
    """Case-folded, without white space."""
    return "".join(text.casefold().split())


def levenshtein(a: str, b: str) -> int:
    """Fewest insertions, deletions and substitutions of one character that turn `a` into `b`."""
    previous = list(range(len(b) + 1))
    for i, left in enumerate(a, start=1):
        current = [i]
        for j, right in enumerate(b, start=1):
            current.append(min(previous[j] + 1, current[j - 1] + 1, previous[j - 1] + (left != right)))
        previous = current
    return previous[-1]


def _prepare(pictures: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(B, H, W, 3) uint8 RGB -> (B, 3, 32, W') float32 BGR in [-1, 1], aspect kept, borders replicated."""
    height, width = pictures.shape[1:3]
    size = (max(1, round(width * INPUT_HEIGHT / height)), INPUT_HEIGHT)
    scaled = np.stack([np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BICUBIC)) for p in pictures])
    padded = np.pad(scaled, ((0, 0), (0, 0), (BORDER, BORDER), (0, 0)), mode="edge")
    normalised = (padded.astype(np.float32) / 255.0 - 0.5) / 0.5
    return np.ascontiguousarray(normalised[..., ::-1].transpose(0, 3, 1, 2))
