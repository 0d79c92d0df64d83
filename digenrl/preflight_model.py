"""Does the checkpoint exist, can it generate the size, and does it have the layers to adapt? Answered without torch.

    check_model(model, lora, problems, notes)     appends sentences

Sizes come from the pipeline's JSON files and layer names from the headers of its safetensors files
(https://huggingface.co/docs/safetensors/index#format: 8 bytes of length, then JSON). A checkpoint on the hub that is
not in the local cache cannot be looked into: the hub is asked whether it has it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from digenrl.config import LoraConfig, ModelConfig
from digenrl.config.errors import nearest, shown
from digenrl.models.checkpoint import CheckpointError, locate
from digenrl.models.registry import family_of
from digenrl.preflight_hub import hub_cache, hub_problem

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LONGEST_HEADER_BYTES = 100_000_000


def check_model(
    model: ModelConfig, lora: LoraConfig | None, problems: list[str], notes: list[str], *, here: bool = True
) -> None:
    """Append what is wrong with `model` and `lora.targets`, and notes about what cannot be known yet.

    Args:
        model: which checkpoint.
        lora: which of its layers; None: all.
        problems: takes what cannot work.
        notes: takes what may not work.
        here: whether this machine loads the model. Others may reach a hub, or have a cache, that this one does not.
    """
    try:
        place = locate(model.path)
    except CheckpointError as error:
        problems.append(str(error))
        return
    folder = Path(place) if Path(place).is_dir() else _cached(place)
    if model.revision is not None and Path(place).is_dir():
        problems.append(
            f"model.revision={shown(model.revision)} is of a hub id, but model.path={model.path} is a folder"
        )
    if folder is not None:
        problems += _folder_problems(model, lora, folder)
    elif not _HUB_ID.fullmatch(place):
        problems.append(f"model.path={shown(place)} is no directory and no possible hub id OWNER/NAME")
    elif os.environ.get("HF_HUB_OFFLINE", "0").upper() in {"1", "TRUE", "YES", "ON"}:
        problems.append(f"model.path={place} is not in the local hub cache {hub_cache()}, and HF_HUB_OFFLINE is set")
    elif (problem := hub_problem(place)) is not None:
        (problems if here else notes).append(problem)
    else:
        notes.append(f"model.path={place} is not in the local hub cache: it will be downloaded")


def _cached(hub_id: str) -> Path | None:
    """The newest snapshot of a hub id in the local cache."""
    snapshots = (hub_cache() / f"models--{hub_id.replace('/', '--')}" / "snapshots").glob("*/model_index.json")
    newest = max(snapshots, key=lambda index: index.stat().st_mtime, default=None)
    return newest.parent if newest else None


def _folder_problems(model: ModelConfig, lora: LoraConfig | None, folder: Path) -> list[str]:
    try:
        vae, transformer = (_read_json(folder / part / "config.json") for part in ("vae", "transformer"))
        found = _read_json(folder / "model_index.json").get("_class_name")
    except (OSError, ValueError) as error:
        return [f"model.path={model.path} must be a diffusers pipeline saved by save_pretrained: {error}"]
    expected = family_of(model.family).pipeline
    if found is not None and found != expected:
        return [f"model.family={model.family} needs a {expected}, but model.path={model.path} holds a {found}"]
    return _size_problems(model, vae, transformer) + _target_problems(model, lora, folder / "transformer")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return value


def _size_problems(model: ModelConfig, vae: dict[str, Any], transformer: dict[str, Any]) -> list[str]:
    """Whole patches, and no more of them than there are positions."""
    try:
        rule = family_of(model.family).sizes(vae, transformer)
    except (KeyError, TypeError) as error:
        return [f"model.path={model.path} holds no {model.family} checkpoint: its sizes cannot be read ({error!r})"]
    return rule.problems(model.height, model.width, model.frames, model.path)


def _target_problems(model: ModelConfig, lora: LoraConfig | None, transformer: Path) -> list[str]:
    """Every target must be the end of some layer's name: a target that binds nothing would train nothing."""
    if lora is None or lora.targets is None:
        return []
    if not lora.targets:
        return ["lora.targets must name at least one layer, got []; null means the family's published list"]
    try:
        layers = set(_layers(transformer))
    except (OSError, ValueError) as error:
        return [f"model.path={model.path}: cannot read the layers of its transformer: {error}"]
    problems = []
    for target in lora.targets:
        if not any(layer == target or layer.endswith(f".{target}") for layer in layers):
            depth = target.count(".") + 1
            close = nearest(target, sorted({".".join(layer.split(".")[-depth:]) for layer in layers}))
            hint = f"; did you mean {close}?" if close else ""
            problems.append(f"lora.targets: {shown(target)} is the name of no layer of {model.path}{hint}")
    return problems


def _layers(transformer: Path) -> Iterator[str]:
    """Names of the linear layers: modules whose weight is a matrix."""
    shards = sorted(transformer.glob("*.safetensors"))
    if not shards:
        raise ValueError(f"{transformer} holds no safetensors file")
    for shard in shards:
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER_BYTES:
                raise ValueError(f"{shard} is not a safetensors file")
            header = json.loads(file.read(length))
        for name, entry in header.items():
            if name.endswith(".weight") and len(entry["shape"]) == 2:
                yield name.removesuffix(".weight")
