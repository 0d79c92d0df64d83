"""Wait until Prefect has recorded what a run emitted.

A task run's states travel as events and are written by the server later, in batches: the flow can be over while many
are still on their way. Stopping the server then would leave runs that show as Running for ever.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

POLL_S = 0.25

# A proxy from the environment must not be asked for a loopback address.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def drain_prefect(api_url: str, flow_run_ids: Sequence[str], emitted: int, timeout_s: float = 30.0) -> int:
    """Poll until at least ``emitted`` task runs of the flow runs are recorded in a final state, or ``timeout_s`` pass.

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
    while True:
        try:
            with _opener.open(request, timeout=max(0.1, min(5.0, deadline - time.monotonic()))) as response:
                recorded = int(json.load(response))
        except urllib.error.HTTPError as error:
            if error.code < 500:  # the request itself is wrong, and will be so next time
                raise
        except OSError:
            pass  # not reachable at the moment; the deadline decides
        if recorded >= emitted or time.monotonic() >= deadline:
            return recorded
        time.sleep(POLL_S)
