"""`digenrl stop`: nothing that is needed ends without --force, nothing is left with it."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from flows.cli import app
from flows.services.state import ServerState, ServicesDirectory, State
from storage.processes import ProcessId, identify, is_running

OWNER = """
import signal, sys
from pathlib import Path
from flows.services import ensure
ensure(("mlflow",), owner="train ocr-1", home=Path(sys.argv[1]), wait=False)
print("ready", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIGENRL_HOME", str(tmp_path))
    return tmp_path


def stop(*argv: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["stop", *argv])
    assert result.exit_code == code, result.output
    return result.output


def test_without_servers_there_is_nothing_to_do(home: Path) -> None:
    assert f"no servers run for {home}" in stop()
    assert list(home.iterdir()) == []


def test_a_run_is_spared_unless_forced(home: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, str(home)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        supervisor = ServicesDirectory(home).read_state().supervisor
        assert supervisor is not None
        servers = [psutil.Process(supervisor.pid), *psutil.Process(supervisor.pid).children(recursive=True)]

        message = stop(code=1)
        assert f"train ocr-1 (pid {owner.pid})" in message
        assert "stop --force" in message
        assert owner.poll() is None
        assert all(map(is_running, servers))

        assert "stopped: mlflow" in stop("--force")
        owner.wait(5)
        _, left = psutil.wait_procs(servers, timeout=5)  # the supervisor's last act is to exit
        assert not any(map(is_running, left))
    assert not ServicesDirectory(home).state_file.exists()
    assert "no servers run" in stop()


def test_what_a_killed_supervisor_left_ends_and_strangers_do_not(home: Path) -> None:
    directory = ServicesDirectory(home)
    directory.create()
    sleeper = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(sleeper) as left, subprocess.Popen(sleeper) as stranger:
        reused = ProcessId(stranger.pid, identify(stranger.pid).start_time - 100)
        server = ServerState("healthy", 1, "http://127.0.0.1:1", "log", (identify(left.pid), reused))
        directory.write_state(State(reused, {"mlflow": server}))
        try:
            assert "stopped: mlflow" in stop()
            left.wait(5)
            assert stranger.poll() is None
        finally:
            left.kill()
            stranger.kill()
    assert not directory.state_file.exists()


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"supervisor": {"pid": "x"}, "servers": {}}', "\udcff"])
def test_damaged_files_of_servers_are_taken_for_absent(
    home: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    directory = ServicesDirectory(home)
    directory.create()
    lease = directory.write_lease("train ocr-1", {"mlflow": None})
    for file in (directory.state_file, lease):
        file.write_bytes(content.encode(errors="surrogateescape"))
    with caplog.at_level(logging.WARNING):
        assert directory.read_state() == State()
        assert directory.living_leases() == {}
    assert [f"{directory.state_file} is damaged" in caplog.text, f"{lease} is damaged" in caplog.text] == [True] * 2
    assert not lease.exists()
    assert "stopped: no server" in stop()
    assert not directory.state_file.exists()
