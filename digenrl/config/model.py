"""The model, the adapter that is trained on it, and what it is trained with."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from digenrl.config.section import PositiveInt, Section

#: Kernels of diffusers' attention_dispatch that are exact and can be differentiated.
ATTENTION_BACKENDS = (
    "auto",
    "native",
    "_native_cudnn",
    "_native_efficient",
    "_native_flash",
    "_native_math",
    "flash",
    "flash_hub",
    "_flash_3",
    "_flash_3_hub",
    "xformers",
)


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
    revision: str | None = Field(
        None,
        min_length=1,
        description="Commit, tag or branch of a hub id; null: what the hub's main branch, or the local cache if there "
        "is no network, holds at the start.",
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Type of the frozen base weights; auto: bfloat16 on CUDA, float32 on the CPU. The adapter, its "
        "optimiser, latents and the VAE are float32 in any case.",
    )
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
    gradient_checkpointing: bool | Literal["auto"] = Field(
        "auto",
        description="Recompute activations in the backward pass; auto: if the transformer has 100 million parameters "
        "or more.",
    )
    attention: Literal[ATTENTION_BACKENDS] = Field(  # type: ignore[valid-type]
        "auto",
        description="Attention kernel by diffusers' name; auto: what torch picks. It must have a backward pass.",
    )
    compile: bool = Field(
        False,
        description="Compile the transformer for rollout. The first step is computed both ways: the run ends if they "
        "differ by more than 1e-4 (bfloat16: 2e-2) of their norm.",
    )
    text_encoders: Literal["auto", "keep", "free"] = Field(
        "auto",
        description="keep: text encoders stay in memory, off the device while nothing is encoded; free: all prompts "
        "are encoded at the start, then the encoders are freed; auto: free from 100 million parameters on, unless the "
        "run has more than 2,048 prompts.",
    )
    vae_tiling: bool = Field(
        False, description="Decode in overlapping tiles: less memory, and pictures that differ slightly at the seams."
    )

    def base_dtype(self, device: str) -> Literal["float32", "bfloat16"]:
        """Type of the base weights on a device of this type."""
        if self.dtype == "auto":
            return "float32" if device == "cpu" else "bfloat16"
        return self.dtype


class LoraConfig(Section):
    """The trained adapter."""

    rank: PositiveInt = Field(32, le=1024, description="LoRA rank.")
    alpha: PositiveInt = Field(64, description="LoRA alpha; the update is scaled by alpha / rank.")
    targets: tuple[str, ...] | None = Field(
        None, description="Name suffixes of the adapted layers; null means the family's published list."
    )
