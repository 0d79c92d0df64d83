"""Reward for pictures of the class that the prompt record names: an image classifier of your own, by path.

    Classifier          probability of the class in `fields["class"]`
    a directory         of transformers' AutoModelForImageClassification, weights as safetensors
    a file *.onnx       input (N, 3, H, W), output (N, classes). Beside it lies classifier.json:
                        {"labels": [...], "outputs": "logits" or "probabilities", "size": ..., "image_mean": ...}

classifier.json takes every key of a preprocessor_config.json. Neither form can run code when it is loaded, which
TorchScript and pickled models can.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.errors import did_you_mean, shown
from digenrl.rewards.base import (
    Failed,
    PromptRecord,
    Reward,
    RewardCard,
    RewardError,
    Score,
    field_of,
    frames_of,
    means_of,
    score_of,
)
from digenrl.rewards.pictures import ImagePreparation, chunks_of
from digenrl.rewards.pretrained import file_of, from_pretrained, path_problem, preparation_of

FIELD = "class"
SETTINGS = "classifier.json"

#: (N, 3, h, w) float32 -> (N, classes) logits.
Run = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class Classifier(Reward):
    """Probability of the wanted class, by softmax over all; a video's value is the mean of its frames.

    Args:
        path: a directory or an ONNX file.
        field: of the prompt record, that holds the wanted class by its label.
        device: of the model; an ONNX file runs on the cpu.
    """

    name = "classifier"
    card = RewardCard(
        "probability of the class in the prompt record",
        "[0, 1]",
        licence="yours",
        weights="`path`: a directory of AutoModelForImageClassification, or an ONNX file",
    )

    def __init__(self, *, path: str, field: str = FIELD, device: str = "cpu") -> None:
        self.path = path
        self.field = field
        self.device = device
        self._run: Run | None = None
        self._logits = True

    @property
    def _onnx(self) -> bool:
        return self.path.endswith(".onnx")

    def problem(self) -> str | None:
        """See `Reward`."""
        if not self._onnx:
            return path_problem(self.name, self.path, "config.json")
        try:
            _onnx_settings(Path(self.path).expanduser())
        except RewardError as error:
            return str(error)
        return None

    def validate(self, prompts: Sequence[PromptRecord]) -> None:
        """Refuse prompts that name no class, or one that the classifier does not know; see `Reward`."""
        labels = self._labels()
        for prompt in prompts:
            wanted = self._wanted(prompt)
            if labels is not None and wanted not in labels:
                raise ValueError(
                    f"reward {self.name}: prompt {prompt.uid!r} has {self.field}={wanted!r}, which is no label of "
                    f"path={self.path}{did_you_mean(wanted, labels, 'labels')}"
                )

    def load(self) -> None:
        """See `Reward`."""
        if self._run is not None:
            return
        if self._onnx:
            settings = _onnx_settings(Path(self.path).expanduser())
            self._prepare, names = ImagePreparation.of(settings), list(settings["labels"])
            self._logits = settings.get("outputs", "logits") == "logits"
            run = _onnx_run(self.name, Path(self.path).expanduser())
        else:
            self._prepare = preparation_of(self.name, self.path)
            run, names = _transformers_run(self.name, self.path, self.device)
        self._rows = {name: row for row, name in enumerate(names)}
        self._run = run

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        if not len(images):
            return []
        frames, per_sample = frames_of(images, prompts)
        probabilities = self._probabilities(frames)
        rows = [self._rows.get(self._wanted(prompt)) for prompt in prompts]
        chosen = np.asarray([probabilities[i, rows[i // per_sample] or 0] for i in range(len(frames))])
        means = means_of(chosen, per_sample)
        return [
            Failed(f"no label {self._wanted(prompt)!r}") if row is None else score_of(self.name, mean)
            for prompt, row, mean in zip(prompts, rows, means, strict=True)
        ]

    def _probabilities(self, frames: NDArray[np.uint8]) -> NDArray[np.float64]:
        """(N, H, W, 3) uint8 -> (N, classes)."""
        self.load()
        assert self._run is not None
        found = np.concatenate([self._run(self._prepare(frames[part])) for part in chunks_of(len(frames))])
        if found.ndim != 2 or found.shape[1] != len(self._rows):
            raise ValueError(
                f"reward {self.name}: path={self.path} answers with {found.shape[1:]} values per picture, but there "
                f"are {len(self._rows)} labels"
            )
        if not self._logits:
            return found.astype(np.float64)
        raised = np.exp((found - found.max(axis=1, keepdims=True)).astype(np.float64))
        return np.asarray(raised / raised.sum(axis=1, keepdims=True))

    def _wanted(self, prompt: PromptRecord) -> str:
        return field_of(self.name, prompt, self.field, "the label of the wanted class")

    def _labels(self) -> list[str] | None:
        """Labels as far as they can be read without loading the model."""
        if self._run is not None:
            return list(self._rows)
        if self._onnx:
            return list(_onnx_settings(Path(self.path).expanduser())["labels"])
        if not Path(self.path).expanduser().is_dir():
            return None
        config = file_of(self.path, "config.json")
        return None if config is None else list(json.loads(config.read_text()).get("id2label", {}).values()) or None


def _onnx_settings(file: Path) -> dict[str, Any]:
    """What lies beside an ONNX file. Raises RewardError."""
    if not file.is_file():
        raise RewardError(f"reward classifier: path={file} is no file")
    beside = file.with_name(SETTINGS)
    try:
        settings: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        labels = settings["labels"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RewardError(
            f"reward classifier: {beside} must be a JSON object with the list labels, in the order of the model's "
            f"outputs ({error!r})"
        ) from error
    if not (isinstance(labels, list) and labels and all(isinstance(label, str) for label in labels)):
        raise RewardError(f"reward classifier: labels in {beside} must be a list of strings, got {shown(labels)}")
    if settings.get("outputs", "logits") not in ("logits", "probabilities"):
        raise RewardError(
            f"reward classifier: outputs in {beside} must be logits or probabilities, got {shown(settings['outputs'])}"
        )
    return settings


def _onnx_run(reward: str, file: Path) -> Run:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.use_deterministic_compute = True
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, which share no base class of their own
        raise RewardError(f"reward {reward}: path={file} is no ONNX model that can be run: {error}") from error
    name = session.get_inputs()[0].name
    return lambda pixels: np.asarray(session.run(None, {name: pixels})[0])


def _transformers_run(reward: str, path: str, device: str) -> tuple[Run, list[str]]:
    import torch
    from transformers import AutoModelForImageClassification

    model = from_pretrained(reward, AutoModelForImageClassification, path, device)

    def run(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
        with torch.inference_mode():
            return np.asarray(model(pixel_values=torch.from_numpy(pixels).to(device)).logits.float().cpu())

    return run, [model.config.id2label[row] for row in range(model.config.num_labels)]
