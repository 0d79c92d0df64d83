"""The detached process that owns the servers of one home: ``python -m flows.services.supervisor HOME``.

It makes the servers match the living leases, four times a second: what a lease wants is started, what no lease wants
any more is ended, and with the last server it ends itself. Each decision is taken under the directory's lock together
with the change to services.json, so that a process that joins never relies on a server about to be stopped.

The command prints the supervisor's pid and returns; the supervisor is a grandchild in a session of its own, reparented
to init, because ending the process tree of one owner must not end what the others use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from pathlib import Path

from flows.services.ports import claim, claim_from
from flows.services.server import Server
from flows.services.specs import SPECS
from flows.services.state import Lease, ServerState, ServiceError, ServicesDirectory, State
from storage.processes import identify

log = logging.getLogger(__name__)

POLL_S = 0.25


class Supervisor:
    """Reconciles servers with leases."""

    def __init__(self, directory: ServicesDirectory) -> None:
        self._directory = directory
        self._identity = identify()
        self._servers: dict[str, Server] = {}
        self._unstartable: dict[str, ServerState] = {}
        self._asked_to_stop = False

    def ask_to_stop(self, *_: object) -> None:
        """Signal handler: end the servers whoever holds leases."""
        self._asked_to_stop = True

    def run(self) -> None:
        """Work until nothing is wanted; whatever happens, no server is left behind."""
        try:
            while self._step():
                time.sleep(POLL_S)
        finally:
            Server.stop(list(self._servers.values()))

    def _step(self) -> bool:
        for server in self._servers.values():
            server.check()
        try:
            with self._directory.locked(f"the supervisor of {self._directory.root}"):
                wanted = {} if self._asked_to_stop else self._wanted()
                unwanted = [self._servers.pop(name) for name in list(self._servers) if name not in wanted]
                self._unstartable = {name: state for name, state in self._unstartable.items() if name in wanted}
                for name in wanted.keys() - self._servers.keys() - self._unstartable.keys():
                    self._start(name, wanted[name])
                if not wanted and not unwanted:
                    self._directory.state_file.unlink(missing_ok=True)
                    return False
                self._publish()
        except FileNotFoundError:
            log.warning("%s was removed; the servers end", self._directory.root)
            return False
        except ServiceError as error:  # the lock's holder hangs; what runs goes on running
            log.warning("%s", error)
            return True
        if unwanted:
            log.info("nobody needs %s any more", ", ".join(server.spec.name for server in unwanted))
            Server.stop(unwanted)
            return self._step()  # with nothing left there is nothing to sleep for
        return True

    def _wanted(self) -> dict[str, Lease]:
        """Services of the living leases, each with the lease that names its port, if one does."""
        wanted: dict[str, Lease] = {}
        for lease in self._directory.living_leases().values():
            for name, port in lease.ports.items():
                if name not in wanted or (wanted[name].ports[name] is None and port is not None):
                    wanted[name] = lease
        return wanted

    def _start(self, name: str, lease: Lease) -> None:
        spec, named = SPECS[name], lease.ports[name]
        port = claim_from(spec.first_port) if named is None else claim(named)
        if port is None:
            error = f"{lease.owner} asked for {name} on port {named}, which another process uses"
            self._unstartable[name] = ServerState("failed", named or 0, "", str(self._directory.log(name)), error=error)
            return
        log.info("starting %s on port %d for %s (pid %d)", name, port.port, lease.owner, lease.process.pid)
        self._servers[name] = Server(spec, self._directory, port)

    def _publish(self) -> None:
        states = {name: server.state for name, server in self._servers.items()} | self._unstartable
        if self._directory.read_state() != (state := State(self._identity, states)):
            self._directory.write_state(state)


def main(argv: list[str]) -> int:
    """Detach, print the supervisor's pid and return in the caller's child; supervise in the grandchild."""
    directory = ServicesDirectory(Path(argv[0]))
    directory.create()
    if pid := os.fork():
        print(pid, flush=True)
        # Skip interpreter shutdown: buffers and exit handlers belong to the grandchild now.
        os._exit(0)
    _use_log(directory.log("supervisor"))
    supervisor = Supervisor(directory)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, supervisor.ask_to_stop)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    supervisor.run()
    return 0


def _use_log(path: Path) -> None:
    """Send everything this process writes to ``path``; the caller's pipe must be let go of, or it would never end."""
    with contextlib.suppress(FileNotFoundError):
        path.replace(path.with_suffix(".log.1"))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.close(fd)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
