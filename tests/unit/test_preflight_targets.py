"""Servers that are not DigenRL's own are asked whether they answer, all at once and not for long."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest
from distributed import Scheduler

from digenrl import preflight_targets
from digenrl.config.load import ConfigError, load_config
from digenrl.preflight_targets import PrefectApi, check_targets, url_problem
from http_servers import Quiet, serving


class Servers(Quiet):
    """Prefect below /prefect/api, MLflow below /mlflow, both again below /locked, and nothing else."""

    def do_GET(self) -> None:
        path = self.path.removeprefix("/locked")
        known = path == "/prefect/api/health" or path.startswith("/mlflow/api/2.0/mlflow/experiments/search?")
        self.send_response((401 if self.path != path else 200) if known else 404)
        self.end_headers()


@pytest.fixture(scope="module")
def http() -> Iterator[str]:
    with serving(Servers) as address:
        yield address


def refusal(*overrides: str, prefect: str | None = None) -> str:
    config = load_config("tiny-smoke", overrides)
    with pytest.raises(ConfigError) as refused:
        check_targets(config, PrefectApi(prefect, f"--prefect-api {prefect}") if prefect is not None else None)
    return str(refused.value)


@pytest.mark.parametrize("place", ["", "/locked"])
def test_what_answers_is_let_pass(http: str, place: str) -> None:
    config = load_config("tiny-smoke", [f"tracking.uri={http}{place}/mlflow"])
    address = http.replace("//", "//user:secret@")
    check_targets(config, PrefectApi(f"{address}{place}/prefect/api", "--prefect-api"))


@pytest.mark.parametrize("uri", ["managed", "none", "sqlite:///mlflow.db"])
def test_what_is_no_server_is_not_asked(uri: str) -> None:
    check_targets(load_config("tiny-smoke", [f"tracking.uri={uri}"]))


def test_another_server_is_told_from_the_right_one(http: str) -> None:
    message = refusal(f"tracking.uri={http}", prefect=f"{http}/mlflow")
    assert f"--prefect-api {http}/mlflow answers, but not as a Prefect API (status 404 at /health); start" in message
    assert f"tracking.uri={http} answers, but not as MLflow (status 404); start" in message


def test_a_dask_scheduler_is_known_by_its_greeting() -> None:
    async def main() -> None:
        async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
            config = load_config("tiny-smoke", [f"cluster.address={scheduler.address}"])
            await asyncio.to_thread(check_targets, config)

    asyncio.run(main())


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight_targets, "TIMEOUT_S", 0.5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        started = time.monotonic()
        message = refusal(f"cluster.address=tcp://{place}", f"tracking.uri=http://{place}", prefect=f"http://{place}")
        assert time.monotonic() - started < 2
    assert message.startswith("3 problems")
    for name in (f"--prefect-api http://{place} ", f"cluster.address=tcp://{place} ", f"tracking.uri=http://{place} "):
        assert name in message


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", "no host"),
        ("http:///api", "no host"),
        ("http://host:99999", "out of range"),
        ("http://host:x/api", "could not be cast"),
        ("http://[::1/api", "Invalid IPv6"),
        ("garbage", "http://"),
        ("ftp://host/api", "http://"),
        ("", "http://"),
    ],
)
def test_what_is_no_address_is_named(url: str, reason: str) -> None:
    assert reason in (url_problem(url) or "")
    assert f"--prefect-api {url} is no address: " in refusal(prefect=url)


@pytest.mark.parametrize("url", ["http://localhost/api", "https://[::1]:4200/api", "http://user:secret@host:1"])
def test_possible_addresses(url: str) -> None:
    assert url_problem(url) is None
