"""The shared servers: joined, never doubled, and gone within 5 s of their last owner, however it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from digenrl.config.load import ConfigError, load_config
from digenrl.preflight_targets import PrefectApi, check_targets
from flows.services import ServiceError, ServicesHandle, drain_prefect, ensure, release
from flows.services.drain import STILL_S
from flows.services.handle import revive
from flows.services.ports import claim, claim_from
from flows.services.specs import SPECS
from flows.services.state import ServerState, ServicesDirectory, State
from storage.processes import ProcessId, identify, is_alive, is_running, terminate_tree

GONE_S = 5.0

OWNER = """
import json, signal, sys
from pathlib import Path
from flows.services import ensure
handle = ensure(tuple(sys.argv[3:]), owner=sys.argv[2], home=Path(sys.argv[1]))
print(json.dumps(dict(handle.urls)), flush=True)
signal.pause()
"""

FLOW = """
from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.context import get_run_context
from prefect.task_runners import ThreadPoolTaskRunner

@task(cache_policy=NO_CACHE, persist_result=False)
def unit(i):
    return i

@flow(task_runner=ThreadPoolTaskRunner(max_workers=4), persist_result=False)
def run():
    [future.result() for future in [unit.submit(i) for i in range(20)]]
    print(get_run_context().flow_run.id)

run()
"""


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until ``condition`` held."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            pytest.fail(f"waited {timeout_s} s for {what}")
        time.sleep(0.05)
    return time.monotonic() - start


def status(url: str) -> int:
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as response:
        return int(response.status)


def processes(home: Path) -> list[psutil.Process]:
    """The supervisor of ``home`` and everything below it."""
    supervisor = ServicesDirectory(home).read_state().supervisor
    assert supervisor is not None
    root = psutil.Process(supervisor.pid)
    return [root, *root.children(recursive=True)]


@pytest.fixture
def owner() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process that ensures servers, prints their URLs and keeps its lease until it is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(home: Path, name: str, *services: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", OWNER, str(home), name, *services]
        # A HOME of its own shows whether anything writes to ~/.prefect.
        env = {**os.environ, "HOME": str(home)}
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def urls(process: subprocess.Popen[str]) -> dict[str, str]:
    assert process.stdout is not None
    return dict(json.loads(process.stdout.readline()))


def test_two_processes_at_once_start_one_set_and_killing_both_ends_it(tmp_path: Path, owner: Callable) -> None:
    home = tmp_path / "a home with 100% odd characters?"
    first, second = (owner(home, f"train {i}", "prefect", "mlflow") for i in (1, 2))
    assert urls(first) == urls(second)
    everything = processes(home)
    commands = [" ".join(p.cmdline()) for p in everything]
    assert sum("prefect server start" in c and "childguard" not in c for c in commands) == 1
    assert sum("-m uvicorn" in c for c in commands) == 1, "MLflow's web server is a grandchild of its guard"

    first.kill()
    first.wait()
    directory = ServicesDirectory(home)
    until(lambda: len(list(directory.leases.iterdir())) == 1, GONE_S, "the supervisor to notice the first death")
    with directory.locked("the test"):  # the supervisor has now taken its decision
        assert {name: s.status for name, s in directory.read_state().servers.items()} == dict.fromkeys(SPECS, "healthy")
    assert all(is_running(p) for p in everything), "the second owner still needs them"

    second.kill()
    second.wait()
    until(lambda: not any(is_running(p) for p in everything), GONE_S, "all processes to end after kill -9 of the owner")
    assert not directory.state_file.exists()
    assert not list(directory.leases.iterdir())
    assert not (home / ".prefect").exists(), "HOME of the owners"
    assert {p.name for p in (directory.root / "mlflow").iterdir()} >= {"mlflow.db"}
    assert (directory.root / "prefect" / "prefect.db").exists()


def test_servers_end_with_a_killed_supervisor_and_the_next_owner_starts_anew(tmp_path: Path, owner: Callable) -> None:
    before = urls(owner(tmp_path, "train 1", "mlflow"))
    everything = processes(tmp_path)
    os.kill(everything[0].pid, signal.SIGKILL)
    until(lambda: not any(is_running(p) for p in everything), GONE_S, "servers to end after kill -9 of the supervisor")
    assert ServicesDirectory(tmp_path).state_file.exists(), "stale, and to be cleaned up by the next owner"
    with ensure(("mlflow",), owner="train 2", home=tmp_path) as handle:
        assert handle.urls == before
        assert status(f"{before['mlflow']}/health") == 200


def test_a_user_of_the_servers_replaces_a_killed_supervisor(tmp_path: Path) -> None:
    with ensure(("mlflow",), owner="train 1", home=tmp_path) as handle:
        assert not revive(handle), "it lives"
        first = processes(tmp_path)
        os.kill(first[0].pid, signal.SIGKILL)
        until(lambda: revive(handle), GONE_S, "the death to be seen")
        handle.wait()
        assert status(f"{handle.urls['mlflow']}/health") == 200, "on the same port"
        assert not any(is_running(p) for p in first)
        assert len(ServicesDirectory(tmp_path).living_leases()) == 1
    assert not ServicesDirectory(tmp_path).state_file.exists()
    assert not revive(handle), "it ended in good order"


def test_joining_shares_the_servers(services: ServicesHandle) -> None:
    supervisor = ServicesDirectory(services.home).read_state().supervisor
    start = time.monotonic()
    with ensure(owner="second", home=services.home) as second:
        assert time.monotonic() - start < 2.0
        assert second.urls == services.urls
        assert ServicesDirectory(services.home).read_state().supervisor == supervisor
    assert release(second) == ["pytest"]
    assert status(f"{services.prefect_api}/health") == status(f"{services.mlflow_uri}/health") == 200
    with pytest.raises(ServiceError, match="already runs on"):
        ensure(("mlflow",), owner="third", ports={"mlflow": 1}, home=services.home)


def test_prefect_pages_ask_their_own_server(services: ServicesHandle) -> None:
    assert services.urls["prefect"] != f"http://127.0.0.1:{SPECS['prefect'].first_port}", "the fixture takes that port"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
        f"{services.urls['prefect']}/ui-settings", timeout=5
    ) as response:
        assert json.load(response)["api_url"] == services.prefect_api


def test_client_env_names_our_servers_and_keeps_prefect_out_of_the_home_directory(services: ServicesHandle) -> None:
    env = services.client_env()
    assert env["PREFECT_API_URL"] == services.prefect_api
    assert env["MLFLOW_TRACKING_URI"] == services.mlflow_uri
    assert Path(env["PREFECT_HOME"]).is_relative_to(services.home)
    assert Path(env["PREFECT_PROFILES_PATH"]).is_relative_to(services.home)
    assert "127.0.0.1" in env["NO_PROXY"].split(",")


def test_both_servers_are_known_for_what_they_are(services: ServicesHandle) -> None:
    config = load_config("tiny-smoke", [f"tracking.uri={services.mlflow_uri}"])
    check_targets(config, PrefectApi(services.prefect_api, "--prefect-api"))
    with pytest.raises(ConfigError, match="answers, but not as a Prefect API"):
        check_targets(config, PrefectApi(services.mlflow_uri + "/api", "--prefect-api"))


def test_drain_returns_once_every_task_run_is_recorded(services: ServicesHandle) -> None:
    env = {**os.environ, **services.client_env()}
    done = subprocess.run([sys.executable, "-c", FLOW], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    flow_run_id = done.stdout.split()[-1]
    assert drain_prefect(services.prefect_api, [flow_run_id], 20) == 20
    start = time.monotonic()
    assert drain_prefect(services.prefect_api, [flow_run_id], 21, timeout_s=0.5) == 20
    assert time.monotonic() - start < 3
    start = time.monotonic()
    assert drain_prefect(services.prefect_api, [flow_run_id], 21, timeout_s=60) == 20, "the last one never comes"
    assert STILL_S <= time.monotonic() - start < STILL_S + 3


def test_serve_prints_addresses_and_ends_on_interrupt(services: ServicesHandle) -> None:
    script = f"from pathlib import Path; from flows.services.serve import serve; serve(Path({str(services.home)!r}))"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        assert services.urls["prefect"] in lines[0]
        assert services.urls["mlflow"] in lines[1]
        process.send_signal(signal.SIGINT)
        assert "pytest" in process.stdout.read()
        assert process.wait(5) == 0


def test_a_server_that_cannot_start_is_an_error_with_its_log(tmp_path: Path) -> None:
    directory = ServicesDirectory(tmp_path)
    directory.create()
    (directory.root / "mlflow" / "mlflow.db").write_text("this is not a database " * 100)
    with pytest.raises(ServiceError, match=r"mlflow server ended with exit code 1 before it answered") as caught:
        ensure(("mlflow",), owner="train 1", home=tmp_path)
    assert "file is not a database" in str(caught.value)
    until(lambda: not directory.state_file.exists(), GONE_S, "the supervisor to end")


def test_stale_files_are_cleaned_and_pids_of_strangers_spared(tmp_path: Path) -> None:
    directory = ServicesDirectory(tmp_path)
    directory.create()
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with subprocess.Popen(command) as stranger, subprocess.Popen(command) as leftover:
        reused = ProcessId(stranger.pid, identify(stranger.pid).start_time - 100)
        state = ServerState("healthy", 1, "http://127.0.0.1:1", "log", (reused, identify(leftover.pid)))
        directory.write_state(State(reused, {"mlflow": state}))
        lease = directory.write_lease("dead", {"mlflow": None})
        data = json.loads(lease.read_text())
        data["process"] = {"pid": reused.pid, "start_time": reused.start_time}
        lease.write_text(json.dumps(data))

        handle = ensure(("mlflow",), owner="train 1", home=tmp_path, wait=False)
        try:
            assert not lease.exists()
            assert handle.urls["mlflow"] != state.url
            assert is_alive(identify(stranger.pid))
            assert not is_alive(state.processes[1]), "left behind by the dead supervisor"
        finally:
            release(handle)
            stranger.kill()
    assert not directory.state_file.exists()


def test_a_busy_port_is_an_error_only_if_it_was_named(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        busy = listener.getsockname()[1]
        with pytest.raises(ServiceError, match=f"mlflow port: {busy} is used by another process"):
            ensure(("mlflow",), owner="train 1", ports={"mlflow": busy}, home=tmp_path)
        assert not ServicesDirectory(tmp_path).state_file.exists(), "nothing was started"
        found = claim_from(busy)
    assert found.port > busy
    assert claim(found.port) is None, "claimed, though nobody listens yet"
    found.release()
    with pytest.raises(ServiceError, match="did you mean 'mlflow'"):
        ensure(("mlflo",), owner="train 1", home=tmp_path)


def test_terminate_tree_ends_what_ignores_sigterm() -> None:
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); signal.pause()"
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        tree = psutil.Process(parent.pid).children(recursive=True)
        terminate_tree(parent.pid, timeout_s=0.5)
        assert tree
        assert not any(is_running(p) for p in tree)
