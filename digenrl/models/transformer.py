"""The transformer of a checkpoint as a folder of its own, which diffusers' `from_pretrained` takes.

    save(config, weights, directory)     the checkpoint's transformer with trained weights in it
    read(directory) -> weights           in float32, by parameter name

Weights are saved in the dtype the run computes in (`model.dtype`): what it drew its samples with, and half the size in
bfloat16. The float32 weights are in the run's checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoModel

from digenrl.config import ModelConfig
from digenrl.models.checkpoint import locate
from digenrl.models.pipeline import quiet


@torch.no_grad()
def save(config: ModelConfig, weights: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write `config.json` and safetensors files.

    Args:
        config: names the checkpoint, of which everything but the weights is taken.
        weights: all parameters by name, as `digenrl.policy.Policy` names them.
        directory: is created if missing.

    Raises:
        ValueError: the weights are not those of this transformer.
    """
    transformer = _load(locate(config.path), dtype=getattr(torch, config.dtype), subfolder="transformer")
    parameters = dict(transformer.named_parameters())
    if odd := sorted(parameters.keys() ^ weights.keys()):
        raise ValueError(f"these are not the weights of {config.path}: {odd[0]!r} is in one of them only")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    transformer.save_pretrained(directory)


def read(directory: Path) -> dict[str, torch.Tensor]:
    """What `save` wrote."""
    return {name: p.detach().float() for name, p in _load(str(directory), dtype=None).named_parameters()}


def _load(place: str, *, dtype: torch.dtype | None, **where: str) -> Any:
    with quiet():
        return AutoModel.from_pretrained(place, torch_dtype=dtype, **where)  # type: ignore[no-untyped-call]
