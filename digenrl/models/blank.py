"""A model of a checkpoint's classes and sizes, without its weights and its text encoders.

    blank_model(config, device, transformer={...})   freshly drawn weights, or none at all
    text_encoder_elements(folder)                    numbers in the text encoders that it leaves out

What a unit computes and holds depends on sizes alone, so memory is planned, and speed is measured, without a download.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from digenrl.config import ModelConfig
from digenrl.models.checkpoint import CheckpointError, locate
from digenrl.models.pipeline import PipelineModel, quiet
from digenrl.models.registry import model_class


def blank_model(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    transformer: Mapping[str, object] | None = None,
    mode: AbstractContextManager[object] | None = None,
) -> PipelineModel:
    """Make it.

    Args:
        config: which checkpoint's sizes, in which dtype. The checkpoint must be on this machine.
        device: where.
        transformer: fields of the transformer's configuration that differ.
        mode: in which transformer and VAE are made, such as a FakeTensorMode.

    Raises:
        CheckpointError: there is no such folder, or it holds no pipeline of this family.
    """
    family = model_class(config.family)
    folder = Path(locate(config.path))
    try:
        index = json.loads((folder / "model_index.json").read_bytes())
        scheduler = _class_of(index["scheduler"]).from_pretrained(folder, subfolder="scheduler")
        with mode or nullcontext(), torch.device(device):
            made = _fresh(folder, index, "transformer", transformer or {})
            _narrow(made, getattr(torch, config.base_dtype(torch.device(device).type)))
            vae = _fresh(folder, index, "vae", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"model.path={config.path!r} holds no {config.family} pipeline: {error}") from error
    parts: dict[str, Any] = {name: None for name, kind in index.items() if isinstance(kind, list)}
    settings = {name: kind for name, kind in index.items() if name[0] != "_" and not isinstance(kind, list)}
    with quiet():
        pipeline = family.pipeline_class(
            **{**parts, **settings, "scheduler": scheduler, "transformer": made, "vae": vae}
        )
    tokens = config.max_sequence_length
    if tokens is None and config.family == "sd3" and index.get("text_encoder_3") in (None, [None, None]):
        tokens = 0
    model: PipelineModel = family(pipeline, max_sequence_length=tokens)
    model.settle(config)
    return model


def text_encoder_elements(folder: Path) -> int:
    """How many numbers the text encoders of a saved pipeline hold, from the headers of its files."""
    return sum(math.prod(shape) for path in folder.glob("text_encoder*/*.safetensors") for shape in _shapes(path))


def _class_of(entry: list[str]) -> Any:
    import diffusers

    return getattr(diffusers, entry[1])


def _fresh(folder: Path, index: Mapping[str, Any], part: str, changes: Mapping[str, object]) -> nn.Module:
    kind = _class_of(index[part])
    with quiet():
        found: nn.Module = kind.from_config({**kind.load_config(folder / part), **changes})
    return found


def _narrow(module: nn.Module, dtype: torch.dtype) -> None:
    """To `dtype`, less what its class keeps in float32, as `from_pretrained` does."""
    kept = getattr(module, "_keep_in_fp32_modules", None) or ()
    for name, parameter in module.named_parameters():
        if not set(kept) & set(name.split(".")):
            parameter.data = parameter.data.to(dtype)


def _shapes(path: Path) -> list[list[int]]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
