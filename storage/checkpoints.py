"""Checkpoints that are whole or absent, on a local directory or any fsspec URL.

    save(root, iteration, tensors, state) -> CheckpointInfo
    latest(root) -> CheckpointInfo | None       the newest one of which every byte verifies
    load(info) -> Checkpoint                    verifies while reading
    prune(root, keep) -> list[str]              also removes what interrupted saves left behind
    rewind(root, iteration) -> list[str]        removes those that are newer

One checkpoint is a folder that is written once and never changed:

    step-000010-1f0c9a2b/      iteration, and the start of the hash of the content
        adapter.safetensors    one file for each group of tensors
        state.json
        manifest.json          sizes and SHA-256 of the others; written last, its presence is the commit

A save that fails or is killed anywhere leaves a folder without a manifest, which nobody reads. Nothing is unpickled.
A run has one writer; readers may be many.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from storage.stores import Store, open_store

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
_FORMAT = 1
_SUFFIX = ".safetensors"
_FOLDER = re.compile(r"step-(\d{6,})-([0-9a-f]{8})")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

State = dict[str, Any]


class CheckpointDamaged(ValueError):
    """A committed checkpoint whose bytes are not those that were saved."""


@dataclass(frozen=True)
class FileEntry:
    """What a manifest says of one file."""

    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class CheckpointInfo:
    """One committed checkpoint.

    Attributes:
        root: directory or URL that holds the run's checkpoints.
        folder: its folder below `root`.
        iteration: iterations that were complete.
        saved_at_s: Unix time of the save.
        sha256: hash over iteration and content: equal hashes mean bit-equal checkpoints.
        files: size and hash of each file.
    """

    root: str
    folder: str
    iteration: int
    saved_at_s: float
    sha256: str
    files: Mapping[str, FileEntry]

    @property
    def url(self) -> str:
        """How other programs find it."""
        return open_store(self.root).url(self.folder)


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: tensors on the CPU by group and name, and the state as JSON gives it back (tuples as lists)."""

    info: CheckpointInfo
    tensors: dict[str, dict[str, torch.Tensor]]
    state: State


def save(
    root: str | Path, iteration: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: State
) -> CheckpointInfo:
    """Write a checkpoint; it exists once this returns, and not before.

    Args:
        root: directory or URL that holds the run's checkpoints.
        iteration: iterations that are complete; the newest checkpoint is the one with most.
        tensors: named tensors by group, on any device; a group becomes one file. All are held in memory once more.
        state: everything else: null, booleans, integers, finite floats, strings, lists and dicts with string keys.

    Returns:
        What `load` takes.

    Raises:
        TypeError: `state` holds something that JSON would not give back; names where.
        ValueError: a group's name is not made of letters, digits, `_` and `-`.
        Exception: whatever the storage raised; the checkpoint is then absent, and saving again is safe.
    """
    contents = {f"{_group_name(group)}{_SUFFIX}": _tensor_bytes(named) for group, named in tensors.items()}
    _check_state(state, "state")
    contents[STATE] = json.dumps(state, indent=1).encode()
    files = {name: FileEntry(len(data), hashlib.sha256(data).hexdigest()) for name, data in contents.items()}
    digest = _digest(iteration, files)
    store = open_store(root)
    info = CheckpointInfo(store.root, f"step-{iteration:06d}-{digest[:8]}", iteration, time.time(), digest, files)
    if (existing := _existing(store, info)) is not None:
        return existing
    for name, data in contents.items():
        store.write(info.folder, name, data)
    store.write(info.folder, MANIFEST, _manifest_bytes(info))
    return info


def latest(root: str | Path, *, level: int = logging.WARNING) -> CheckpointInfo | None:
    """The newest checkpoint of which every file verifies; None if there is none.

    Args:
        root: directory or URL that holds the run's checkpoints.
        level: at which a damaged one is logged, in one line.

    Raises:
        Exception: the storage could not be read. That is never taken for an absent checkpoint.
    """
    store = open_store(root)
    for info in _committed(store):
        try:
            for name in info.files:
                _verified(store, info, name)
        except CheckpointDamaged as error:
            logger.log(level, "%s; using the checkpoint before it", error)
        else:
            return info
    return None


def load(info: CheckpointInfo) -> Checkpoint:
    """Read a checkpoint. The bytes that are verified are the bytes that are used.

    Raises:
        CheckpointDamaged: a file is absent, truncated or altered; names it.
    """
    store = open_store(info.root)
    contents = {name: _verified(store, info, name) for name in info.files}
    state = json.loads(contents.pop(STATE))
    tensors = {name.removesuffix(_SUFFIX): load_tensors(data) for name, data in contents.items()}
    return Checkpoint(info, tensors, state)


def prune(root: str | Path, keep: int, needed: Collection[int] = ()) -> list[str]:
    """Remove all but the newest `keep` checkpoints, and everything that was never committed.

    A checkpoint with an absent or truncated file does not count towards `keep`. Only the run's writer may call this:
    to anybody else a save in progress looks like one that failed.

    Args:
        root: directory or URL that holds the run's checkpoints.
        keep: how many stay.
        needed: iterations to which the run may have to go back: for each, the newest that is not newer stays too.

    Returns:
        Names of the removed folders.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least one checkpoint must stay")
    store = open_store(root)
    committed = _committed(store)
    whole = [info for info in committed if _sizes_fit(store, info)]
    if committed and not whole:
        return []
    kept = {info.folder for info in whole[:keep]}
    kept |= {next((i.folder for i in whole if i.iteration <= iteration), "") for iteration in needed}
    removed = [folder for folder in store.folders() if _FOLDER.fullmatch(folder) and folder not in kept]
    _remove(store, removed)
    return removed


def rewind(root: str | Path, iteration: int) -> list[str]:
    """Remove every checkpoint with more iterations. Only the run's writer may call this.

    Returns:
        Names of the removed folders.
    """
    store = open_store(root)
    removed = [f for f in store.folders() if (match := _FOLDER.fullmatch(f)) and int(match[1]) > iteration]
    _remove(store, removed)
    return removed


def _remove(store: Store, folders: Sequence[str]) -> None:
    for folder in folders:
        # The manifest first: a removal that is interrupted leaves nothing that looks whole.
        store.remove(folder, MANIFEST)
        store.remove_folder(folder)


def _existing(store: Store, info: CheckpointInfo) -> CheckpointInfo | None:
    """The same checkpoint if it is there already. A damaged one is uncommitted, so that it can be written again."""
    try:
        existing = _read_manifest(store, info.folder)
        for name in existing.files:
            _verified(store, existing, name)
    except FileNotFoundError:
        return None
    except CheckpointDamaged:
        store.remove(info.folder, MANIFEST)
        return None
    return existing


def _group_name(group: str) -> str:
    if not _GROUP.fullmatch(group):
        raise ValueError(f"group of tensors {group!r}: a name is letters, digits, _ and -")
    return group


def _tensor_bytes(named: Mapping[str, torch.Tensor]) -> bytes:
    # A copy of each: safetensors refuses tensors that share memory.
    return save_tensors({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named.items()})


def _check_state(value: object, where: str) -> None:
    """Refuse what JSON would lose: keys that are not strings, infinities, and types it does not have."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}; keys must be strings to come back as they were")
            _check_state(item, f"{where}[{key!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_state(item, f"{where}[{index}]")
    elif value is not None and not isinstance(value, bool | int | float | str):
        raise TypeError(f"{where} is a {type(value).__name__}; expected what JSON can hold")
    elif isinstance(value, float) and not math.isfinite(value):
        raise TypeError(f"{where} is {value}; JSON holds finite numbers only")


def _digest(iteration: int, files: Mapping[str, FileEntry]) -> str:
    lines = [f"{name} {entry.size_bytes} {entry.sha256}" for name, entry in sorted(files.items())]
    return hashlib.sha256("\n".join([str(iteration), *lines]).encode()).hexdigest()


def _manifest_bytes(info: CheckpointInfo) -> bytes:
    manifest = {
        "format": _FORMAT,
        "iteration": info.iteration,
        "saved_at_s": info.saved_at_s,
        "sha256": info.sha256,
        "files": {name: {"size_bytes": e.size_bytes, "sha256": e.sha256} for name, e in info.files.items()},
    }
    return json.dumps(manifest, indent=1).encode()


def _committed(store: Store) -> list[CheckpointInfo]:
    """Every folder with a readable manifest, newest first: by iteration, then by time of saving."""
    found = []
    for folder in store.folders():
        if _FOLDER.fullmatch(folder) is None:
            continue
        try:
            found.append(_read_manifest(store, folder))
        except FileNotFoundError:
            continue
        except CheckpointDamaged as error:
            logger.warning("%s; ignoring it", error)
    return sorted(found, key=lambda info: (info.iteration, info.saved_at_s), reverse=True)


def _read_manifest(store: Store, folder: str) -> CheckpointInfo:
    data = store.read(folder, MANIFEST)
    try:
        manifest = json.loads(data)
        files = {name: FileEntry(**entry) for name, entry in manifest["files"].items()}
        iteration, saved_at_s, form = manifest["iteration"], float(manifest["saved_at_s"]), manifest["format"]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointDamaged(f"checkpoint {store.url(folder)}: its manifest is not readable") from None
    if form != _FORMAT:
        raise CheckpointDamaged(f"checkpoint {store.url(folder)} has format {form!r}, expected {_FORMAT}")
    digest = _digest(iteration, files)
    if folder != f"step-{iteration:06d}-{digest[:8]}" or STATE not in files:
        raise CheckpointDamaged(f"checkpoint {store.url(folder)}: its manifest is not the one that was saved")
    return CheckpointInfo(store.root, folder, iteration, saved_at_s, digest, files)


def _verified(store: Store, info: CheckpointInfo, name: str) -> bytes:
    entry, where = info.files[name], f"checkpoint {store.url(info.folder)}: {name}"
    try:
        data = store.read(info.folder, name)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{where} is missing") from None
    if len(data) != entry.size_bytes:
        raise CheckpointDamaged(f"{where} has {len(data)} bytes, expected {entry.size_bytes}")
    if (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
        raise CheckpointDamaged(f"{where} has SHA-256 {found[:12]}…, expected {entry.sha256[:12]}…")
    return data


def _sizes_fit(store: Store, info: CheckpointInfo) -> bool:
    sizes = store.sizes(info.folder)
    return all(sizes.get(name) == entry.size_bytes for name, entry in info.files.items())
