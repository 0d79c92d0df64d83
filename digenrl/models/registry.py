"""Model families by name. A new family is one file and one line here.

load_model(config, device) -> FlowModel
"""

from __future__ import annotations

from importlib import import_module

import torch

from digenrl.config import ModelConfig
from digenrl.config_errors import ConfigError, did_you_mean
from digenrl.models.base import FlowModel

#: Family -> module with a function `load(config, device) -> FlowModel`. Imported on use: diffusers takes seconds.
FAMILIES: dict[str, str] = {
    "sd3": "digenrl.models.sd3",
}


def load_model(config: ModelConfig, device: torch.device | str = "cpu") -> FlowModel:
    """Load a checkpoint with frozen weights onto `device`.

    Raises:
        ConfigError: unknown family, or (CheckpointError) a checkpoint that cannot be found or used.
    """
    if config.family not in FAMILIES:
        raise ConfigError(
            f"model.family={config.family!r} is not a known model family"
            f"{did_you_mean(config.family, FAMILIES, 'known families')}"
        )
    model: FlowModel = import_module(FAMILIES[config.family]).load(config, torch.device(device))
    return model
