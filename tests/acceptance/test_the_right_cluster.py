"""A10. Symptom: a run quietly used a new local cluster instead of the given one, or waited for ever for workers that
could not run it.

Rule: a cluster is named by its address. Before anything is submitted, scheduler and workers are compared with what the
run needs; what is missing is named within five seconds. A cluster that is lost ends the run with a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from digenrl.config import ClusterConfig
from digenrl.scheduling.units import TrainUnit
from runs import OnUnit, Outcome, assert_as_expected, engine_for, small
from workers.checks import ClusterError
from workers.cluster import open_cluster
from workers.courier import RunFailed
from workers.listener import Listeners

DEADLINE_S = 60.0
ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def process(
    arguments: Sequence[str], environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A Dask process that ends with the block."""
    started = subprocess.Popen(
        [sys.executable, "-m", "dask", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield started
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGTERM)
        try:
            started.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


@contextlib.contextmanager
def scheduler(directory: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Dask scheduler of its own, by address."""
    file = directory / "scheduler.json"
    arguments = ["scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--dashboard-address", ":0"]
    with process([*arguments, "--scheduler-file", str(file)]) as started:
        deadline = time.monotonic() + DEADLINE_S
        while not file.exists() or not file.read_text().strip():
            assert time.monotonic() < deadline and started.poll() is None, "the Dask scheduler does not start"
            time.sleep(0.05)
        yield json.loads(file.read_text())["address"], started


def worker(address: str, **environment: str) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return process(["worker", address, "--nthreads", "2", "--no-dashboard"], environment)


async def refusal(address: str, *, after_workers: int = 0) -> tuple[str, float]:
    """What opening a cluster is refused with, and after how long."""
    if after_workers:
        from distributed import Client

        async with Client(address, asynchronous=True) as client:
            await client.wait_for_workers(after_workers, timeout=DEADLINE_S)
    began = time.monotonic()
    with pytest.raises(ClusterError) as caught:
        async with open_cluster(ClusterConfig(address=address)):
            pass
    return str(caught.value), time.monotonic() - began


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("port", ["silent_port", "closed_port"])
def test_nobody_at_the_address(request: pytest.FixtureRequest, port: str) -> None:
    address = f"tcp://127.0.0.1:{request.getfixturevalue(port)}"
    message, seconds = asyncio.run(refusal(address))
    assert message.startswith(f"cluster.address={address}: no Dask scheduler answers there within 5 s")
    assert seconds < 7


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scheduler(tmp_path_factory.mktemp("scheduler")) as (found, _):
        yield found


def test_no_workers(address: str) -> None:
    message, seconds = asyncio.run(refusal(address))
    assert f"{address}: the Dask scheduler there has no workers; start one with 'dask worker" in message
    assert seconds < 5


def test_a_worker_without_digenrl(address: str, tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "__init__.py").write_text("")
    with worker(address, PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1") as started:
        message, seconds = asyncio.run(refusal(address, after_workers=1))
        assert started.poll() is None
    assert "the worker at tcp://" in message
    assert "has no module workers.presence: start it in an environment that has digenrl" in message
    assert seconds < 10  # 5 where nothing else runs


def test_a_worker_with_another_version(address: str, tmp_path: Path) -> None:
    (tmp_path / "digenrl-9.9.9.dist-info").mkdir()
    (tmp_path / "digenrl-9.9.9.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: digenrl\nVersion: 9.9.9\n"
    )
    with worker(address, PYTHONPATH=f"{tmp_path}:{ROOT}") as started:
        message, _ = asyncio.run(refusal(address, after_workers=1))
        assert started.poll() is None
    assert "has digenrl 9.9.9, this process has " in message


async def _run(config_address: str, outcome: Outcome, *listeners: OnUnit) -> None:
    config = small(f"cluster.address={config_address}", "iterations=2")
    async with asyncio.timeout(DEADLINE_S), open_cluster(config.cluster) as client:
        outcome.finished = await engine_for(client, config, Listeners(outcome, *listeners)).run()


async def _workers(address: str, count: int) -> None:
    from distributed import Client

    async with Client(address, asynchronous=True) as client:
        await client.wait_for_workers(count, timeout=DEADLINE_S)


def test_a_run_on_processes_that_were_there(tmp_path: Path) -> None:
    """Twice in a row, on the same workers; then the scheduler dies."""
    with scheduler(tmp_path) as (found, dask), worker(found) as one, worker(found) as two:
        asyncio.run(_workers(found, 2))
        for _ in range(2):
            outcome = Outcome()
            asyncio.run(_run(found, outcome))
            assert_as_expected(outcome, small("iterations=2"))
            assert len({incarnation for _, incarnation in outcome.units}) == 2
        assert one.poll() is None and two.poll() is None

        strike = OnUnit(lambda unit: isinstance(unit, TrainUnit), lambda _: os.killpg(dask.pid, signal.SIGKILL), nth=3)
        began = time.monotonic()
        with pytest.raises(RunFailed, match=f"the connection to the Dask scheduler at {found} is lost"):
            asyncio.run(_run(found, Outcome(), strike))
        assert time.monotonic() - began < 30
