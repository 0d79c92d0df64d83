"""The files under ``<home>/.services`` and the one lock that orders every change to them.

    services.json   the supervisor and, per server, status, port, URL, log and processes (with start times)
    leases/         one file per process that needs servers: who, which, under which ports
    logs/           one log per server, the previous one beside it, and the supervisor's
    prefect/        PREFECT_HOME: database, profiles, UI files
    mlflow/         database and artifacts

Files are written whole and renamed into place; a reader needs no lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from storage.processes import ProcessId, identify, is_alive

log = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_TIMEOUT_S = 30.0

Status = Literal["starting", "healthy", "failed"]


class ServiceError(RuntimeError):
    """A server could not be had; the message says who waited for what and ends with the server's last log lines."""


@dataclass(frozen=True)
class Lease:
    """A process's claim on servers; void once the process is dead. ``ports``: None leaves the choice to us."""

    owner: str
    process: ProcessId
    ports: dict[str, int | None]


@dataclass(frozen=True)
class ServerState:
    """One server as its supervisor last saw it; ``error`` is set iff the status is failed."""

    status: Status
    port: int
    url: str
    log: str
    processes: tuple[ProcessId, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class State:
    """What services.json holds."""

    supervisor: ProcessId | None = None
    servers: dict[str, ServerState] = field(default_factory=dict)

    @property
    def is_supervised(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return self.supervisor is not None and is_alive(self.supervisor)


class ServicesDirectory:
    """``<home>/.services``."""

    def __init__(self, home: Path) -> None:
        self.root = home / ".services"
        self.leases = self.root / "leases"
        self.logs = self.root / "logs"
        self.state_file = self.root / "services.json"

    def create(self) -> None:
        """Make the directories; they are private, as both databases may hold prompts and parameters."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        for directory in (self.leases, self.logs, self.root / "prefect", self.root / "mlflow"):
            directory.mkdir(exist_ok=True)

    def log(self, name: str) -> Path:
        """Log of a server, or of the supervisor; the one before lies beside it as ``NAME.log.1``."""
        return self.logs / f"{name}.log"

    @contextlib.contextmanager
    def locked(self, waiter: str) -> Iterator[None]:
        """Hold the lock of this directory; the kernel frees it if the holder dies.

        Raises ServiceError naming waiter and holder after `LOCK_TIMEOUT_S`.
        """
        fd = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
                        raise ServiceError(
                            f"{waiter} waited {LOCK_TIMEOUT_S:.0f} s for {self.root / 'lock'}, held by {holder}"
                        ) from None
                    time.sleep(0.02)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{waiter} (pid {os.getpid()})\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def read_state(self) -> State:
        """services.json; an empty State where there is none, or none that can be read."""
        return _parsed(self.state_file, _state) or State()

    def write_state(self, state: State) -> None:
        """Replace services.json."""
        _write_json(self.state_file, asdict(state))

    def write_lease(self, owner: str, ports: dict[str, int | None], path: Path | None = None) -> Path:
        """Register the calling process, or change its lease at `path`; the path is its receipt."""
        lease = Lease(owner, identify(), ports)
        path = path or self.leases / f"{lease.process.pid}-{uuid.uuid4().hex[:8]}.json"
        _write_json(path, asdict(lease))
        return path

    def living_leases(self) -> dict[Path, Lease]:
        """Leases whose process runs; the files of dead ones, and those that cannot be read, are removed."""
        leases = {}
        for path in sorted(self.leases.glob("*.json")):
            lease = _parsed(path, _lease)
            if lease is not None and is_alive(lease.process):
                leases[path] = lease
            else:
                path.unlink(missing_ok=True)
        return leases


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a log, indented for an error message."""
    try:
        text = path.read_text(errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        text = []
    return "\n".join(f"  | {line}" for line in text) if text else "  | (the log is empty)"


def _parsed(path: Path, parse: Callable[[Any], T]) -> T | None:
    """What a file holds; None if it is not there, or was damaged, which is said in the log."""
    try:
        return parse(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        log.warning("%s is damaged and is taken for absent (%s: %s)", path, type(error).__name__, error)
        return None


def _state(data: dict[str, Any]) -> State:
    supervisor = data["supervisor"]
    return State(
        supervisor=None if supervisor is None else _process(supervisor),
        servers={
            name: ServerState(**{**server, "processes": tuple(map(_process, server["processes"]))})
            for name, server in data["servers"].items()
        },
    )


def _lease(data: dict[str, Any]) -> Lease:
    return Lease(data["owner"], _process(data["process"]), dict(data["ports"]))


def _process(data: dict[str, Any]) -> ProcessId:
    return ProcessId(int(data["pid"]), float(data["start_time"]))


def _write_json(path: Path, data: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(data, indent=2) + "\n")
    temporary.replace(path)
