"""The reward server's application, without a socket."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import httpx
import numpy as np
import pytest

from benchmarks.tiny_rewards import pictures
from digenrl.rewards.base import Failed, PromptRecord, Reward, RewardError, Score, Scored
from digenrl.rewards.batching import Limits
from digenrl.rewards.server import config_of, create_app, default_version
from digenrl.rewards.wire import request_of, scores_of

T = TypeVar("T")


class Width(Reward):
    """The width of the picture; says what it was called with, and does what the prompt's text asks for."""

    name = "width"

    def __init__(self, gate: threading.Event | None = None, broken: bool = False) -> None:
        self.calls: list[int] = []
        self.gate = gate
        self.broken = broken

    def load(self) -> None:
        if self.broken:
            raise RewardError("no weights here")
        if self.gate is not None:
            self.gate.wait(30)

    def validate(self, prompts: Sequence[PromptRecord]) -> None:
        if any(prompt.text == "bad" for prompt in prompts):
            raise ValueError("a bad prompt")

    def __call__(self, images: np.ndarray, prompts: Sequence[PromptRecord]) -> list[Score]:
        self.calls.append(len(images))
        if any(prompt.text == "raise" for prompt in prompts):
            raise ZeroDivisionError("by nothing")
        scored = Scored(float(images.shape[3]))
        return [Failed("not this one") if prompt.text == "fail" else scored for prompt in prompts]


def body(*texts: str, width: int = 6) -> dict[str, Any]:
    prompts = [PromptRecord(f"p{i}", text) for i, text in enumerate(texts)]
    return request_of(pictures(len(texts), 4, width)[:, None], prompts)


def served(reward: Reward, talk: Callable[[httpx.AsyncClient], Awaitable[T]], ready: bool = True, **more: Any) -> T:
    """What `talk` returns, with a client of the running application; it is ready before, if it ever will be."""

    async def run() -> T:
        app = create_app(reward, "v1", **more)
        transport = httpx.ASGITransport(app)
        async with (
            asyncio.timeout(30),
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://server") as client,
        ):
            while ready and (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.001)
            return await talk(client)

    return asyncio.run(run())


async def post(client: httpx.AsyncClient, *texts: str, width: int = 6) -> httpx.Response:
    return await client.post("/score", json=body(*texts, width=width))


def test_scores_come_back_in_order_with_the_version() -> None:
    answer = served(Width(), lambda client: post(client, "a", "fail", "b"))
    assert answer.json()["reward"] == "width"
    assert scores_of(answer.json(), 3) == ("v1", [Scored(6.0), Failed("not this one"), Scored(6.0)])


def test_requests_that_arrive_together_are_scored_together_by_size() -> None:
    reward = Width()

    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        widths = (6, 6, 8, 6)
        return await asyncio.gather(*(post(client, "a", "b", width=width) for width in widths))

    answers = served(reward, talk, limits=Limits(samples=8, wait_s=5.0))
    found = [[score["value"] for score in answer.json()["scores"]] for answer in answers]
    assert found == [[6.0, 6.0], [6.0, 6.0], [8.0, 8.0], [6.0, 6.0]]
    assert sorted(reward.calls) == [2, 6]


def test_a_request_that_cannot_be_scored_does_not_take_others_with_it() -> None:
    async def talk(client: httpx.AsyncClient) -> list[httpx.Response]:
        return await asyncio.gather(post(client, "a"), post(client, "raise"), post(client, "b"))

    good, bad, other = served(Width(), talk, limits=Limits(samples=3, wait_s=5.0))
    assert good.status_code == other.status_code == 200
    assert bad.status_code == 500 and "ZeroDivisionError: by nothing" in bad.json()["detail"]


def test_it_is_alive_before_it_is_ready_and_says_so() -> None:
    gate = threading.Event()

    async def talk(client: httpx.AsyncClient) -> None:
        assert (await client.get("/health")).status_code == 200
        ready, early = await client.get("/ready"), await post(client, "a")
        assert ready.status_code == early.status_code == 503 and "being loaded" in ready.json()["detail"]
        assert early.headers["Retry-After"] == "1"
        gate.set()
        while (await client.get("/ready")).status_code == 503:
            await asyncio.sleep(0.001)
        assert (await client.get("/ready")).json() == {"reward": "width", "version": "v1"}
        assert (await post(client, "a")).status_code == 200

    served(Width(gate), talk, ready=False)


def test_a_reward_that_cannot_be_loaded_is_never_ready_and_says_why() -> None:
    async def talk(client: httpx.AsyncClient) -> str:
        while True:
            detail = (await client.get("/ready")).json()["detail"]
            if "being loaded" not in detail:
                return str(detail)
            await asyncio.sleep(0.001)

    assert "no weights here" in served(Width(broken=True), talk, ready=False)


@pytest.mark.parametrize(
    ("header", "status"), [(None, 401), ("Bearer other", 401), ("secret", 401), ("Bearer secret", 200)]
)
def test_a_token_is_needed_to_score_and_for_nothing_else(header: str | None, status: int) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        headers = {"Authorization": header} if header else {}
        assert (await client.post("/score", json=body("a"), headers=headers)).status_code == status
        assert (await client.get("/health")).status_code == (await client.get("/ready")).status_code == 200

    served(Width(), talk, token="secret")


def test_what_is_no_request_is_refused_with_a_sentence() -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        for content, words in ((b"{", "JSONDecodeError"), (b"[]", "protocol 1"), (b"\xff", "UnicodeDecodeError")):
            answer = await client.post("/score", content=content)
            assert answer.status_code == 422 and words in answer.json()["detail"]
        answer = await post(client, "bad")
        assert answer.status_code == 422 and "a bad prompt" in answer.json()["detail"]

    served(Width(), talk)


def test_too_much_at_once_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("digenrl.rewards.server.LARGEST_BYTES", 100)
    assert served(Width(), lambda client: post(client, "a")).status_code == 413


def test_a_full_queue_says_so() -> None:
    gate, started = threading.Event(), threading.Event()

    class Slow(Width):
        def __call__(self, images: np.ndarray, prompts: Sequence[PromptRecord]) -> list[Score]:
            started.set()
            gate.wait(30)
            return super().__call__(images, prompts)

    async def talk(client: httpx.AsyncClient) -> list[int]:
        first = asyncio.ensure_future(post(client, "a", "b"))
        while not started.is_set():
            await asyncio.sleep(0.001)
        second = await post(client, "c", "d")
        assert second.status_code == 429 and second.headers["Retry-After"] == "1"
        gate.set()
        return [(await first).status_code, (await post(client, "e")).status_code]

    assert served(Slow(), talk, limits=Limits(samples=1, wait_s=0, waiting=2)) == [200, 200]


def test_settings_are_read_like_those_of_a_configuration() -> None:
    config = config_of("clip_score", ["path=a/b", "device=cuda", "frames=4"])
    assert (config.path, config.device, config.frames) == ("a/b", "cuda", 4)
    assert default_version(config).startswith("clip_score a/b digenrl ")
    for settings, words in ((["path"], "has no '='"), (["pth=a"], "pth: "), (["device=gpu"], "device: .*got 'gpu'")):
        with pytest.raises(RewardError, match=words):
            config_of("clip_score", settings)
