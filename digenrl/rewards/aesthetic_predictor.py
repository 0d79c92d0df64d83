"""Reward for pictures that people rate as beautiful: an MLP on a CLIP image embedding (LAION's predictor, version 2).

The checkpoint is one safetensors directory: a CLIPVisionModelWithProjection, and beside it the linear layers of the
head as `layers.N.weight` and `layers.N.bias`, without activations in between (the published "linearMSE" head) or with
a ReLU after each but the last (`head_activation: relu` in config.json).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.errors import shown
from digenrl.rewards.base import (
    PromptRecord,
    Reward,
    RewardCard,
    RewardError,
    Score,
    frames_of,
    means_of,
    score_of,
)
from digenrl.rewards.pictures import chunks_of
from digenrl.rewards.pretrained import file_of, from_pretrained, path_problem, preparation_of

_LAYER = re.compile(r"layers\.(\d+)\.(weight|bias)")


class AestheticPredictor(Reward):
    """Predicted mean rating; a video's value is the mean of its frames."""

    name = "aesthetic_predictor"
    card = RewardCard(
        "how beautiful people find it, by LAION's predictor",
        "about 1 to 10, mostly 4 to 7",
        licence="MIT (CLIP), Apache-2.0 (head)",
        weights="`path`: shunk031/aesthetics-predictor-v2-sac-logos-ava1-l14-linearMSE",
    )

    def __init__(self, *, path: str, device: str = "cpu") -> None:
        self.path = path
        self.device = device
        self._model: Any = None

    def problem(self) -> str | None:
        """See `Reward`."""
        return path_problem(self.name, self.path, "config.json")

    def load(self) -> None:
        """See `Reward`."""
        if self._model is not None:
            return
        from transformers import CLIPVisionModelWithProjection

        class Vision(CLIPVisionModelWithProjection):  # type: ignore[no-untyped-call]
            """Without a report about the head's tensors in the same file, which are read beside it."""

            _keys_to_ignore_on_load_unexpected = [r"^layers\."]  # noqa: RUF012 (as the base class declares it)

        self._prepare = preparation_of(self.name, self.path)
        self._head = _head(self.name, self.path, self.device)
        self._model = from_pretrained(self.name, Vision, self.path, self.device)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        if not len(images):
            return []
        import torch

        self.load()
        frames, per_sample = frames_of(images, prompts)
        found: list[NDArray[np.float64]] = []
        with torch.inference_mode():
            for part in chunks_of(len(frames)):
                pixels = torch.from_numpy(self._prepare(frames[part])).to(self.device)
                embeds = torch.nn.functional.normalize(self._model(pixel_values=pixels).image_embeds, dim=-1)
                found.append(self._head(embeds)[:, 0].double().cpu().numpy())
        return [score_of(self.name, mean) for mean in means_of(np.concatenate(found), per_sample)]


def _head(reward: str, path: str, device: str) -> Any:
    """The head's layers, in order. Raises RewardError."""
    import torch
    from safetensors import safe_open

    weights, config = file_of(path, "model.safetensors"), file_of(path, "config.json")
    tensors: dict[int, dict[str, Any]] = {}
    if weights is not None:
        with safe_open(weights, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (it is no mapping)
                if match := _LAYER.fullmatch(key):
                    tensors.setdefault(int(match[1]), {})[match[2]] = file.get_tensor(key)
    if not tensors:
        raise RewardError(
            f"reward {reward}: path={shown(path)} has no model.safetensors with the tensors layers.N.weight and "
            "layers.N.bias of the predictor's head"
        )
    relu = config is not None and json.loads(config.read_text()).get("head_activation") == "relu"
    head = torch.nn.Sequential()
    for index in sorted(tensors):
        layer = torch.nn.Linear(*reversed(tensors[index]["weight"].shape))
        layer.load_state_dict(tensors[index])
        head.extend([torch.nn.ReLU(), layer] if relu and len(head) else [layer])
    return head.requires_grad_(False).to(device)
