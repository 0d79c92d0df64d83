"""One server process under its guard: start, health, restart, end. Used by the supervisor only."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import replace

import psutil

from flows.services.ports import PortClaim
from flows.services.specs import HOST, ServiceSpec, server_env
from flows.services.state import ServerState, ServicesDirectory, Status, log_tail
from storage.processes import ProcessId, descendants, identify, is_alive, terminate_trees

log = logging.getLogger(__name__)

HEALTH_TIMEOUT_S = 0.5
#: So many restarts within so many seconds mean that it cannot live.
MAX_RESTARTS = 3
RESTARTS_WITHIN_S = 300.0

# A proxy from the environment must not be asked for a loopback address.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answer(url: str, timeout_s: float = HEALTH_TIMEOUT_S) -> bytes | None:
    """What a GET of ``url`` gives; None if it fails."""
    try:
        with _opener.open(url, timeout=timeout_s) as response:
            return bytes(response.read())
    except (OSError, urllib.error.URLError):
        return None


class Server:
    """A server that is started again on its port when it dies after having been healthy."""

    def __init__(self, spec: ServiceSpec, directory: ServicesDirectory, port: PortClaim) -> None:
        self.spec = spec
        self._directory = directory
        self._claim = port
        self._log = directory.log(spec.name)
        self._url = f"http://{HOST}:{port.port}"
        self._restarted_at: list[float] = []
        self._start()

    def _start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._log.replace(self._log.with_suffix(".log.1"))
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "flows.childguard", str(os.getpid()), *self.spec.command(self._claim.port)],
                cwd=self._directory.root,
                env={**server_env(self._directory.root, os.environ), **self.spec.environment(self._url)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        self.state = ServerState("starting", self._claim.port, self._url, str(self._log), self._identities())

    def check(self) -> None:
        """Bring ``state`` up to date."""
        if self.state.status == "failed":
            return
        code = self._process.poll()
        if code is not None:
            self._sweep()
            self._ended(code)
        elif (
            self.state.status == "starting"
            and answer(self._url + self.spec.health_path) is not None
            and self._listens()
        ):
            log.info("%s answers after %.1f s at %s", self.spec.name, time.monotonic() - self._started_at, self._url)
            self._become("healthy")

    def _ended(self, code: int) -> None:
        now = time.monotonic()
        self._restarted_at = [at for at in self._restarted_at if now - at < RESTARTS_WITHIN_S]
        if self.state.status == "healthy" and len(self._restarted_at) < MAX_RESTARTS:
            self._restarted_at.append(now)
            log.warning("%s ended with exit code %d; started again on port %d", self.spec.name, code, self._claim.port)
            self._start()
            return
        when = (
            "before it answered"
            if self.state.status == "starting"
            else f"after {MAX_RESTARTS} restarts in {RESTARTS_WITHIN_S:.0f} s"
        )
        error = f"the {self.spec.name} server ended with exit code {code} {when}; end of {self._log}:"
        log.error("%s", error)
        self._become("failed", f"{error}\n{log_tail(self._log)}")

    def _become(self, status: Status, error: str = "") -> None:
        self.state = replace(self.state, status=status, processes=self._identities(), error=error)

    def _identities(self) -> tuple[ProcessId, ...]:
        """Every process of this server, for whoever must clean up after a supervisor that was killed."""
        found = []
        for process in descendants(self._process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(identify(process.pid))
        return tuple(found)

    def _listens(self) -> bool:
        """Whether it is ours that answered: a stranger may have bound the port before our server tried to."""
        for process in descendants(self._process.pid):
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections(kind="tcp"):
                    if connection.status == psutil.CONN_LISTEN and connection.laddr.port == self._claim.port:
                        return True
        return False

    def _sweep(self) -> None:
        # The guard leads a group of its own; when it was killed itself, its orphans are still members.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @staticmethod
    def stop(servers: list[Server], timeout_s: float = 3.0) -> None:
        """End the servers side by side and give their ports back."""
        terminate_trees([server._process.pid for server in servers], timeout_s)
        for server in servers:
            server._sweep()
            server._process.wait()
            server._claim.release()


def kill_leftovers(directory: ServicesDirectory) -> None:
    """End what a killed supervisor's servers left running; pids that meanwhile name other processes are spared."""
    processes = [p for server in directory.read_state().servers.values() for p in server.processes if is_alive(p)]
    terminate_trees([p.pid for p in processes])
