"""What diffusers draws, as README.md says it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def drawn_by(pipeline: Any, num_steps: int) -> np.ndarray:
    """(12, 24, 3) int: the prompt "042" from seed 1."""
    picture = pipeline(
        "042",
        num_inference_steps=num_steps,
        guidance_scale=1,
        height=12,
        width=24,
        max_sequence_length=0,
        generator=torch.Generator().manual_seed(1),
    ).images[0]
    return np.asarray(picture).astype(int)
