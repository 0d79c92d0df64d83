"""The model, the adapter that is trained on it, and what it is trained with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from digenrl.config.section import PositiveInt, Section


class ModelConfig(Section):
    """Which checkpoint, and what it generates."""

    family: Literal["sd3", "flux", "qwen", "wan", "hunyuan"] = Field("sd3", description="Model family.")
    path: str = Field(
        "package:tiny-sd3",
        description="Diffusers pipeline: a directory, a hub id, package:NAME for one that ships with DigenRL, or "
        "tiny:FAMILY for a tiny random one of a family.",
    )
    height: PositiveInt = Field(12, le=8192, description="Height of generated samples in pixels.")
    width: PositiveInt = Field(24, le=8192, description="Width of generated samples in pixels.")
    frames: PositiveInt = Field(1, le=1025, description="Frames of generated samples; 1 for pictures.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the frozen base weights.")
    guidance_scale: float = Field(
        1.0,
        ge=0,
        description="Guidance in rollout, training and evaluation: classifier-free, where <= 1 turns it off, or the "
        "value that a guidance-distilled model (flux, hunyuan) is given.",
    )
    max_sequence_length: int | None = Field(
        None,
        ge=0,
        le=512,
        description="Tokens of the long part of a prompt; null: as in the family's pipeline, or none if an sd3 "
        "checkpoint has no T5.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")


class LoraConfig(Section):
    """The trained adapter."""

    rank: PositiveInt = Field(32, le=1024, description="LoRA rank.")
    alpha: PositiveInt = Field(64, description="LoRA alpha; the update is scaled by alpha / rank.")
    targets: tuple[str, ...] | None = Field(
        None, description="Name suffixes of the adapted layers; null means the family's published list."
    )
