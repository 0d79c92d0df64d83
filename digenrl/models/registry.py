"""Model families by name. A new family is one file and one line here.

load_model(config, device) -> FlowModel
save_lora(family, adapter, lora, directory)     as diffusers takes it; loads no model
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from digenrl.config import LoraConfig, ModelConfig
from digenrl.config.errors import ConfigError, did_you_mean

if TYPE_CHECKING:  # who only looks a family up should not wait for torch
    import torch

    from digenrl.models.base import FlowModel

#: Family -> module with `load(config, device) -> FlowModel` and `save_lora(adapter, lora, directory)`. Imported on
#: use: diffusers takes seconds.
FAMILIES: dict[str, str] = {
    "sd3": "digenrl.models.sd3",
}


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> FlowModel:
    """Load a checkpoint with frozen weights onto `device`.

    Raises:
        ConfigError: unknown family, or (CheckpointError) a checkpoint that cannot be found or used.
    """
    import torch

    model: FlowModel = _family(config.family).load(config, torch.device(device))
    return model


def save_lora(family: str, adapter: Mapping[str, torch.Tensor], lora: LoraConfig, directory: Path) -> None:
    """Write an adapter so that the family's diffusers pipeline takes it with `load_lora_weights(directory)`."""
    _family(family).save_lora(adapter, lora, directory)


def _family(name: str) -> ModuleType:
    if name not in FAMILIES:
        raise ConfigError(
            f"model.family={name!r} is not a known model family{did_you_mean(name, FAMILIES, 'known families')}"
        )
    return import_module(FAMILIES[name])
