"""The `digenrl` program as a user runs it, in a home of its own, and the servers seen from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import psutil
import pytest

from storage.processes import is_running

PROGRAM = Path(sys.executable).with_name("digenrl")

#: What a user's shell may hold and these tests must not inherit.
_PREFIXES = ("PREFECT_", "MLFLOW_", "DIGENRL_", "DASK_")

_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The first true value of `condition`; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s:.0f} s for {what}")
        time.sleep(0.05)
    return value


def _as_in_a_terminal() -> None:
    """Signals arrive, also where the tests themselves were started in the background or with nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Program:
    """One started program, leader of a process group as in a terminal."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path
    started: float

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        """Likewise."""
        return self.err.read_text()

    def wait(self, timeout_s: float = 240.0) -> int:
        """Its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {timeout_s:.0f} s:\n{self.stdout}\n{self.stderr}")

    def ends(self, code: int, timeout_s: float = 240.0) -> float:
        """Seconds it has taken since its start; fails the test unless it exits with `code`."""
        assert self.wait(timeout_s) == code, f"{self.stdout}\n{self.stderr}"
        return time.monotonic() - self.started

    def family(self) -> list[psutil.Process]:
        """The process and all its descendants."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to every process of the group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End what is left, if anything."""
        if self.process.poll() is None:
            for process in self.family():
                process.kill()
            self.process.wait()


class Home:
    """A DIGENRL_HOME and the programs that run in it. Use as a context manager: it leaves no program behind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.user = path.with_name(f"{path.name}-user")
        for directory in (path, self.user):
            directory.mkdir(exist_ok=True)
        self._programs: list[Program] = []

    def __enter__(self) -> Home:
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs:
            program.kill()

    def start(self, *argv: str, environment: Mapping[str, str] | None = None) -> Program:
        """Start `digenrl ARGV...` in a directory that is not the checkout."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(_PREFIXES)}
        # matplotlib's cache of fonts takes seconds to make in a new home directory.
        env |= {"DIGENRL_HOME": str(self.path), "HOME": str(self.user), "MPLCONFIGDIR": matplotlib.get_configdir()}
        out, err = (self.user / f"{len(self._programs)}.{stream}" for stream in ("out", "err"))
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                [PROGRAM, *argv],
                cwd=self.user,
                env={**env, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_as_in_a_terminal,
            )
        self._programs.append(Program(process, out, err, time.monotonic()))
        return self._programs[-1]

    def run(self, *argv: str, code: int = 0, timeout_s: float = 240.0) -> Program:
        """Run to the end."""
        program = self.start(*argv)
        program.ends(code, timeout_s)
        return program


def post(api: str, path: str, body: Mapping[str, Any]) -> Any:
    """JSON answer of Prefect's API to a POST."""
    request = urllib.request.Request(f"{api}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with _opener.open(request, timeout=10) as response:
        return json.load(response)


def flow_runs(api: str, name: str) -> list[dict[str, Any]]:
    """Flow runs of a training run, oldest first."""
    body = {"flow_runs": {"name": {"any_": [name]}}, "sort": "START_TIME_ASC"}
    return list(post(api, "/flow_runs/filter", body))


def pages(api: str, flow_run_id: str) -> list[dict[str, Any]]:
    """The subflow runs of a flow run."""
    return list(post(api, "/flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [flow_run_id]}}}))


def task_runs(api: str, flow_run_id: str) -> list[dict[str, Any]]:
    """All task runs of a flow run and of its subflow runs."""
    ids = [flow_run_id, *(page["id"] for page in pages(api, flow_run_id))]
    found: list[dict[str, Any]] = []
    while True:
        page = post(api, "/task_runs/filter", {"flow_runs": {"id": {"any_": ids}}, "limit": 200, "offset": len(found)})
        found += page
        if len(page) < 200:
            return found


def gone(processes: list[psutil.Process]) -> bool:
    """Whether none of them runs any more."""
    return not any(map(is_running, processes))
