"""Checkpoints on S3, or on a service that speaks its protocol, through s3fs.

Requests are sent again by botocore, a bounded number of times with jitter between them; a call of the store as a
whole has a deadline. An object becomes visible when its last byte has arrived: large ones go in parts, which an
interrupted upload leaves behind unseen, and paid for, until `discard_uploads`.
"""

from __future__ import annotations

from typing import Any

import s3fs
from botocore.exceptions import BotoCoreError, NoCredentialsError
from fsspec.exceptions import FSTimeoutError

from storage.stores import RemoteStore, S3Access, StorageError

#: One request.
CONNECT_S = 5.0
READ_S = 10.0
ATTEMPTS = 4
#: One call, with all requests it takes; and how slowly data may come or go on top of that.
CALL_S = 30.0
SLOWEST_BYTES_PER_S = 2**20
#: An object of at least twice this size goes, and comes, in parts of this size, so many at once.
PART_BYTES = 16 * 2**20
PARALLEL = 4

_NO_BUCKET = "NoSuchBucket"


class S3Store(RemoteStore):
    """A prefix in a bucket, which must exist.

    Args:
        root: `s3://bucket/prefix`.
        access: endpoint and credentials.
        attempts: of one request; None: `ATTEMPTS`.
    """

    def __init__(self, root: str, access: S3Access, attempts: int | None = None) -> None:
        files = s3fs.S3FileSystem(
            key=access.key,
            secret=access.secret,
            token=access.token,
            endpoint_url=access.endpoint,
            default_block_size=PART_BYTES,
            max_concurrency=PARALLEL,
            config_kwargs={
                "connect_timeout": CONNECT_S,
                "read_timeout": READ_S,
                "retries": {"mode": "standard", "total_max_attempts": attempts or ATTEMPTS},
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        # Its own way of trying again, which has no jitter, is for answers that break off; botocore does the rest.
        files.retries = 2 if (attempts or ATTEMPTS) > 1 else 1
        super().__init__(root, files)
        self._bucket, self._key, _ = files.split_path(self._prefix)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._keys(folder).get("", {})

    def tree(self) -> dict[str, dict[str, int]]:
        return self._keys()

    def _keys(self, *below: str) -> dict[str, dict[str, int]]:
        """Sizes by folder and name. Of keys: some services list folders that are empty by now, as such or as files."""
        found: dict[str, dict[str, int]] = {}
        above = self._path(*below, "")
        for path, entry in self._call("find", above, detail=True).items():
            folder, _, name = path.removeprefix(above).rpartition("/")
            if name and "/" not in folder:
                found.setdefault(folder, {})[name] = int(entry["size"])
        return found

    def read(self, folder: str, name: str, size_bytes: int = 0) -> bytes:
        parallel = PARALLEL if size_bytes >= 2 * PART_BYTES else 1
        data: bytes = self._call(
            "cat_file", self._path(folder, name), size_bytes=size_bytes, chunksize=PART_BYTES, max_concurrency=parallel
        )
        return data

    def write(self, folder: str, name: str, data: bytes) -> None:
        # Without making a directory: s3fs would make a bucket that is missing.
        self._call("pipe_file", self._path(folder, name), data, size_bytes=len(data), chunksize=PART_BYTES)

    def remove_folder(self, folder: str) -> None:
        # One by one: what S3 says of the objects of a bulk removal is not looked at.
        for name in self.sizes(folder):
            self.remove(folder, name)

    def discard_uploads(self) -> int:
        prefix = f"{self._key}/" if self._key else ""
        try:
            listed = self._call("call_s3", "list_multipart_uploads", Bucket=self._bucket, Prefix=prefix)
            uploads = listed.get("Uploads", [])
            for upload in uploads:
                named = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                self._call("call_s3", "abort_multipart_upload", Bucket=self._bucket, **named)
        except (PermissionError, FileNotFoundError):  # not ours to see, or it ended meanwhile
            return 0
        return len(uploads)

    def _call(self, method: str, path: str, *arguments: Any, size_bytes: int = 0, **options: Any) -> Any:
        """As in RemoteStore, with a deadline. A bucket that is missing is an error, not an absent file."""
        limit_s = CALL_S + size_bytes / SLOWEST_BYTES_PER_S
        try:
            return super()._call(method, path, *arguments, timeout=limit_s, **options)
        except FSTimeoutError:
            raise StorageError(f"{self.root}: {method} did not end within {limit_s:.0f} s") from None
        except FileNotFoundError as error:
            if _code(error) == _NO_BUCKET:
                raise StorageError(f"the bucket {self._bucket!r} does not exist") from error
            raise
        except NoCredentialsError as error:
            raise StorageError("there are no credentials") from error
        except BotoCoreError as error:
            raise StorageError(str(error)) from error


def _code(error: BaseException) -> str:
    """S3's name of an error, which s3fs keeps in the cause."""
    response = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))
