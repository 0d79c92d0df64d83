"""Where checkpoints lie: folders of immutable files, on a local disk or on any fsspec file system.

    open_store(root, access) -> Store    by path or URL
    LocalStore                           temporary file, fsync, rename
    RemoteStore                          fsspec, its listings cache off: it hides what others wrote or deleted
    check_store(store)                   whether it takes, gives back and removes a file

A store knows nothing of checkpoints. An error of the storage itself (network, permissions) is an OSError; only
FileNotFoundError means absent. Storage on S3 is in storage.s3.
"""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlparse

from fsspec.core import url_to_fs

from storage.atomic import sync_directory, write_atomically

_S3 = ("s3", "s3a")


class StorageError(OSError):
    """The storage does not answer or refuses; the message is a sentence."""


@dataclass(frozen=True)
class S3Access:
    """How to reach an S3 service. What is None comes from where botocore looks: environment, profile, role.

    Attributes:
        endpoint: URL of the service; None: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, else AWS.
        key: access key id.
        secret: secret access key. It is in no text made of this record.
        token: session token, likewise.
    """

    endpoint: str | None = None
    key: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)


class Store(Protocol):
    """Folders of files below one root. Names hold no separators."""

    root: str

    def folders(self) -> list[str]:
        """Names of the folders below the root; none if the root does not exist."""

    def sizes(self, folder: str) -> dict[str, int]:
        """Size in bytes of each file of a folder; none if the folder does not exist."""

    def tree(self) -> dict[str, dict[str, int]]:
        """`sizes` of every folder. An empty one may be left out."""

    def read(self, folder: str, name: str, size_bytes: int = 0) -> bytes:
        """A file's content.

        Args:
            folder: below the root.
            name: of the file.
            size_bytes: what is expected; sets how long the call may take.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def write(self, folder: str, name: str, data: bytes) -> None:
        """Write a file, with its folder if need be. An exception leaves the file as it was, or whole."""

    def remove(self, folder: str, name: str) -> None:
        """Remove a file; nothing happens if it is absent."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and what is left in it; nothing happens if it is absent."""

    def discard_uploads(self) -> int:
        """Give up what interrupted writes have left behind unseen; how much that was."""

    def url(self, folder: str) -> str:
        """How other programs find a folder."""


def open_store(root: str | Path | Store, access: S3Access | None = None, *, attempts: int | None = None) -> Store:
    """A store for a local path, a `file://` URL or any URL fsspec knows, such as `s3://bucket/prefix`.

    Args:
        root: where; a store is returned as it is.
        access: for `s3://`; None: everything as botocore finds it.
        attempts: for `s3://`: how often a request is sent before it counts as failed; None: as storage.s3 has it.

    Raises:
        ValueError: fsspec does not know the protocol.
        ImportError: the protocol needs a package that is not installed; names it.
    """
    if not isinstance(root, str | Path):
        return root
    text = str(root)
    if "://" not in text:
        return LocalStore(Path(text))
    protocol = text.partition("://")[0]
    if protocol == "file":
        return LocalStore(Path(unquote(urlparse(text).path)))
    if protocol not in _S3:
        return RemoteStore(text)
    try:
        from storage.s3 import S3Store
    except ImportError as error:
        raise ImportError(f"{text} needs s3fs: pip install 'digenrl[s3]' ({error})") from None
    return S3Store(text, access or S3Access(), attempts)


def check_store(store: Store) -> None:
    """Write, read and remove a small file.

    Raises:
        OSError: what the storage says.
    """
    folder, content = f".write-test-{uuid.uuid4().hex}", b"written by digenrl to see whether it can"
    store.write(folder, "test", content)
    found = store.read(folder, "test")
    store.remove_folder(folder)
    if found != content:
        raise StorageError(f"{store.root} gave back something else than was written")


class LocalStore:
    """A directory. Symbolic links in it are nobody's checkpoints."""

    def __init__(self, root: Path) -> None:
        self._root = root.expanduser().absolute()
        self.root = str(self._root)

    def folders(self) -> list[str]:
        if not self._root.is_dir():
            return []
        return sorted(entry.name for entry in self._root.iterdir() if entry.is_dir() and not entry.is_symlink())

    def sizes(self, folder: str) -> dict[str, int]:
        directory = self._root / folder
        if not directory.is_dir():
            return {}
        return {entry.name: entry.lstat().st_size for entry in directory.iterdir()}

    def tree(self) -> dict[str, dict[str, int]]:
        return {folder: self.sizes(folder) for folder in self.folders()}

    def read(self, folder: str, name: str, size_bytes: int = 0) -> bytes:
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
        if (self._root / folder).is_dir():
            shutil.rmtree(self._root / folder)

    def discard_uploads(self) -> int:
        return 0  # temporary files lie in the folders

    def url(self, folder: str) -> str:
        return (self._root / folder).as_uri()


class RemoteStore:
    """A prefix on an fsspec file system, which finds credentials and bounds its calls in its own way."""

    def __init__(self, root: str, files: Any = None) -> None:
        self.root = root.rstrip("/")
        self._files: Any  # fsspec has no types
        self._prefix: str
        if files is None:
            self._files, self._prefix = url_to_fs(root, use_listings_cache=False)
        else:
            self._files, self._prefix = files, files._strip_protocol(root)

    def folders(self) -> list[str]:
        return sorted(_last_part(e["name"]) for e in self._entries(self._prefix) if e["type"] == "directory")

    def sizes(self, folder: str) -> dict[str, int]:
        entries = self._entries(self._path(folder))
        return {_last_part(entry["name"]): int(entry["size"]) for entry in entries if entry["type"] == "file"}

    def tree(self) -> dict[str, dict[str, int]]:
        return {folder: self.sizes(folder) for folder in self.folders()}

    def read(self, folder: str, name: str, size_bytes: int = 0) -> bytes:
        data: bytes = self._call("cat_file", self._path(folder, name), size_bytes=size_bytes)
        return data

    def write(self, folder: str, name: str, data: bytes) -> None:
        # Not `with open(...)`: leaving it by an exception would publish what was written so far.
        self._call("makedirs", self._path(folder), exist_ok=True)
        self._call("pipe_file", self._path(folder, name), data, size_bytes=len(data))

    def remove(self, folder: str, name: str) -> None:
        try:
            self._call("rm_file", self._path(folder, name))
        except FileNotFoundError:
            return

    def remove_folder(self, folder: str) -> None:
        try:
            self._call("rm", self._path(folder), recursive=True)
        except FileNotFoundError:
            return

    def discard_uploads(self) -> int:
        return 0

    def url(self, folder: str) -> str:
        return f"{self.root}/{folder}"

    def _path(self, *parts: str) -> str:
        return "/".join([self._prefix.rstrip("/"), *parts])

    def _entries(self, path: str) -> Sequence[dict[str, Any]]:
        try:
            entries: list[dict[str, Any]] = self._call("ls", path, detail=True)
        except FileNotFoundError:
            return []
        return entries

    def _call(self, method: str, path: str, *arguments: Any, size_bytes: int = 0, **options: Any) -> Any:
        """Call the file system. Within which time is its own affair here; `size_bytes` are moved."""
        return getattr(self._files, method)(path, *arguments, **options)


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
