"""Where checkpoints lie: folders of immutable files, on a local disk or on any fsspec file system.

    open_store(root) -> Store    by path or URL
    LocalStore                   temporary file, fsync, rename
    RemoteStore                  fsspec, with the listings cache off: it hides what other clients wrote or deleted

A store knows nothing of checkpoints. An error of the storage itself (network, permissions) is raised as it is; only
FileNotFoundError means absent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

from fsspec.core import url_to_fs

from storage.atomic import sync_directory, write_atomically


class Store(Protocol):
    """Folders of files below one root. Names hold no separators."""

    root: str

    def folders(self) -> list[str]:
        """Names of the folders below the root; none if the root does not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of each file of a folder; none if the folder does not exist."""

    def read(self, folder: str, name: str) -> bytes:
        """A file's content.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def write(self, folder: str, name: str, data: bytes) -> None:
        """Write a file, with its folder if need be."""

    def remove(self, folder: str, name: str) -> None:
        """Remove a file; nothing happens if it is absent."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and what is left in it; nothing happens if it is absent."""

    def url(self, folder: str) -> str:
        """How other programs find a folder."""


def open_store(root: str | Path) -> Store:
    """A store for a local path, a `file://` URL or any URL fsspec knows, such as `s3://bucket/prefix`.

    Raises:
        ValueError: fsspec does not know the protocol.
        ImportError: the protocol needs a package that is not installed; names it.
    """
    text = str(root)
    if text.startswith("file://"):
        return LocalStore(Path(unquote(urlparse(text).path)))
    return RemoteStore(text) if "://" in text else LocalStore(Path(text))


class LocalStore:
    """A directory."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()
        self.root = str(self._root)

    def folders(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(entry.name for entry in self._root.iterdir() if entry.is_dir())

    def sizes(self, folder: str) -> dict[str, int]:
        directory = self._root / folder
        if not directory.is_dir():
            return {}
        return {entry.name: entry.stat().st_size for entry in directory.iterdir()}

    def read(self, folder: str, name: str) -> bytes:
        return (self._root / folder / name).read_bytes()

    def write(self, folder: str, name: str, data: bytes) -> None:
        directory = self._root / folder
        if not directory.is_dir():
            directory.mkdir(parents=True)
            sync_directory(self._root)
        write_atomically(directory / name, data)

    def remove(self, folder: str, name: str) -> None:
        (self._root / folder / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        for name in self.sizes(folder):
            self.remove(folder, name)
        directory = self._root / folder
        if directory.is_dir():
            directory.rmdir()

    def url(self, folder: str) -> str:
        return (self._root / folder).as_uri()


class RemoteStore:
    """A prefix on an fsspec file system. Credentials and endpoints come from the environment, as fsspec reads them."""

    def __init__(self, root: str) -> None:
        self._files: Any  # fsspec has no types
        self._files, self._prefix = url_to_fs(root, use_listings_cache=False)
        self.root = root.rstrip("/")

    def folders(self) -> list[str]:
        return sorted(_last_part(e["name"]) for e in self._entries(self._prefix) if e["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        entries = self._entries(self._path(folder))
        return {_last_part(entry["name"]): int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def read(self, folder: str, name: str) -> bytes:
        data: bytes = self._files.cat_file(self._path(folder, name))
        return data

    def write(self, folder: str, name: str, data: bytes) -> None:
        # Not `with open(...)`: leaving it by an exception would publish what was written so far.
        self._files.makedirs(self._path(folder), exist_ok=True)
        self._files.pipe_file(self._path(folder, name), data)

    def remove(self, folder: str, name: str) -> None:
        try:
            self._files.rm_file(self._path(folder, name))
        except FileNotFoundError:
            return

    def remove_folder(self, folder: str) -> None:
        try:
            self._files.rm(self._path(folder), recursive=True)
        except FileNotFoundError:
            return

    def url(self, folder: str) -> str:
        return f"{self.root}/{folder}"

    def _path(self, *parts: str) -> str:
        return "/".join([self._prefix.rstrip("/"), *parts])

    def _entries(self, path: str) -> list[dict[str, Any]]:
        try:
            entries: list[dict[str, Any]] = self._files.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return entries


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
