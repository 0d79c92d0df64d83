"""Rewards that compare picture and prompt by the cosine of two CLIP embeddings.

    ClipScore   100 * cosine (Hessel et al. 2021, arXiv 2104.08718, without its clip at 0)
    PickScore   the checkpoint's own scale * cosine (Kirstain et al. 2023, arXiv 2305.01569)
    ClipPair    a CLIP model by path: pictures and texts -> cosines

The prompt's text is cut to what the text encoder takes, 77 tokens for published ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.rewards.base import PromptRecord, Reward, RewardCard, Score, frames_of, means_of, score_of
from digenrl.rewards.pictures import chunks_of
from digenrl.rewards.pretrained import from_pretrained, path_problem, preparation_of, tokenizer_of


class ClipPair:
    """A CLIP model with both of its encoders. `reward`, `path` and `device` as in `from_pretrained`."""

    def __init__(self, reward: str, path: str, device: str) -> None:
        from transformers import CLIPModel

        self.prepare = preparation_of(reward, path)
        self.tokenizer = tokenizer_of(reward, path)
        self.model: Any = from_pretrained(reward, CLIPModel, path, device)
        self.device = device

    @property
    def scale(self) -> float:
        """What the model multiplies cosines by."""
        return float(self.model.logit_scale.exp())

    def cosines(self, pictures: NDArray[np.uint8], texts: Sequence[str]) -> NDArray[np.float64]:
        """Cosine of each picture with its text.

        Args:
            pictures: (N, H, W, 3) uint8.
            texts: N.

        Returns:
            (N,).
        """
        import torch

        distinct = list(dict.fromkeys(texts))
        rows = [distinct.index(text) for text in texts]
        tokens = self.tokenizer(
            distinct,
            padding=True,
            truncation=True,
            max_length=self.model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        ).to(self.device)
        found: list[NDArray[np.float64]] = []
        with torch.inference_mode():
            for part in chunks_of(len(pictures)):
                pixels = torch.from_numpy(self.prepare(pictures[part])).to(self.device)
                out = self.model(pixel_values=pixels, **tokens)
                cosines = (out.image_embeds * out.text_embeds[rows[part]]).sum(dim=-1)
                found.append(cosines.double().cpu().numpy())
        return np.concatenate(found)


class _ClipReward(Reward):
    """What both have in common; a video's value is the mean of its frames."""

    def __init__(self, *, path: str, device: str = "cpu") -> None:
        self.path = path
        self.device = device
        self._pair: ClipPair | None = None

    def problem(self) -> str | None:
        """See `Reward`."""
        return path_problem(self.name, self.path, "config.json")

    def load(self) -> None:
        """See `Reward`."""
        self._pair = self._pair or ClipPair(self.name, self.path, self.device)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        if not len(images):
            return []
        self.load()
        assert self._pair is not None
        frames, per_sample = frames_of(images, prompts)
        cosines = self._pair.cosines(frames, [prompt.text for prompt in prompts for _ in range(per_sample)])
        return [score_of(self.name, self._factor(self._pair) * mean) for mean in means_of(cosines, per_sample)]

    @abstractmethod
    def _factor(self, pair: ClipPair) -> float:
        """What the cosine is multiplied by."""


class ClipScore(_ClipReward):
    """100 times the cosine of picture and prompt."""

    name = "clip_score"
    card = RewardCard(
        "picture against prompt, by CLIP",
        "[-100, 100], mostly 15 to 35",
        licence="of the checkpoint; MIT for openai/clip-vit-large-patch14",
        weights="`path`: a CLIPModel, e.g. openai/clip-vit-large-patch14",
    )

    def _factor(self, pair: ClipPair) -> float:
        return 100.0


class PickScore(_ClipReward):
    """The cosine of picture and prompt, by a CLIP trained on people's choices, times the scale it has learned."""

    name = "pickscore"
    card = RewardCard(
        "what people prefer, by PickScore",
        "±its scale, mostly 15 to 25",
        licence="MIT",
        weights="`path`: yuvalkirstain/PickScore_v1",
    )

    def _factor(self, pair: ClipPair) -> float:
        return pair.scale
