"""Keep both servers up until Ctrl-C: what `digenrl serve` does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from flows.services.handle import ensure, release

POLL_S = 1.0


def serve(home: Path, ports: Mapping[str, int | None] | None = None) -> None:
    """Start or join both servers of ``home``, print their addresses and block until SIGINT or SIGTERM.

    Call it in the main thread. Raises ServiceError if a server cannot be had or fails for good.
    """
    stop = threading.Event()
    before = {signum: signal.signal(signum, lambda *_: stop.set()) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        handle = ensure(owner="serve", ports=ports, home=home, wait=False)
        try:
            while handle.pending() and not stop.wait(0.2):
                continue
            if not stop.is_set():
                print(f"Prefect  {handle.urls['prefect']}")
                print(f"MLflow   {handle.urls['mlflow']}")
                print("Press Ctrl-C to stop.", flush=True)
            while not stop.wait(POLL_S):
                handle.pending()
        finally:
            others = release(handle)
        if others:
            print(f"Still used by {', '.join(others)}: the servers go on running for them.", flush=True)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
