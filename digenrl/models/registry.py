"""Model families by name. A new family is one file, its sizes and one line here.

load_model(config, device) -> FlowModel
save_lora(family, adapter, lora, directory)     as diffusers takes it; loads no model
save_transformer(config, weights, directory)    likewise, of `method: full`; read_transformer(directory) reads it
family_of(name)                                 what is known of a family without loading anything
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from digenrl.config import LoraConfig, ModelConfig
from digenrl.config.errors import ConfigError, did_you_mean
from digenrl.models.sizes import PartConfig, SizeRule, of_flux, of_hunyuan, of_qwen, of_sd3, of_wan

if TYPE_CHECKING:  # who only looks a family up should not wait for torch
    import torch

    from digenrl.models.base import FlowModel


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        model: module:class of its PipelineModel. Imported on use: diffusers takes seconds.
        pipeline: name of the diffusers class of its checkpoints.
        sizes: what a checkpoint can generate, from the configurations of its VAE and its transformer.
        distilled: guidance is an input of the transformer, not a second pass through it.
        pictures: it generates pictures, not videos.
    """

    model: str
    pipeline: str
    sizes: Callable[[PartConfig, PartConfig], SizeRule]
    distilled: bool = False
    pictures: bool = True


FAMILIES: dict[str, Family] = {
    "sd3": Family("digenrl.models.sd3:SD3Model", "StableDiffusion3Pipeline", of_sd3),
    "flux": Family("digenrl.models.flux:FluxModel", "FluxPipeline", of_flux, distilled=True),
    "qwen": Family("digenrl.models.qwen:QwenModel", "QwenImagePipeline", of_qwen),
    "wan": Family("digenrl.models.wan:WanModel", "WanPipeline", of_wan, pictures=False),
    "hunyuan": Family(
        "digenrl.models.hunyuan:HunyuanModel", "HunyuanVideoPipeline", of_hunyuan, distilled=True, pictures=False
    ),
}


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> FlowModel:
    """Load a checkpoint with frozen weights onto `device`.

    Raises:
        ConfigError: unknown family, or (CheckpointError) a checkpoint that cannot be found or used.
    """
    import torch

    model: FlowModel = model_class(config.family).load(config, torch.device(device))
    return model


def save_lora(family: str, adapter: Mapping[str, torch.Tensor], lora: LoraConfig, directory: Path) -> None:
    """Write an adapter so that the family's diffusers pipeline takes it with `load_lora_weights(directory)`."""
    model_class(family).save_lora(adapter, lora, directory)


def save_transformer(config: ModelConfig, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write a checkpoint's transformer with other weights, as diffusers' `from_pretrained(directory)` takes it."""
    from digenrl.models import transformer

    transformer.save(config, weights, directory)


def read_transformer(directory: Path) -> dict[str, torch.Tensor]:
    """Weights of such a folder in float32, by parameter name."""
    from digenrl.models import transformer

    return transformer.read(directory)


def family_of(name: str) -> Family:
    """The family of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in FAMILIES:
        raise ConfigError(
            f"model.family={name!r} is not a known model family{did_you_mean(name, FAMILIES, 'known families')}"
        )
    return FAMILIES[name]


def model_class(name: str) -> Any:
    """The PipelineModel of a family.

    Raises:
        ConfigError: there is none of this name.
    """
    module, _, attribute = family_of(name).model.partition(":")
    return getattr(import_module(module), attribute)
