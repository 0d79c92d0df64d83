"""The protocol behind which every model family lives.

A family adapter is the only code that knows a family's conventions: prompt templates, latent packing, sigma table,
timestep scaling, guidance, decoding, LoRA targets. The rest of the system sees float32 latents of shape (B, *D),
sigmas and velocities. Rollout and training call the same `velocity`.

Shapes: B batch, T denoising steps, D latent shape of one sample, L text tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

#: Encoded prompts by tensor name, batch axis first. What is inside is the family's business.
Embeddings = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Geometry:
    """Size of what is generated. `frames` is 1 for images."""

    height: int
    width: int
    frames: int = 1


@dataclass(frozen=True)
class Decoded:
    """Decoded samples.

    Attributes:
        images: (B, F, H, W, 3) uint8 on the CPU; F is 1 for images.
        finite: (B,) bool on the CPU. False where the decoder produced a NaN or infinity: such a sample is a failed
            sample, never a black image.
    """

    images: torch.Tensor
    finite: torch.Tensor


class FlowModel(Protocol):
    """One loaded checkpoint of one family, base weights frozen."""

    family: str
    transformer: nn.Module
    #: Name suffixes of the linear layers that get a LoRA by default.
    lora_targets: tuple[str, ...]
    #: In which the family's own pipeline draws initial noise, in the order of `latent_shape`.
    noise_dtype: torch.dtype

    device: torch.device

    def encode(self, prompts: Sequence[str]) -> Embeddings:
        """Encode B prompts as the family's own pipeline does."""

    @property
    def frees_text_encoders(self) -> bool:
        """Whether all prompts of a run are to be encoded at its start; see `model.text_encoders`."""

    def free_text_encoders(self) -> None:
        """Give their memory back; from here on nothing can be encoded."""

    def encoding_key(self) -> str:
        """Hash of what embeddings depend on beside the prompt."""

    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        """Shape D of one sample's latent, (C, h, w) or (C, f, h, w): before any packing into tokens."""

    def sigmas(self, num_steps: int, geometry: Geometry) -> torch.Tensor:
        """(T+1,) float32 sigma table of the checkpoint's scheduler, last value 0."""

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Guided velocity.

        Args:
            latents: (B, *D) float32.
            sigma: (B,) float32, the noise level of each sample.
            embeddings: as returned by `encode`, batch axis B.
            guidance_scale: of classifier-free guidance, where values <= 1 mean none, or the number that a
                guidance-distilled transformer takes as an input.

        Returns:
            (B, *D) float32.
        """

    def rollout(self) -> AbstractContextManager[None]:
        """Within it nothing is differentiated, and `velocity` may be computed by a compiled transformer."""

    def decode(self, latents: torch.Tensor) -> Decoded:
        """Decode (B, *D) clean latents in float32."""
