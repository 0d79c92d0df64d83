"""The protocol behind which every reward lives.

A reward turns images and prompt records into one result per sample: a value, or the reason why there is none. A
missing reward is never 0: 0 is a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PromptRecord:
    """One prompt.

    Attributes:
        uid: identity of the prompt; equal texts with different uids are different prompts.
        text: what the text encoders see.
        fields: what rewards need beyond the text, e.g. {"target": "042"} for OCR.
    """

    uid: str
    text: str
    fields: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Scored:
    """A finite reward value."""

    value: float


@dataclass(frozen=True)
class Failed:
    """No value, and why. The sample is left out of its group's statistics and of the update."""

    reason: str


Score = Scored | Failed


class Reward(Protocol):
    """One scorer, ready to use."""

    name: str

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples.

        Args:
            images: (B, F, H, W, 3) uint8; F is 1 for images.
            prompts: B records, in the same order.

        Returns:
            B results, in the same order.
        """
