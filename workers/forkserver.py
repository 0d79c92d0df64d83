"""The server that a local cluster's worker processes are forked from.

torch, transformers and diffusers take seconds of CPU to import. The server imports them once (workers.preload); a
worker, also one that takes the place of a killed one, is a fork of it and ready in a fraction of a second. The server
dies with the process that started it. On macOS, where forking a process that has used system frameworks is unsafe,
workers are spawned and import everything themselves.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Mapping

#: Value of distributed.worker.multiprocessing-method.
METHOD = "forkserver" if sys.platform == "linux" else "spawn"

#: One compute thread per process: two workers with two OpenMP threads each on two cores are several times slower.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1"}

#: What local workers find in their environment besides this process's.
ENVIRONMENT = {
    **THREADS,
    "PYTHONSAFEPATH": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Python's resource tracker survives a killed process and would complain to its terminal about what that left.
    "PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"))),
}


def start(environment: Mapping[str, str]) -> None:
    """Start the server if there is one on this platform and it does not run yet; returns at once.

    Args:
        environment: what the server, and with it every worker, finds in its environment besides this process's. It
            cannot be given later: libraries read it when they are imported.
    """
    if METHOD != "forkserver":
        return
    main_thread = threading.current_thread() is threading.main_thread()
    # What is killed with a thread must be started by one that lives as long as the process.
    multiprocessing.set_forkserver_preload([*(["workers.leash"] if main_thread else []), "workers.preload"])
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    # Inherited: until workers.leash has been imported, a Ctrl-C would end the server with a traceback. Blocking the
    # signal would not do: multiprocessing unblocks it on the way. And Python's resource tracker, which is started along
    # with the server, stays in our group and is needed until our end, also after the terminal is closed.
    quiet = (signal.SIGINT, signal.SIGHUP)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in quiet} if main_thread else {}
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def kill() -> None:
    """Kill the server and every process that was forked from it; harmless if there is none."""
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is None:
        return
    for end in (os.kill, os.killpg):  # until workers.leash has been imported, it leads no group
        with contextlib.suppress(ProcessLookupError):
            end(pid, signal.SIGKILL)
