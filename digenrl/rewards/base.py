"""The protocol behind which every reward lives.

A reward turns images and prompt records into one result per sample: a value, or the reason why there is none. A
missing reward is never 0: 0 is a value.

    PromptRecord          one prompt and what rewards need to know of it
    Scored, Failed        a value, or why there is none
    Reward, RewardCard    what a reward implements, and what it says of itself
    mean_reward           of the values there are
    values_by_reward      the same values, each reward alone
    score_of, frames_of, means_of, field_of   for those who implement it
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from digenrl.config.errors import ConfigError


@dataclass(frozen=True)
class PromptRecord:
    """One prompt.

    Attributes:
        uid: identity of the prompt; equal texts with different uids are different prompts.
        text: what the text encoders see.
        fields: what rewards need beyond the text, e.g. {"target": "042"} for OCR.
        rewards: those that its pictures are scored by; None: all rewards of the run.
    """

    uid: str
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)
    rewards: tuple[str, ...] | None = None

    def scored_by(self, reward: str) -> bool:
        """Whether a reward of the run has a say in its pictures."""
        return self.rewards is None or reward in self.rewards


@dataclass(frozen=True)
class Scored:
    """A finite reward value.

    Attributes:
        value: the reward.
        parts: of a mix, the value of each reward by name, before weighting.
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """No value, and why. The sample is left out of its group's statistics and of the update."""

    reason: str


Score = Scored | Failed


@dataclass(frozen=True)
class RewardCard:
    """What people want to know before they use a reward.

    Attributes:
        says: what it measures, in a few words.
        range: of its values.
        media: "images", or "images, video".
        licence: of its weights; "none" if it has none.
        weights: where they come from.
    """

    says: str
    range: str
    media: str = "images, video"
    licence: str = "none"
    weights: str = "none needed"


class Reward(ABC):
    """One scorer.

    Its constructor takes, by keyword, the settings of `RewardConfig` it has a use for; those without a default must be
    configured. It reads no weights and asks no server: that is for `load`.

    Attributes:
        name: what it is called in the run.
        card: what it says of itself.
    """

    name: str
    card: ClassVar[RewardCard]

    def problem(self) -> str | None:
        """What makes it unusable from here, found without loading weights; None if nothing is known."""
        return None

    def load(self) -> None:  # noqa: B027 (nothing to load is the common case)
        """Load what scoring needs, where scoring will happen. Repeating it is free.

        Raises:
            RewardError: it cannot be loaded.
        """

    def validate(self, prompts: Sequence[PromptRecord]) -> None:  # noqa: B027 (most take every prompt)
        """Refuse, before a run starts, prompts this reward could not score.

        Raises:
            ValueError: names the first such record, what it lacks and what was expected.
        """

    @abstractmethod
    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> Sequence[Score]:
        """Score B samples. It may be called before `load`, which then happens first.

        Args:
            images: (B, F, H, W, 3) uint8; F is 1 for images.
            prompts: B records, in the same order.

        Returns:
            B results, in the same order.
        """


class RewardError(ConfigError):
    """A reward that cannot be used, in a sentence."""


def mean_reward(scores: Iterable[Score]) -> float:
    """Mean of the values there are, whatever their order; 0 if there are none."""
    values = [score.value for score in scores if isinstance(score, Scored)]
    return math.fsum(values) / len(values) if values else 0.0


def values_by_reward(scores: Iterable[Score]) -> dict[str, list[float]]:
    """Values of each reward alone, before weighting and normalising, by its name in alphabetical order.

    A reward has those of the samples that it scores and that no reward failed.
    """
    values: dict[str, list[float]] = {}
    for score in scores:
        for name, value in score.parts.items() if isinstance(score, Scored) else ():
            values.setdefault(name, []).append(value)
    return dict(sorted(values.items()))


def score_of(name: str, value: float) -> Score:
    """A finite value as Scored; a NaN or an infinity is no value and becomes Failed, named after the reward."""
    value = float(value)
    return Scored(value) if math.isfinite(value) else Failed(f"reward {name} returned the non-finite value {value}")


def frames_of(images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> tuple[NDArray[np.uint8], int]:
    """Frames of a batch of samples as plain pictures.

    Returns:
        (B * F, H, W, 3) uint8, the frames of a sample side by side, and F.

    Raises:
        ValueError: `images` is not (B, F, H, W, 3) uint8, or B is not the number of prompts.
    """
    if images.ndim != 5 or images.shape[-1] != 3 or images.dtype != np.uint8:
        raise ValueError(f"images must be (B, F, H, W, 3) uint8, got {images.shape} {images.dtype}")
    if len(images) != len(prompts):
        raise ValueError(f"{len(images)} samples were given with {len(prompts)} prompts; expected one prompt each")
    return images.reshape(-1, *images.shape[2:]), images.shape[1]


def means_of(values: NDArray[np.floating], per_sample: int) -> list[float]:
    """Mean over the frames of each sample: (B * F,) values, frames of a sample side by side -> B means."""
    return [float(mean) for mean in np.asarray(values, np.float64).reshape(-1, per_sample).mean(axis=1)]


def field_of(reward: str, prompt: PromptRecord, name: str, expected: str) -> str:
    """What a prompt record says in one of its fields.

    Args:
        reward: who asks, for the error.
        prompt: the record.
        name: of the field.
        expected: what it should hold, in words.

    Raises:
        ValueError: the record has no such field, or it is blank.
    """
    value = prompt.fields.get(name)
    if value is None:
        have = ", ".join(sorted(prompt.fields)) or "none"
        raise ValueError(
            f"reward {reward}: prompt {prompt.uid!r} has no field {name!r}; expected {expected} (its fields: {have})"
        )
    if not value.strip():
        raise ValueError(f"reward {reward}: prompt {prompt.uid!r} has the blank {name} {value!r}; expected {expected}")
    return value
