"""Flow runs whose process is gone are marked as Crashed; nobody else could, and they would show as Running for ever.

A process that trains a run holds the lock of the run's directory from before its flow run exists until that has ended.
"""

from __future__ import annotations

import json
import logging
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.runs import RunDirectory, run_names

TIMEOUT_S = 5.0
#: States of a run that is said to go on.
UNFINISHED = ("RUNNING", "PENDING", "CANCELLING")

log = logging.getLogger(__name__)

# A proxy from the environment must not be asked for a loopback address.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def bury(api_url: str, home: Path) -> list[str]:
    """Mark as Crashed what killed processes left: flow runs, their iterations' pages and task runs.

    Args:
        api_url: PREFECT_API_URL of the home's own server.
        home: where the runs live.

    Returns:
        Names of the runs that were found dead. Nothing is raised: a server that does not answer is asked next time.
    """
    try:
        ids = _ended(home)
        dead = _unfinished(api_url, "flow_runs", {"id": {"any_": ids}}) if ids else []
        for run in dead:
            pages = _unfinished(api_url, "flow_runs", {"parent_flow_run_id": {"any_": [run["id"]]}})
            ids = [run["id"], *(page["id"] for page in pages)]
            for task in _unfinished(api_url, "task_runs", {}, {"flow_runs": {"id": {"any_": ids}}}):
                _crash(api_url, "task_runs", task["id"], "its process ended")
            for page in pages:
                _crash(api_url, "flow_runs", page["id"], "its process ended")
            _crash(api_url, "flow_runs", run["id"], f"its process ended; continue with: digenrl resume {run['name']}")
    except (OSError, ValueError) as error:
        log.info("flow runs of killed processes were not looked for: %s", error)
        return []
    return [run["name"] for run in dead]


def _ended(home: Path) -> list[str]:
    """Ids of the flow runs of the runs that no process trains. Names would not do: another home may use this server."""
    runs = [RunDirectory(home / name) for name in run_names(home)]
    found = [run.summary_if_whole().get("prefect_flow_run_id") for run in runs if not run.is_held]
    return [flow_run_id for flow_run_id in found if flow_run_id is not None]


def _unfinished(
    api_url: str, kind: str, which: Mapping[str, Any], other: Mapping[str, Any] | None = None
) -> Sequence[dict[str, Any]]:
    body = {kind: {**which, "state": {"type": {"any_": UNFINISHED}}}, **(other or {})}
    return list(_post(f"{api_url}/{kind}/filter", body))


def _crash(api_url: str, kind: str, run_id: str, message: str) -> None:
    _post(f"{api_url}/{kind}/{run_id}/set_state", {"state": {"type": "CRASHED", "message": message}, "force": True})


def _post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with _opener.open(request, timeout=TIMEOUT_S) as response:
        return json.load(response)
