"""Run a command that must not outlive its parent: ``python -m flows.childguard PARENT_PID COMMAND [ARGUMENT...]``.

Linux can signal a child when its parent dies, macOS cannot, and neither reaches the grandchildren. This small process
does both everywhere: it leads a process group, starts the command in it and looks several times a second whether it
was orphaned. SIGTERM or the parent's death: SIGTERM to the command, `GRACE_S` to end, then SIGKILL to the group.
Only the standard library is imported, so that starting it costs tens of milliseconds and about 10 MB.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

POLL_S = 0.1
GRACE_S = 1.0


def main(argv: list[str]) -> int:
    """Guard the command until it ends; its exit code, or 128 + signal where a signal ended it."""
    parent, command = int(argv[0]), argv[1:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    asked: list[int] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda received, _frame: asked.append(received))

    child = subprocess.Popen(command)
    deadline = None
    while child.poll() is None:
        # The parent is named, not read at the start: it may be dead before this line first runs.
        if deadline is None and (asked or os.getppid() != parent):
            child.terminate()
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(POLL_S)

    if deadline is not None:
        os.killpg(0, signal.SIGKILL)  # this process too: nobody waits for its exit code
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)  # what the command left behind
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
