"""`digenrl stop`: end the servers of this home that no living process needs.

Servers end by themselves with their last user. This is for the rest: a supervisor that hangs, processes that a killed
one left behind, and, with `--force`, users that should end as well.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence

import typer

from flows.errors import ExpectedError
from flows.services.server import kill_leftovers
from flows.services.state import Lease, ServicesDirectory
from storage.home import home
from storage.processes import is_alive, terminate_tree

POLL_S = 0.1
#: How long a user may take to end after SIGTERM: a training finishes its units and saves a checkpoint.
USER_S = 60.0
#: How long a supervisor without users may take to end its servers.
SUPERVISOR_S = 10.0


def run(*, force: bool) -> None:
    """End what nobody needs.

    Args:
        force: end the processes that use the servers first.

    Raises:
        ExpectedError: living processes use the servers, and `force` is off; or one came meanwhile.
    """
    directory = ServicesDirectory(home())
    if not directory.state_file.exists():
        typer.echo(f"no servers run for {home()}")
        return
    users = list(directory.living_leases().values())
    if users and not force:
        raise ExpectedError(
            f"the servers of {home()} are used by {_named(users)} and end with the last of them; "
            "`digenrl stop --force` ends these too, a training with a checkpoint"
        )
    servers = ", ".join(directory.read_state().servers) or "no server"
    _end_users(users)
    _end_servers(directory)
    if directory.read_state().is_supervised:
        raise ExpectedError(f"the servers of {home()} were taken by another process meanwhile and go on running")
    typer.echo(f"stopped: {servers} of {home()}")


def _named(users: Sequence[Lease]) -> str:
    return ", ".join(f"{user.owner} (pid {user.process.pid})" for user in users)


def _end_users(users: Sequence[Lease]) -> None:
    """Ask, wait, and then insist."""
    for user in users:
        typer.echo(f"ending {_named([user])}")
        if is_alive(user.process):
            os.kill(user.process.pid, signal.SIGTERM)
    if not _wait(lambda: not any(is_alive(user.process) for user in users), USER_S):
        for user in users:
            if is_alive(user.process):
                typer.echo(f"{_named([user])} did not end within {USER_S:.0f} s and is killed", err=True)
                terminate_tree(user.process.pid)


def _end_servers(directory: ServicesDirectory) -> None:
    if not _wait(lambda: not directory.read_state().is_supervised, SUPERVISOR_S):
        supervisor = directory.read_state().supervisor
        if supervisor is not None and not directory.living_leases():
            terminate_tree(supervisor.pid)
    with directory.locked("digenrl stop"):
        # Somebody may have come meanwhile: the servers of a living supervisor are no leftovers.
        if directory.state_file.exists() and not directory.read_state().is_supervised:
            kill_leftovers(directory)
            directory.state_file.unlink()


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True
