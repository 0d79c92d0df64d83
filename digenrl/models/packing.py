"""2 x 2 packing: how FLUX and Qwen-Image make tokens of a latent picture.

The rest of the system sees latents as (B, C, h, w): they know their own height and width, noise is drawn in the order
in which the pipelines draw it, and a log-prob, being a mean over elements, does not depend on their order.
"""

from __future__ import annotations

import torch


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, C, h, w) -> (B, (h/2)(w/2), 4C): each 2 x 2 square becomes one token, rows first."""
    batch, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, (height // 2) * (width // 2), 4 * channels)


def unpack(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """(B, (h/2)(w/2), 4C) -> (B, C, h, w), for a latent of `height` x `width` elements."""
    batch, _, channels = tokens.shape
    squares = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)
