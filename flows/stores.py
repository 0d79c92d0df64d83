"""Where the checkpoints of a run lie, and how they are reached.

    stores_of(directory, config) -> Stores      opened
    check_storage(config) -> list[str]          names that are taken there; raises ConfigError if it cannot be used
    access_of(config) -> S3Access               from the environment, or from a Prefect block
    with prefect_for(config): ...               within it, a block can be read

Keys are in no configuration, log or page: they stay in the environment, or in Prefect, which encrypts them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, TypeVar

from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from storage.runs import RunDirectory
from storage.stores import S3Access, Store, check_store, open_store

T = TypeVar("T")

#: How long storage, and Prefect, may take to answer before a run starts.
CHECK_S = 10.0
_BLOCK_KEYS = ("key", "secret", "token", "endpoint")


@dataclass(frozen=True)
class Stores:
    """Of one run.

    Attributes:
        main: takes its checkpoints.
        local: below its own directory; takes the last one if `main` cannot. The same as `main` by default.
    """

    main: Store
    local: Store

    @property
    def distinct(self) -> tuple[Store, ...]:
        """Where to look for checkpoints."""
        return (self.main,) if self.main is self.local else (self.main, self.local)


def stores_of(directory: RunDirectory, config: RunConfig) -> Stores:
    """Open what holds the checkpoints of a run.

    Raises:
        ConfigError: checkpoint.url or checkpoint.credentials_block cannot be used.
    """
    local = open_store(directory.checkpoints)
    if config.checkpoint.url is None:
        return Stores(local, local)
    return Stores(_open(f"{config.checkpoint.url.rstrip('/')}/{directory.name}", config), local)


def check_storage(config: RunConfig) -> list[str]:
    """See whether checkpoints can be written to checkpoint.url, within seconds.

    Returns:
        Names of runs that have checkpoints there; none without a URL.

    Raises:
        ConfigError: they cannot; names the URL, what the storage says, and what to do.
    """
    url = config.checkpoint.url
    if url is None:
        return []

    def check() -> list[str]:
        store = _open(url, config, attempts=1)
        check_store(store)
        return store.folders()

    return asked(f"checkpoint.url={url}", endpoint_of(config), check)


def asked(what: str, endpoint: str | None, question: Callable[[], T]) -> T:
    """What the storage answers, within `CHECK_S`.

    Raises:
        ConfigError: it does not, or refuses; begins with `what`.
    """
    where = f" at {endpoint}" if endpoint else ""
    try:
        return _in_time(question)
    except ConfigError:
        raise
    except _Late:
        raise ConfigError(f"{what} does not answer within {CHECK_S:.0f} s{where}; is the address right?") from None
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error) or type(error).__name__).rstrip(".")
        advice = "; see docs/storage.md for endpoint, bucket and keys" if "=s3:" in what else ""
        raise ConfigError(f"{what} cannot be used{where}: {reason}{advice}") from None


class _Late(Exception):
    """There was no answer in time."""


def _in_time(question: Callable[[], T]) -> T:
    """What a question returns or raises within `CHECK_S`, else _Late."""
    found: list[T] = []
    failures: list[Exception] = []

    def ask() -> None:
        try:
            found.append(question())
        except Exception as error:
            failures.append(error)

    # A daemon: a name server may take its time, and cannot be interrupted.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(CHECK_S)
    if failures:
        raise failures[0]
    if not found:
        raise _Late
    return found[0]


def endpoint_of(config: RunConfig) -> str | None:
    """The S3 service that is asked, None for AWS."""
    return config.checkpoint.endpoint or environment_endpoint()


def environment_endpoint() -> str | None:
    """The S3 service that the environment names."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None


def access_of(config: RunConfig) -> S3Access:
    """Endpoint and credentials of a run's storage.

    Raises:
        ConfigError: the Prefect block is missing or does not hold them.
    """
    name = config.checkpoint.credentials_block
    if name is None:
        return S3Access(config.checkpoint.endpoint)
    held = _secret(name)
    if not isinstance(held, dict) or not set(held) <= set(_BLOCK_KEYS) or not {"key", "secret"} <= set(held):
        raise ConfigError(
            f"checkpoint.credentials_block={name}: the Secret block must hold an object with key and secret, and if "
            f"need be token and endpoint"
        )
    texts = {key: str(value) for key, value in held.items() if value is not None}
    return S3Access(config.checkpoint.endpoint or texts.pop("endpoint", None), **texts)


@contextmanager
def prefect_for(config: RunConfig) -> Iterator[None]:
    """Within it, PREFECT_API_URL leads to a server that answers, if a block has to be read."""
    if config.checkpoint.credentials_block is None or "PREFECT_API_URL" in os.environ:
        yield
        return
    from flows.services.handle import ensure
    from storage.home import home

    with ensure(("prefect",), owner="reading a block", home=home()) as handle:
        os.environ.update(handle.client_env())
        yield


def _open(url: str, config: RunConfig, attempts: int | None = None) -> Store:
    try:
        return open_store(url, access_of(config), attempts=attempts)
    except (ValueError, ImportError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"checkpoint.url={config.checkpoint.url} cannot be used: {error}") from None


def _secret(name: str) -> Any:
    from prefect.blocks.system import Secret

    try:
        # In a thread without an event loop, where Prefect's own call waits for the answer.
        return _in_time(lambda: Secret.load(name).get())  # type: ignore[union-attr]
    except _Late:
        reason = f"Prefect does not answer within {CHECK_S:.0f} s"
    except Exception as error:
        reason = str(error).splitlines()[0]
    raise ConfigError(f"checkpoint.credentials_block={name} cannot be read: {reason}")
