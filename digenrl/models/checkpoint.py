"""Where a checkpoint lives: a directory, a hub id, `package:NAME` for one that ships with DigenRL, or `tiny:NAME` for a
tiny random one that is made on the spot.

locate(path)       what to hand to `from_pretrained`
unloadable(...)    the error of a checkpoint that `from_pretrained` did not take
CheckpointError    a checkpoint that cannot be found or used, in a sentence
"""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

from digenrl.config.errors import ConfigError, did_you_mean, nearest

PACKAGE_PREFIX = "package:"
TINY_PREFIX = "tiny:"
#: Characters of a library's sentence that are passed on.
LONGEST = 200


class CheckpointError(ConfigError):
    """A checkpoint cannot be found, read, or does not fit what it is asked for."""


def locate(path: str) -> str:
    """Turn `model.path` into something `from_pretrained` takes.

    A hub id is returned as it is; whether it exists is found out when it is loaded. A tiny checkpoint is built, in a
    second, if it is not in the cache (see `digenrl.models.tiny`).

    Raises:
        CheckpointError: nothing is there; names the nearest thing that is.
    """
    if path.startswith(PACKAGE_PREFIX):
        return str(_packaged(path.removeprefix(PACKAGE_PREFIX)))
    if path.startswith(TINY_PREFIX):
        from digenrl.models.tiny import tiny_checkpoint  # which raises this module's error

        return str(tiny_checkpoint(path.removeprefix(TINY_PREFIX)))
    local = Path(path).expanduser()
    if local.is_dir():
        return str(local)
    if _is_hub_id(path):
        return path
    siblings = [p.name for p in local.parent.iterdir() if p.is_dir()] if local.parent.is_dir() else []
    near = nearest(local.name, siblings)
    raise CheckpointError(
        f"model.path={path!r} is not a directory; expected a diffusers pipeline saved by save_pretrained, "
        f"a hub id OWNER/NAME, package:NAME or tiny:NAME" + (f"; did you mean {local.parent / near}?" if near else "")
    )


def unloadable(path: str, pipeline: str, error: Exception) -> CheckpointError:
    """One sentence for what a library says at length when it cannot load a checkpoint.

    Args:
        path: `model.path`.
        pipeline: the diffusers class that was expected.
        error: as raised; its text goes no further than its first sentence.
    """
    if _is_hub_id(path) and not Path(path).expanduser().is_dir():
        return CheckpointError(
            f"model.path={path!r} could not be loaded from the hub or its local cache; expected a {pipeline}: check "
            "its name and the network, log in with `hf auth login` if it is private or gated, or give the path of a "
            "directory"
        )
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    first = re.split(r"(?<=[a-z0-9'\")])\. (?=[A-Z])", reason)[0]
    return CheckpointError(f"model.path={path!r} could not be loaded; expected a {pipeline} there: {first[:LONGEST]}")


def _packaged(name: str) -> Path:
    data = Path(str(files("digenrl") / "data"))
    found = data / name
    if (found / "model_index.json").is_file():
        return found
    shipped = sorted(p.parent.name for p in data.glob("*/model_index.json"))
    raise CheckpointError(
        f"model.path='{PACKAGE_PREFIX}{name}' does not ship with DigenRL"
        f"{did_you_mean(name, shipped, 'checkpoints that do')}"
    )


def _is_hub_id(path: str) -> bool:
    """OWNER/NAME and nothing that only a file path has."""
    owner, slash, name = path.partition("/")
    return bool(owner and slash and name) and "/" not in name and owner not in {".", "..", "~"}
