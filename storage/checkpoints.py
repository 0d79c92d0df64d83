"""Checkpoints that are whole or absent, on a local directory or any fsspec URL.

    save(root, iteration, tensors, state) -> CheckpointInfo
    survey(root) -> Survey                      what lies there
    newest(root, ...) -> Checkpoint | None      the newest one of which every byte verifies, here or there
    load(info) -> Checkpoint                    verifies while reading
    prune(root, keep, merits) -> list[str]      also removes what interrupted saves left behind
    rewind(root, iteration) -> list[str]        removes those that are newer

A root is a directory, a URL or an open store.

One checkpoint is a folder that is written once and never changed:

    step-000010-1f0c9a2b/      iteration, and the start of the hash of the content
        adapter.safetensors    one file for each group of tensors
        state.json
        manifest.json          sizes and SHA-256 of the others; written last, its presence is the commit

A save that fails or is killed anywhere leaves a folder without a manifest, which nobody reads. A run has one writer;
readers may be many. What is read is not trusted: nothing is unpickled, and no name in it leads out of its folder.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from digenrl.config import KeepConfig
from storage.retention import Merits, retained
from storage.stores import Store, open_store

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
STATE = "state.json"
_FORMAT = 1
_SUFFIX = ".safetensors"
_FOLDER = re.compile(r"step-(\d{6,})-([0-9a-f]{8})")
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

Root = str | Path | Store
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
        store: holds the run's checkpoints.
        folder: its folder there.
        iteration: iterations that were complete.
        saved_at_s: Unix time of the save.
        sha256: hash over iteration and content: equal hashes mean bit-equal checkpoints.
        files: size and hash of each file.
    """

    store: Store = field(compare=False, repr=False)
    folder: str
    iteration: int
    saved_at_s: float
    sha256: str
    files: Mapping[str, FileEntry]

    @property
    def url(self) -> str:
        """How other programs find it."""
        return self.store.url(self.folder)

    @property
    def size_bytes(self) -> int:
        """Of its files together, without the manifest."""
        return sum(entry.size_bytes for entry in self.files.values())


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: tensors on the CPU by group and name, and the state as JSON gives it back (tuples as lists)."""

    info: CheckpointInfo
    tensors: dict[str, dict[str, torch.Tensor]]
    state: State


def save(root: Root, iteration: int, tensors: Mapping[str, Mapping[str, torch.Tensor]], state: State) -> CheckpointInfo:
    """Write a checkpoint; it exists once this returns, and not before.

    Args:
        root: holds the run's checkpoints.
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
    info = CheckpointInfo(store, f"step-{iteration:06d}-{digest[:8]}", iteration, time.time(), digest, files)
    if (existing := _existing(store, info)) is not None:
        return existing
    for name, data in contents.items():
        store.write(info.folder, name, data)
    store.write(info.folder, MANIFEST, _manifest_bytes(info))
    return info


@dataclass(frozen=True)
class Survey:
    """What lies in the folders of a root.

    Attributes:
        tree: sizes of all files by folder and name.
        committed: checkpoints with a readable manifest, newest first: by iteration, then by time of saving.
        damaged: what is wrong with the manifests that cannot be read.
        unfinished: folders without one: saves that were interrupted, or go on.
    """

    tree: Mapping[str, Mapping[str, int]]
    committed: Sequence[CheckpointInfo]
    damaged: Sequence[str]
    unfinished: Sequence[str]


def survey(root: Root) -> Survey:
    """Look at every folder, not at the files in it.

    Raises:
        Exception: the storage could not be read. That is never taken for an absent checkpoint.
    """
    store = open_store(root)
    committed, damaged, unfinished = [], [], []
    tree = {folder: sizes for folder, sizes in store.tree().items() if _FOLDER.fullmatch(folder)}
    for folder, sizes in tree.items():
        try:
            info = _read_manifest(store, folder) if MANIFEST in sizes else None
        except FileNotFoundError:  # removed since
            info = None
        except CheckpointDamaged as error:
            damaged.append(str(error))
            continue
        if info is None:
            unfinished.append(folder)
        else:
            committed.append(info)
    return Survey(tree, sorted(committed, key=_age, reverse=True), damaged, unfinished)


def committed(root: Root) -> Sequence[CheckpointInfo]:
    """The committed checkpoints of `survey`; of damaged ones the log has a line each."""
    found = survey(root)
    for problem in found.damaged:
        logger.warning("%s; ignoring it", problem)
    return found.committed


def newest(*roots: Root, level: int = logging.WARNING) -> Checkpoint | None:
    """The newest checkpoint of which every file verifies; None if there is none.

    Args:
        roots: hold the run's checkpoints.
        level: at which a damaged one is logged, in one line.

    Raises:
        Exception: as `committed`.
    """
    for info in sorted((info for root in roots for info in committed(root)), key=_age, reverse=True):
        try:
            return load(info)
        except CheckpointDamaged as error:
            logger.log(level, "%s; using the checkpoint before it", error)
    return None


def latest(root: Root) -> CheckpointInfo | None:
    """What `newest` finds, without its content."""
    found = newest(root)
    return found.info if found is not None else None


def load(info: CheckpointInfo) -> Checkpoint:
    """Read a checkpoint. The bytes that are verified are the bytes that are used.

    Raises:
        CheckpointDamaged: a file is absent, truncated, altered or not of its kind; names it.
    """
    state = load_state(info)
    tensors = {}
    for name in info.files:
        if name != STATE:
            try:
                tensors[name.removesuffix(_SUFFIX)] = load_tensors(_verified(info, name))
            except (SafetensorError, KeyError):
                raise CheckpointDamaged(f"checkpoint {info.url}: {name} is not a safetensors file") from None
    return Checkpoint(info, tensors, state)


def load_state(info: CheckpointInfo) -> State:
    """The part of a checkpoint that is not tensors.

    Raises:
        CheckpointDamaged: as `load`.
    """
    try:
        state = json.loads(_verified(info, STATE))
    except CheckpointDamaged:
        raise
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise CheckpointDamaged(f"checkpoint {info.url}: {STATE} is not a JSON object")
    return state


def prune(root: Root, keep: KeepConfig, merits: Merits | None = None) -> list[str]:
    """Remove the checkpoints that `keep` does not name, and everything that was never committed.

    A checkpoint with an absent or truncated file does not count, and of one iteration only the last one saved does.
    Only the run's writer may call this: to anybody else a save in progress looks like one that failed.

    Args:
        root: directory or URL that holds the run's checkpoints.
        keep: which stay.
        merits: what else speaks for one.

    Returns:
        Names of the removed folders.
    """
    store = open_store(root)
    found = survey(store)
    whole = [info for info in found.committed if _sizes_fit(info, found.tree[info.folder])]
    if (found.committed or found.damaged) and not whole:
        return []
    stay = retained([info.iteration for info in whole], keep, merits or Merits())
    by_iteration = {info.iteration: info.folder for info in reversed(whole)}
    kept = {folder for iteration, folder in by_iteration.items() if iteration in stay}
    removed = [folder for folder in found.tree if folder not in kept]
    _remove(store, removed)
    store.discard_uploads()
    return removed


def rewind(root: Root, iteration: int) -> list[str]:
    """Remove every checkpoint with more iterations. Only the run's writer may call this.

    Returns:
        Names of the removed folders.
    """
    store = open_store(root)
    removed = [f for f in store.tree() if (match := _FOLDER.fullmatch(f)) and int(match[1]) > iteration]
    _remove(store, removed)
    return removed


def _remove(store: Store, folders: Sequence[str]) -> None:
    for folder in folders:
        # The manifest first: a removal that is interrupted leaves nothing that looks whole.
        store.remove(folder, MANIFEST)
        store.remove_folder(folder)


def _age(info: CheckpointInfo) -> tuple[int, float]:
    return info.iteration, info.saved_at_s


def _existing(store: Store, info: CheckpointInfo) -> CheckpointInfo | None:
    """The same checkpoint if it is there already. A damaged one is uncommitted, so that it can be written again."""
    try:
        existing = _read_manifest(store, info.folder)
        for name in existing.files:
            _verified(existing, name)
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


def _read_manifest(store: Store, folder: str) -> CheckpointInfo:
    data = store.read(folder, MANIFEST)
    try:
        manifest = json.loads(data)
        files = {name: FileEntry(int(e["size_bytes"]), str(e["sha256"])) for name, e in manifest["files"].items()}
        iteration, saved_at_s, form = int(manifest["iteration"]), float(manifest["saved_at_s"]), manifest["format"]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise CheckpointDamaged(f"checkpoint {store.url(folder)}: its manifest is not readable") from None
    if form != _FORMAT:
        raise CheckpointDamaged(f"checkpoint {store.url(folder)} has format {form!r}, expected {_FORMAT}")
    digest = _digest(iteration, files)
    if folder != f"step-{iteration:06d}-{digest[:8]}" or STATE not in files or not all(map(_is_file_name, files)):
        raise CheckpointDamaged(f"checkpoint {store.url(folder)}: its manifest is not the one that was saved")
    return CheckpointInfo(store, folder, iteration, saved_at_s, digest, files)


def _is_file_name(name: str) -> bool:
    return name == STATE or (name.endswith(_SUFFIX) and _GROUP.fullmatch(name.removesuffix(_SUFFIX)) is not None)


def _verified(info: CheckpointInfo, name: str) -> bytes:
    entry, where = info.files[name], f"checkpoint {info.url}: {name}"
    try:
        data = info.store.read(info.folder, name, entry.size_bytes)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{where} is missing") from None
    if len(data) != entry.size_bytes:
        raise CheckpointDamaged(f"{where} has {len(data)} bytes, expected {entry.size_bytes}")
    if (found := hashlib.sha256(data).hexdigest()) != entry.sha256:
        raise CheckpointDamaged(f"{where} has SHA-256 {found[:12]}…, expected {entry.sha256[:12]}…")
    return data


def _sizes_fit(info: CheckpointInfo, sizes: Mapping[str, int]) -> bool:
    return all(sizes.get(name) == entry.size_bytes for name, entry in info.files.items())
