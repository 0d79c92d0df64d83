"""Wait until Prefect has recorded what a run emitted.

A task run's states travel as events and are written by the server later, in batches: the flow can be over while many
are still on their way. Stopping the server then would leave runs that show as Running for ever.
"""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

POLL_S = 0.25
#: It writes a batch a second.
STILL_S = 5.0

# A proxy from the environment must not be asked for a loopback address.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def drain_prefect(api_url: str, flow_run_ids: Sequence[str], emitted: int, timeout_s: float = 30.0) -> int:
    """Poll until at least ``emitted`` task runs of the flow runs are recorded in a final state.

    Give up after ``timeout_s``, or when a server that answers has recorded none for `STILL_S`: it was killed with some.

    Args:
        api_url: PREFECT_API_URL of a server without authentication, such as ours.
        flow_run_ids: uuids of the flow run and its subflow runs.
        emitted: Task runs whose final state was emitted.
        timeout_s: Limit, also while the server does not answer.

    Returns:
        How many are recorded; less than ``emitted`` means that the rest is lost if the server stops now.
    """
    body = {
        "flow_runs": {"id": {"any_": list(flow_run_ids)}},
        "task_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED", "CANCELLED"]}}},
    }
    request = urllib.request.Request(
        f"{api_url}/task_runs/count", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    recorded, deadline = 0, time.monotonic() + timeout_s
    grown = time.monotonic()
    while True:
        try:
            with _opener.open(request, timeout=max(0.1, min(5.0, deadline - time.monotonic()))) as response:
                found = int(json.load(response))
            if found > recorded:
                recorded, grown = found, time.monotonic()
        except urllib.error.HTTPError as error:
            if error.code < 500:  # the request itself is wrong, and will be so next time
                raise
        except OSError:
            grown = time.monotonic()  # not reachable at the moment; the deadline decides
        if recorded >= emitted or time.monotonic() >= min(deadline, grown + STILL_S):
            return recorded
        time.sleep(POLL_S)


def end_events(timeout_s: float) -> None:
    """Let this process's queue of Prefect events run empty, for ``timeout_s``; then give it up.

    By itself Prefect would wait for each event's ten attempts to connect when the interpreter exits.
    """
    from prefect._internal.concurrency.threads import get_global_loop
    from prefect.events.worker import EventsWorker

    _, late = EventsWorker.drain_all(timeout=timeout_s)
    loop = get_global_loop()._loop
    if late and loop is not None:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
