"""A process's share in the servers: `ensure` takes it, `release` gives it back, `revive` mends it.

handle = ensure(owner="train ocr-1", wait=False)   # servers start while the caller imports torch
os.environ.update(handle.client_env())             # before Prefect is imported
handle.wait()
"""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from flows.services.ports import claim, is_free
from flows.services.server import kill_leftovers
from flows.services.specs import SPECS, client_env
from flows.services.state import ServiceError, ServicesDirectory, State, log_tail
from storage.home import home as default_home
from storage.processes import identify

POLL_S = 0.1
PORTS_TIMEOUT_S = 30.0
#: How long servers without a supervisor may take to end and free their ports.
FREED_S = 5.0


@dataclass(frozen=True)
class ServicesHandle:
    """Servers this process may use until it releases the handle or dies. ``urls`` has no trailing slash."""

    home: Path
    owner: str
    urls: Mapping[str, str]
    lease: Path

    @property
    def prefect_api(self) -> str:
        """PREFECT_API_URL of these servers."""
        return f"{self.urls['prefect']}/api"

    @property
    def mlflow_uri(self) -> str:
        """MLFLOW_TRACKING_URI of these servers."""
        return self.urls["mlflow"]

    def client_env(self) -> dict[str, str]:
        """Environment to set before Prefect or MLflow is imported; valid before the servers answer."""
        return client_env(ServicesDirectory(self.home).root, self.urls)

    def wait(self, timeout_s: float = 120.0, services: Collection[str] | None = None) -> ServicesHandle:
        """Block until every server answers, or each of ``services``.

        Raises ServiceError if any server fails or ``timeout_s`` pass.
        """
        deadline = time.monotonic() + timeout_s
        while pending := [name for name in self.pending() if services is None or name in services]:
            if time.monotonic() > deadline:
                name = pending[0]
                log = ServicesDirectory(self.home).log(name)
                raise ServiceError(
                    f"{self.owner} waited {timeout_s:.0f} s for {name} to answer at "
                    f"{self.urls[name]}{SPECS[name].health_path}; end of {log}:\n{log_tail(log)}"
                )
            time.sleep(POLL_S)
        return self

    def pending(self) -> list[str]:
        """The services that do not answer yet. Raises ServiceError if one failed or the supervisor is gone."""
        states = _supervised(ServicesDirectory(self.home), self.owner).servers
        for name in self.urls:
            if name in states and states[name].status == "failed":
                raise ServiceError(states[name].error)
        return [name for name in self.urls if name not in states or states[name].status == "starting"]

    def __enter__(self) -> ServicesHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release(self)


def ensure(
    services: tuple[str, ...] = ("prefect", "mlflow"),
    *,
    owner: str,
    ports: Mapping[str, int | None] | None = None,
    home: Path | None = None,
    wait: bool = True,
    timeout_s: float = 120.0,
) -> ServicesHandle:
    """Join the servers of ``home`` (default: `storage.home.home`), starting those that do not run, side by side.

    Args:
        services: Which servers; names of `SPECS`.
        owner: Who asks, for messages: ``train ocr-1``.
        ports: Port by service; None or absent takes the first free one from 4200 (prefect) and 5001 (mlflow).
        home: State is kept in ``<home>/.services``.
        wait: False returns once ports are chosen, in well under a second; call `ServicesHandle.wait` later.
        timeout_s: Limit for all servers to answer.

    Raises ServiceError: a named port is in use, a server runs on another port than the named one, a server ended or
    did not answer in time. The claim is dropped then, and servers that nobody else needs end.
    """
    for name in services:
        if name not in SPECS:
            near = difflib.get_close_matches(name, SPECS, n=1, cutoff=0.0)[0]
            raise ServiceError(f"services: {name!r} is not one of {', '.join(SPECS)}; did you mean {near!r}?")
    home = home or default_home()
    directory = ServicesDirectory(home)
    directory.create()
    wishes = {name: (ports or {}).get(name) for name in services}
    with directory.locked(owner):
        state = directory.read_state()
        if not state.is_supervised:
            kill_leftovers(directory)
            state = State()
        _check_ports(wishes, state)
        # The supervisor decides under this lock, and so finds the lease whichever of the two comes first.
        if state.supervisor is None:
            directory.write_state(State(identify(_spawn_supervisor(home, owner))))
        lease = directory.write_lease(owner, wishes)
    try:
        handle = ServicesHandle(home, owner, _await_ports(directory, services, owner), lease)
        return handle.wait(timeout_s) if wait else handle
    except BaseException:
        lease.unlink(missing_ok=True)
        raise


def revive(handle: ServicesHandle) -> bool:
    """Start the servers again, on their ports, if their supervisor was killed; at once, without waiting for them.

    Returns:
        False if there is nothing to do: also where the supervisor has ended because it was asked to.
    """
    directory = ServicesDirectory(handle.home)
    state = directory.read_state()
    if state.supervisor is None or state.is_supervised:
        return False
    ports = {name: urllib.parse.urlsplit(url).port or 0 for name, url in handle.urls.items()}
    with directory.locked(handle.owner):
        if directory.read_state().is_supervised:  # by another process that uses them
            return False
        kill_leftovers(directory)
        deadline = time.monotonic() + FREED_S
        while not all(map(is_free, ports.values())) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        directory.write_lease(handle.owner, {**ports}, handle.lease)
        directory.write_state(State(identify(_spawn_supervisor(handle.home, handle.owner))))
    return True


def release(handle: ServicesHandle, *, wait_s: float = 10.0) -> list[str]:
    """Give the share back; safe to repeat. Servers nobody else needs end: `drain_prefect` first.

    Waits up to ``wait_s`` for them to end (0: not at all). Returns the owners for whom they go on running.
    """
    directory = ServicesDirectory(handle.home)
    handle.lease.unlink(missing_ok=True)
    deadline = time.monotonic() + wait_s
    while True:
        others = [lease.owner for lease in directory.living_leases().values()]
        if others or time.monotonic() >= deadline or not directory.read_state().is_supervised:
            return others
        time.sleep(POLL_S)


def _check_ports(wishes: Mapping[str, int | None], state: State) -> None:
    for name, port in wishes.items():
        if port is None:
            continue
        if name in state.servers:
            running = state.servers[name]
            if running.port != port:
                raise ServiceError(
                    f"{name} port: {port} was asked for, but the {name} server of this home already runs on "
                    f"{running.port}; leave the port out to join it"
                )
        elif (free := claim(port)) is None:
            raise ServiceError(f"{name} port: {port} is used by another process; name a free one or leave it out")
        else:
            free.release()


def _spawn_supervisor(home: Path, owner: str) -> int:
    started = subprocess.run(
        [sys.executable, "-m", "flows.services.supervisor", str(home)],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        start_new_session=True,
        timeout=60,
        check=False,
    )
    if started.returncode:
        raise ServiceError(f"{owner} could not start the supervisor of the servers:\n{started.stderr}")
    return int(started.stdout)


def _await_ports(directory: ServicesDirectory, services: tuple[str, ...], owner: str) -> dict[str, str]:
    """URLs of ``services`` once the supervisor has chosen their ports."""
    deadline = time.monotonic() + PORTS_TIMEOUT_S
    while True:
        servers = _supervised(directory, owner).servers
        if failed := [servers[name].error for name in services if name in servers and not servers[name].url]:
            raise ServiceError(failed[0])
        if all(name in servers for name in services):
            return {name: servers[name].url for name in services}
        if time.monotonic() > deadline:
            raise ServiceError(
                f"{owner} waited {PORTS_TIMEOUT_S:.0f} s for the supervisor of {directory.root} to choose ports; "
                f"its log ends:\n{log_tail(directory.log('supervisor'))}"
            )
        time.sleep(0.05)


def _supervised(directory: ServicesDirectory, owner: str) -> State:
    state = directory.read_state()
    if not state.is_supervised:
        raise ServiceError(
            f"{owner} uses the servers of {directory.root}, but their supervisor is gone; its log ends:\n"
            f"{log_tail(directory.log('supervisor'))}"
        )
    return state
