"""Do the servers that a run is told to use answer? Asked once, before a name is claimed or a server started.

    check_targets(config, prefect) -> None     raises ConfigError with everything that does not answer
    url_problem(url) -> str | None             why a text is no URL of a server

All are asked side by side, and none is waited for longer than `TIMEOUT_S`. What needs a password or a certificate of
its own counts as an answer: clients know more about those than is asked here.
"""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlsplit, urlunsplit

from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError

TIMEOUT_S = 5.0
#: Prefect Cloud has no such page.
_PREFECT_CLOUD = "prefect.cloud"
#: Answers of a server that is there and wants to know who asks.
_REFUSED = (401, 403)
#: The longest first message of a Dask scheduler that is believed.
_LONGEST_FRAME_BYTES = 2**20

_PREFECT_ADVICE = (
    "start that server and give its API's URL, such as http://127.0.0.1:4200/api, or leave --prefect-api out for "
    "DigenRL's own"
)
_CLUSTER_ADVICE = "start one with 'dask scheduler', or use cluster.address=local"
_TRACKING_ADVICE = "start that MLflow server, or use tracking.uri=managed for DigenRL's own, or none"


@dataclass(frozen=True)
class _Probe:
    """A question: `problem` answers None, or how the sentence that begins with `name` goes on."""

    name: str
    problem: Callable[[], str | None]
    advice: str


@dataclass(frozen=True)
class PrefectApi:
    """A Prefect API that is not DigenRL's own.

    Attributes:
        url: PREFECT_API_URL.
        given: how a person gave it, e.g. `--prefect-api http://…`.
    """

    url: str
    given: str


def check_targets(config: RunConfig, prefect: PrefectApi | None = None) -> None:
    """Ask the Prefect API, the Dask scheduler and the MLflow server that are not DigenRL's own.

    Args:
        config: a valid configuration.
        prefect: None for DigenRL's own.

    Raises:
        ConfigError: one sentence for each that does not answer.
    """
    address, uri = config.cluster.address, config.tracking.uri
    probes = []
    if prefect is not None:
        probes.append(_Probe(prefect.given, lambda: _prefect_problem(prefect.url), _PREFECT_ADVICE))
    if address != "local":
        probes.append(_Probe(f"cluster.address={address}", lambda: _scheduler_problem(address), _CLUSTER_ADVICE))
    if uri.startswith(("http://", "https://")):
        probes.append(_Probe(f"tracking.uri={uri}", lambda: _mlflow_problem(uri), _TRACKING_ADVICE))
    if problems := _side_by_side(probes):
        raise ConfigError(*problems)


def url_problem(url: str) -> str | None:
    """Why a text is no URL of a server, None if it is one."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return None
    except ValueError as error:
        return str(error)
    return "it has no host" if url.startswith(("http://", "https://")) else "it does not begin with http:// or https://"


def _side_by_side(probes: Sequence[_Probe]) -> list[str]:
    """A sentence for each problem. A probe that is not back in time has found one, too."""
    found: dict[str, str | None] = {probe.name: f"does not answer within {TIMEOUT_S:.0f} s" for probe in probes}

    def ask(probe: _Probe) -> None:
        found[probe.name] = probe.problem()

    # Daemons: a name server may take its time, and cannot be interrupted.
    threads = [threading.Thread(target=ask, args=(probe,), daemon=True) for probe in probes]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + TIMEOUT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [f"{probe.name} {problem}; {probe.advice}" for probe in probes if (problem := found[probe.name]) is not None]


def _prefect_problem(url: str) -> str | None:
    if reason := url_problem(url):
        return f"is no address: {reason}"
    status = _status(f"{url.rstrip('/')}/health")
    if isinstance(status, str):
        return f"cannot be reached ({status})"
    if status < 400 or status in _REFUSED or (urlsplit(url).hostname or "").endswith(_PREFECT_CLOUD):
        return None
    return f"answers, but not as a Prefect API (status {status} at /health)"


def _mlflow_problem(uri: str) -> str | None:
    if reason := url_problem(uri):
        return f"is no address: {reason}"
    status = _status(f"{uri.rstrip('/')}/api/2.0/mlflow/experiments/search?max_results=1")
    if isinstance(status, str):
        return f"cannot be reached ({status})"
    return None if status < 400 or status in _REFUSED else f"answers, but not as MLflow (status {status})"


def _status(url: str) -> int | str:
    """The status of a GET, or why there was none. A name and password in the URL are for the client to send."""
    parts = urlsplit(url)
    url = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            return _REFUSED[0]
        return str(reason) or type(reason).__name__


def _scheduler_problem(address: str) -> str | None:
    """Connect, and over plain TCP wait for the handshake with which a Dask scheduler begins."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), TIMEOUT_S) as connection:
            if parts.scheme == "tls":
                return None
            length = _exactly(connection, 8)
        if len(length) == 8 and 0 < struct.unpack("<Q", length)[0] < _LONGEST_FRAME_BYTES:
            return None
        reason = "something else answers there"
    except OSError as error:
        reason = str(error)
    return f"is no Dask scheduler that answers ({reason})"


def _exactly(connection: socket.socket, count: int) -> bytes:
    """So many bytes, fewer if the other side ends."""
    found = b""
    while len(found) < count and (more := connection.recv(count - len(found))):
        found += more
    return found
