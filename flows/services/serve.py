"""Keep both servers up until Ctrl-C: what `digenrl serve` does."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

from flows.services.burial import bury
from flows.services.handle import ServicesHandle, ensure, release
from flows.services.server import answer
from storage.runs import RunDirectory, run_names
from storage.tracker import run_path

POLL_S = 1.0
#: Runs whose pages are named.
RECENT = 5
#: How long a server may take to say whether it knows a run.
TIMEOUT_S = 5.0


def serve(home: Path, ports: Mapping[str, int | None] | None = None) -> None:
    """Start or join both servers of ``home``, print where the newest runs are and block until SIGINT or SIGTERM.

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
                bury(handle.prefect_api, home)
                print(f"Prefect  {handle.urls['prefect']}")
                print(f"MLflow   {handle.urls['mlflow']}")
                for line in [line for name in run_names(home)[:RECENT] for line in pages(handle, name)]:
                    print(line)
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


def pages(handle: ServicesHandle, name: str) -> list[str]:
    """The run's name and below it where these servers show it; nothing if neither knows it."""
    summary = RunDirectory(handle.home / name).summary_if_whole()
    lines = []
    prefect, flow_run_id = handle.urls["prefect"], summary.get("prefect_flow_run_id")
    if flow_run_id and answer(f"{prefect}/api/flow_runs/{flow_run_id}", TIMEOUT_S):
        lines.append(f"  Prefect  {prefect}/runs/flow-run/{flow_run_id}")
    mlflow, run_id = handle.urls["mlflow"], summary.get("mlflow_run_id")
    if run_id and (found := answer(f"{mlflow}/api/2.0/mlflow/runs/get?run_id={run_id}", TIMEOUT_S)):
        lines.append(f"  MLflow   {mlflow}/#{run_path(json.loads(found)['run']['info']['experiment_id'], run_id)}")
    return [name, *lines] if lines else []
