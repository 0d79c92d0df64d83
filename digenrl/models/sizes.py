"""What a checkpoint can generate, read from the configurations of its VAE and transformer. Needs no torch.

    SizeRule               which sizes, and the latent and token counts of one
    of_sd3, of_flux, ...   the rule of a checkpoint of each family

A pipeline rounds a size it cannot generate to one it can. A reward or a seed would then belong to another picture than
was asked for, so here such a size is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: The parsed `config.json` of a part of a pipeline.
PartConfig = Mapping[str, Any]


@dataclass(frozen=True)
class SizeRule:
    """The sizes a checkpoint generates.

    Attributes:
        channels: of the latent.
        scale: pixels per latent element along a side.
        patch: latent elements per token along a side.
        frame_scale: frames per latent frame, the first one apart; None: pictures only.
        largest: most pixels a side; None: no limit.
    """

    channels: int
    scale: int
    patch: int
    frame_scale: int | None = None
    largest: int | None = None

    def problems(self, height: int, width: int, frames: int, checkpoint: str = "this checkpoint") -> list[str]:
        """What keeps `checkpoint` from generating samples of this size, in sentences that name the field."""
        unit, found = self.scale * self.patch, []
        for name, value in (("height", height), ("width", width)):
            if value % unit:
                found.append(
                    f"model.{name} must be a multiple of {unit} for {checkpoint} (VAE factor {self.scale} x patch "
                    f"{self.patch}), got {value}; the nearest is {max(unit, round(value / unit) * unit)}"
                )
            elif self.largest is not None and value > self.largest:
                found.append(f"model.{name} must be at most {self.largest} for {checkpoint}, got {value}")
        if self.frame_scale is None and frames != 1:
            found.append(f"model.frames must be 1 for {checkpoint}, which generates pictures, got {frames}")
        elif self.frame_scale is not None and (frames - 1) % self.frame_scale:
            nearest = round((frames - 1) / self.frame_scale) * self.frame_scale + 1
            found.append(
                f"model.frames must be 1 more than a multiple of {self.frame_scale} for {checkpoint}, got {frames}; "
                f"the nearest is {nearest}"
            )
        return found

    def latent_shape(self, height: int, width: int, frames: int) -> tuple[int, ...]:
        """(C, h, w) of a picture or (C, f, h, w) of a video, for a size without problems."""
        time = () if self.frame_scale is None else ((frames - 1) // self.frame_scale + 1,)
        return (self.channels, *time, height // self.scale, width // self.scale)

    def tokens(self, height: int, width: int, frames: int) -> int:
        """Latent tokens of one sample."""
        _, *time, rows, columns = self.latent_shape(height, width, frames)
        return (rows // self.patch) * (columns // self.patch) * (time[0] if time else 1)

    def pixels(self, latent_shape: tuple[int, ...]) -> int:
        """Pixels of all frames of a sample whose latent has this shape."""
        _, *time, rows, columns = latent_shape
        frames = (time[0] - 1) * (self.frame_scale or 1) + 1 if time else 1
        return frames * rows * columns * self.scale**2


def of_sd3(vae: PartConfig, transformer: PartConfig) -> SizeRule:
    """Positions are a table, which ends somewhere."""
    scale, patch = _scale_of_blocks(vae), transformer["patch_size"]
    largest = transformer.get("pos_embed_max_size")
    return SizeRule(transformer["in_channels"], scale, patch, largest=largest and largest * scale * patch)


def of_flux(vae: PartConfig, transformer: PartConfig) -> SizeRule:
    """The pipeline packs 2 x 2 latent elements into a token; the transformer's own `patch_size` is 1."""
    return SizeRule(transformer["in_channels"] // 4, _scale_of_blocks(vae), 2)


def of_qwen(vae: PartConfig, transformer: PartConfig) -> SizeRule:
    """The same packing; the VAE halves a side as often as it lists whether time is halved too."""
    return SizeRule(transformer["in_channels"] // 4, 2 ** len(vae["temperal_downsample"]), 2)


def of_wan(vae: PartConfig, transformer: PartConfig) -> SizeRule:
    """Patches are of one frame. The VAEs of Wan2.1 were published before their factors became fields."""
    scale, frame_scale = vae.get("scale_factor_spatial", 8), vae.get("scale_factor_temporal", 4)
    return SizeRule(transformer["in_channels"], scale, transformer["patch_size"][1], frame_scale)


def of_hunyuan(vae: PartConfig, transformer: PartConfig) -> SizeRule:
    """Patches are of one frame."""
    scale, frame_scale = vae["spatial_compression_ratio"], vae["temporal_compression_ratio"]
    return SizeRule(transformer["in_channels"], scale, transformer["patch_size"], frame_scale)


def _scale_of_blocks(vae: PartConfig) -> int:
    scale: int = 2 ** (len(vae["block_out_channels"]) - 1)
    return scale
