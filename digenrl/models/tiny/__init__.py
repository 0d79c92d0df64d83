"""Tiny random checkpoints of the real classes, made offline in a second: `model.path=tiny:flux` and so on.

    tiny_checkpoint(name)   the directory of one, built if it is not in the cache

They have every part that a published checkpoint has, from tokenizer to VAE, with the same layouts, strides and
conventions and with widths of a few dozen. They generate noise. Tests and dry runs use them.

Their weights follow from a fixed seed, so every machine builds the same. The cache is `digenrl/tiny` below
$XDG_CACHE_HOME (~/.cache); the name of a directory in it carries a hash of what the weights depend on.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from digenrl.config.errors import did_you_mean
from digenrl.models.checkpoint import TINY_PREFIX, CheckpointError

#: Name -> module with `build() -> pipeline`. Imported on use: diffusers takes seconds.
BUILDERS: dict[str, str] = {
    "flux": "digenrl.models.tiny.flux",
    "qwen": "digenrl.models.tiny.qwen",
    "wan": "digenrl.models.tiny.wan",
    "hunyuan": "digenrl.models.tiny.hunyuan",
}

_SEED = 0


def tiny_checkpoint(name: str) -> Path:
    """Directory of a tiny checkpoint, as `save_pretrained` lays it out.

    Raises:
        CheckpointError: there is none of this name.
    """
    if name not in BUILDERS:
        raise CheckpointError(
            f"model.path='{TINY_PREFIX}{name}' is no tiny checkpoint"
            f"{did_you_mean(TINY_PREFIX + name, [TINY_PREFIX + known for known in BUILDERS], 'those there are')}"
        )
    folder = _cache() / f"{name}-{_key()}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _save(name, Path(scratch) / name)
            try:
                (Path(scratch) / name).rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def build(name: str) -> Any:
    """The pipeline itself, fresh, leaving the global generator as it was."""
    import torch

    from digenrl.models.pipeline import quiet

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return import_module(BUILDERS[name]).build()


def _save(name: str, folder: Path) -> None:
    from digenrl.models.pipeline import quiet

    pipeline = build(name)
    with quiet():
        pipeline.save_pretrained(folder)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "digenrl" / "tiny"


def _key() -> str:
    """Hash of what the weights depend on: how they are built, and with which libraries."""
    digest = hashlib.sha256("/".join(version(name) for name in ("torch", "diffusers", "transformers")).encode())
    data = Path(str(files("digenrl.data")))
    for source in [*sorted(Path(__file__).parent.glob("*.py")), data / "checkpoints.json", data / "tiny_sd3_parts.py"]:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]
