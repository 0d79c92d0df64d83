"""Operating-system processes: an identity that survives the reuse of a pid, and the end of a whole tree.

A pid alone does not name a process: after its death the kernel hands the number out again. `ProcessId` adds the start
time, so that a file left behind by a dead process is never mistaken for a living one and no stranger is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

#: How long the kernel may take to end a process that was sent SIGKILL.
KILLED_S = 1.0


@dataclass(frozen=True)
class ProcessId:
    """One process of this machine.

    ``start_time`` is in seconds: since boot on Linux, where psutil's epoch value would move with every correction of
    the clock and a running process would look like another one; since the epoch elsewhere.
    """

    pid: int
    start_time: float


def _start_time(pid: int) -> float:
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            raise psutil.NoSuchProcess(pid) from None
        # The command name, in parentheses, may itself hold spaces and parentheses; starttime is field 22 of stat.
        ticks = int(stat.rpartition(")")[2].split()[19])
        return ticks / os.sysconf("SC_CLK_TCK")
    return psutil.Process(pid).create_time()


def identify(pid: int | None = None) -> ProcessId:
    """The identity of process ``pid`` (default: the caller). Raises psutil.NoSuchProcess."""
    pid = os.getpid() if pid is None else pid
    return ProcessId(pid, _start_time(pid))


def is_alive(process: ProcessId) -> bool:
    """Whether this very process still runs. A zombie, which only waits to be reaped, does not."""
    try:
        return (
            _start_time(process.pid) == process.start_time
            and psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE
        )
    except psutil.NoSuchProcess:
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """Process ``pid`` and everything below it that runs now; empty if it is gone."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def terminate_tree(pid: int, timeout_s: float = 5.0) -> None:
    """`terminate_trees` for one root."""
    terminate_trees([pid], timeout_s)


def terminate_trees(pids: Iterable[int], timeout_s: float = 5.0) -> None:
    """End every process ``pid`` with all its descendants, side by side; a pid that is gone is no error.

    Each root gets SIGTERM and ``timeout_s`` to end in good order, children first as it sees fit. What is left of the
    trees then, or was left behind by its root, gets SIGKILL.
    """
    trees = [tree for pid in pids if (tree := descendants(pid))]
    for root, *_ in trees:
        _send(root, signal.SIGTERM)
    psutil.wait_procs([tree[0] for tree in trees], timeout=timeout_s)
    # A root that still lives may have started more since; one that is gone was listed while it lived.
    everything = {process for tree in trees for process in [*tree, *descendants(tree[0].pid)]}
    survivors = [process for process in everything if is_running(process)]
    for process in survivors:
        _send(process, signal.SIGKILL)
    # Not psutil.wait_procs: a process whose parent does not reap it stays a zombie, which is as good as gone.
    deadline = time.monotonic() + KILLED_S
    while any(map(is_running, survivors)) and time.monotonic() < deadline:
        time.sleep(0.02)


def is_running(process: psutil.Process) -> bool:
    """Whether the process still does something: psutil also counts a zombie as running."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _send(process: psutil.Process, signum: signal.Signals) -> None:
    # A process that ended between the look and the signal is what was wanted.
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signum)
