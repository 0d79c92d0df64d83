"""What the two servers are: command, first port, health check, environment of the server and of its clients.

Both get an environment without the user's PREFECT_* and MLFLOW_* variables, so that a profile, an API key or a
database meant for another server never reaches ours; whoever wants to tune a server runs their own.
Commands run in ``<home>/.services`` and name their files relative to it: no character in the home's path can then be
taken for part of a database URL.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HOST = "127.0.0.1"


@dataclass(frozen=True)
class ServiceSpec:
    """One kind of server. ``command`` takes the port, ``environment`` the URL."""

    name: str
    first_port: int
    health_path: str
    command: Callable[[int], list[str]]
    environment: Callable[[str], dict[str, str]] = field(default=lambda url: {})


def _prefect_command(port: int) -> list[str]:
    return [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]


def _mlflow_command(port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1"),
        *("--backend-store-uri", "sqlite:///mlflow/mlflow.db", "--artifacts-destination", "mlflow/artifacts"),
        # One access line per request would grow the log without end.
        *("--uvicorn-opts", "--log-level warning"),
    ]


def _prefect_environment(url: str) -> dict[str, str]:
    # The pages ask this address for their data; by default it is that of port 4200, whatever --port says.
    return {"PREFECT_UI_API_URL": f"{url}/api"}


SPECS: dict[str, ServiceSpec] = {
    # 5000 is taken by AirPlay on macOS.
    "prefect": ServiceSpec("prefect", 4200, "/api/health", _prefect_command, _prefect_environment),
    "mlflow": ServiceSpec("mlflow", 5001, "/health", _mlflow_command),
}

# The recorder's default writes each event of a task run by itself: 33 ms of server CPU per run, 8 ms in batches.
_PREFECT_BATCHES = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "200",
}

_NO_TELEMETRY = {"DO_NOT_TRACK": "1", "MLFLOW_DISABLE_TELEMETRY": "true"}


def _prefect_home(root: Path) -> dict[str, str]:
    """Keep Prefect out of ``~/.prefect``."""
    return {"PREFECT_HOME": str(root / "prefect"), "PREFECT_PROFILES_PATH": str(root / "prefect" / "profiles.toml")}


def server_env(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Environment of both servers of ``<home>/.services`` at ``root``."""
    inherited = {k: v for k, v in environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "_MLFLOW_"))}
    return {
        **inherited,
        **_NO_TELEMETRY,
        **_prefect_home(root),
        **_PREFECT_BATCHES,
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:///prefect/prefect.db",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        # By default the UI's files are unpacked into site-packages, which may be read-only.
        "PREFECT_SERVER_UI_STATIC_DIRECTORY": str(root / "prefect" / "ui"),
        # Job execution costs nine more processes and 0.5 GB; DigenRL runs no MLflow jobs.
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        # A file prefect.py or mlflow/ in the working directory must not be imported instead of the package.
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }


def client_env(root: Path, urls: Mapping[str, str]) -> dict[str, str]:
    """What a process sets, before it imports Prefect or MLflow, to talk to the servers in ``urls``."""
    env = {
        **_NO_TELEMETRY,
        **_prefect_home(root),
        "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",  # it loses task runs
        "PREFECT_LOGGING_TO_API_ENABLED": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    if "prefect" in urls:
        env["PREFECT_API_URL"] = f"{urls['prefect']}/api"
    if "mlflow" in urls:
        env["MLFLOW_TRACKING_URI"] = urls["mlflow"]
    # Both clients obey the proxy variables, and a proxy cannot reach this machine's loopback address.
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [h for h in os.environ.get(name, "").split(",") if h]
        env[name] = ",".join(dict.fromkeys([*hosts, HOST, "localhost"]))
    return env
