"""Loading what a reward needs from a directory or the hub. Nothing is unpickled: weights are safetensors only.

from_pretrained(...)    a transformers model, frozen
file_of(...)            one file of a checkpoint
preparation_of(...)     how its pictures are prepared
path_problem(...)       why a path cannot be right, found without the network
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from digenrl.config.errors import nearest, shown
from digenrl.rewards.base import RewardError
from digenrl.rewards.pictures import ImagePreparation

T = TypeVar("T")

#: Characters of a library's sentence that are passed on.
_LONGEST = 200


def from_pretrained(reward: str, model_class: Any, path: str, device: str) -> Any:
    """A frozen model in evaluation mode.

    Args:
        reward: who asks, for the error.
        model_class: with a `from_pretrained`.
        path: a directory saved by `save_pretrained`, or a hub id.
        device: "cpu" or "cuda".

    Raises:
        RewardError: it cannot be loaded.
    """
    model = _loaded(reward, path, lambda: model_class.from_pretrained(_place(path), use_safetensors=True))
    return model.eval().requires_grad_(False).to(device)


def tokenizer_of(reward: str, path: str) -> Any:
    """The tokenizer of a checkpoint. Raises RewardError."""
    from transformers import AutoTokenizer

    return _loaded(reward, path, lambda: AutoTokenizer.from_pretrained(_place(path)))


def preparation_of(reward: str, path: str) -> ImagePreparation:
    """How a checkpoint wants its pictures. Raises RewardError."""
    settings = _json_of(path, "preprocessor_config.json")
    if settings is None:
        # Where a newer transformers saved image processor and tokenizer together.
        settings = (_json_of(path, "processor_config.json") or {}).get("image_processor")
    if settings is None:
        raise RewardError(
            f"reward {reward}: path={shown(path)} has no preprocessor_config.json; copy the model's there"
        )
    try:
        return ImagePreparation.of(settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise RewardError(f"reward {reward}: preprocessor_config.json of path={shown(path)}: {error}") from error


def file_of(path: str, name: str) -> Path | None:
    """One file of a directory or of a hub id, downloaded if need be; None if there is no such file."""
    local = Path(path).expanduser()
    if local.exists():
        return local / name if (local / name).is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        path, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False
    )
    return None if found is None else Path(found)


def path_problem(reward: str, path: str, *wanted: str) -> str | None:
    """A sentence if a path is neither a hub id nor a directory with one of the wanted files.

    Args:
        reward: who asks.
        path: as configured.
        wanted: names of files of which a directory must hold one.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        if any((local / name).is_file() for name in wanted):
            return None
        return f"reward {reward}: the directory path={shown(path)} holds no {' or '.join(wanted)}"
    owner, slash, name = path.partition("/")
    if slash and name and "/" not in name and owner not in {"", ".", "..", "~"}:
        return None
    near = nearest(local.name, [p.name for p in local.parent.iterdir()]) if local.parent.is_dir() else None
    hint = f"; did you mean {local.parent / near}?" if near else ""
    return f"reward {reward}: path={shown(path)} is no directory and no hub id OWNER/NAME{hint}"


def _place(path: str) -> str:
    """A directory with its ~ resolved; a hub id as it is."""
    local = Path(path).expanduser()
    return str(local) if local.exists() else path


def _json_of(path: str, name: str) -> dict[str, Any] | None:
    found = file_of(path, name)
    return None if found is None else json.loads(found.read_text(encoding="utf-8"))


def _loaded(reward: str, path: str, load: Callable[[], T]) -> T:
    try:
        return load()
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)[:_LONGEST]
        raise RewardError(
            f"reward {reward}: path={shown(path)} could not be loaded; expected a directory saved by save_pretrained "
            f"with safetensors weights, or such a hub id: {reason}"
        ) from error
