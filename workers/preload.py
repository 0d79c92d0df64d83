"""Imported first in the worker processes of a local cluster, and in the server they are forked from.

Nothing imported here may start a thread or touch a GPU: neither survives a fork. What a worker writes to its stdout
and stderr goes to the file named by the environment variable `DIGENRL_WORKER_LOG`, if there is one.
"""

from __future__ import annotations

import os
import signal
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distributed import Worker

WORKER_LOG = "DIGENRL_WORKER_LOG"

# A Ctrl-C reaches a whole process group, on macOS that of the workers too. They live until the driver, which writes a
# checkpoint first, ends them.
signal.signal(signal.SIGINT, signal.SIG_IGN)

for module in ("peft", "digenrl.models.sd3", "workers.calls", "workers.presence"):
    import_module(module)


def dask_setup(worker: Worker) -> None:
    """Called by Dask in every worker: keep logs, warnings and what C libraries write off the driver's terminal."""
    if path := os.environ.get(WORKER_LOG):
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
