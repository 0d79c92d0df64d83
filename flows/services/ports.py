"""A free port, held against the other homes of this user until the server ends.

Between choosing a port and the server's binding it lie seconds of start-up, in which another home would choose the
same one. A claim is a locked file per port in the temporary directory; the kernel frees it with its holder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import tempfile
from pathlib import Path
from typing import IO

from flows.services.specs import HOST

SEARCHED = 1000


class PortClaim:
    """One claimed port."""

    def __init__(self, port: int, file: IO[str]) -> None:
        self.port = port
        self._file = file

    def release(self) -> None:
        """Let others have the port."""
        self._file.close()


def is_free(port: int) -> bool:
    """Whether nobody listens on ``port`` of this machine."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        # macOS lets a loopback address be bound beside a listener on all addresses; connecting finds that listener.
        if probe.connect_ex((HOST, port)) == 0:
            return False
    with socket.socket() as probe:
        # As the servers do, or a port would look busy for a minute after each end of a server.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def claim(port: int) -> PortClaim | None:
    """Claim exactly ``port``; None if it is in use or claimed."""
    directory = Path(tempfile.gettempdir()) / f"digenrl-ports-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context((directory / str(port)).open("w"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if not is_free(port):
            return None
        stack.pop_all()
        return PortClaim(port, file)


def claim_from(first: int) -> PortClaim:
    """Claim the first free port from ``first`` on. Raises OSError if `SEARCHED` ports are taken."""
    for port in range(first, first + SEARCHED):
        if found := claim(port):
            return found
    raise OSError(errno.EADDRINUSE, f"no free port from {first} to {first + SEARCHED - 1}")
