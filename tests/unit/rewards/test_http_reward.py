"""The client of a reward server: what is tried again, what fails at once, and that no failure becomes a value."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from digenrl.config import RequestConfig, RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, RewardError, Score, Scored
from digenrl.rewards.http import HttpReward
from digenrl.rewards.registry import make_reward
from scripted import Script, scripted

#: Fast enough for tests: attempts follow each other at once.
QUICK = RequestConfig(samples=1, attempts=3, backoff_s=1e-3, timeout_s=5.0, deadline_s=20.0, break_after=100)


def echo(body: Mapping[str, Any]) -> object:
    """The number in each prompt's text."""
    return {"version": "1", "scores": [{"value": float(sample["text"])} for sample in body["samples"]]}


def ask(script: Script, count: int = 1, version: str | None = None, **changes: Any) -> list[Score]:
    reward = HttpReward(url=script.url, version=version, request=QUICK.model_copy(update=changes))
    return score(reward, count)


def score(reward: HttpReward, count: int) -> list[Score]:
    prompts = [PromptRecord(f"p{i}", str(i + 1)) for i in range(count)]
    return reward(np.zeros((count, 1, 4, 6, 3), np.uint8), prompts)


def reason(result: Score) -> str:
    assert isinstance(result, Failed)
    return result.reason


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 599, "drop"])
def test_what_may_pass_is_tried_again(status: int | str) -> None:
    with scripted([status, status], echo) as script:
        assert ask(script) == [Scored(1.0)]
        assert len(script.seen) == 3 and script.seen[0] == script.seen[2]


@pytest.mark.parametrize("status", [500, 429, "drop"])
def test_and_after_so_many_attempts_its_samples_have_failed(status: int | str) -> None:
    with scripted([status] * 3, echo) as script:
        (result,) = ask(script)
        assert "attempt 3 of 3" in reason(result) and script.url in reason(result)
        assert len(script.seen) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 302])
def test_everything_else_fails_at_once(status: int) -> None:
    with scripted([status], echo) as script:
        assert f"HTTP {status}: scripted {status}" in reason(ask(script)[0])
        assert len(script.seen) == 1


def test_a_request_that_fails_fails_its_samples_and_no_others() -> None:
    with scripted([200, 404, 200], echo) as script:
        first, second, third = ask(script, 5, samples=2, concurrency=1)[::2]
        assert first == Scored(1.0) and third == Scored(5.0)
        assert "404" in reason(second)
        assert [len(body["samples"]) for body in script.seen] == [2, 2, 1]


def test_a_server_that_hangs_costs_an_attempt_not_the_run() -> None:
    with scripted(["hang"], echo) as script:
        began = time.monotonic()
        assert ask(script, timeout_s=0.2) == [Scored(1.0)]
        assert time.monotonic() - began < 3


def test_all_of_a_micro_batch_has_one_deadline() -> None:
    with scripted(["hang"] * 9, echo) as script:
        began = time.monotonic()
        results = ask(script, 3, timeout_s=0.3, deadline_s=0.5, concurrency=1)
        assert time.monotonic() - began < 3
        assert all("within deadline_s=0.5" in reason(result) for result in results)


def test_retry_after_is_obeyed() -> None:
    with scripted([429], echo, headers={"Retry-After": "1"}) as script:
        began = time.monotonic()
        assert ask(script) == [Scored(1.0)]
        assert time.monotonic() - began >= 1


@pytest.mark.parametrize("concurrency", [1, 3])
def test_so_many_requests_are_under_way_and_no_more(concurrency: int) -> None:
    with scripted([], echo, slow_s=0.05) as script:
        assert ask(script, 9, concurrency=concurrency) == [Scored(float(i + 1)) for i in range(9)]
        assert script.most == concurrency


def test_an_address_that_keeps_failing_is_left_alone_and_tried_again_after_a_rest() -> None:
    with scripted([500] * 4, echo) as script:
        rules = QUICK.model_copy(update={"attempts": 1, "break_after": 2, "concurrency": 1, "rest_s": 0.3})
        reward = HttpReward(url=script.url, request=rules)
        assert "left alone" in reason(score(reward, 5)[-1]) and len(script.seen) == 2
        time.sleep(0.3)
        assert "HTTP 500" in reason(score(reward, 1)[0])
        assert "left alone" in reason(score(reward, 1)[0]) and len(script.seen) == 3
        script.steps.clear()
        time.sleep(0.3)
        assert score(reward, 3) == [Scored(1.0), Scored(2.0), Scored(3.0)]


def test_nobody_there_is_a_failure_with_the_address() -> None:
    with scripted([], echo) as script:
        url = script.url
    reward = HttpReward(url=url, request=QUICK)
    assert "ConnectError" in reason(score(reward, 1)[0])
    assert f"nobody answers at url={url}" in (reward.problem() or "")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"<html>", "did not answer with a JSON object"),
        ({"scores": [{"value": 1.0}]}, "no object with a version"),
        ({"version": "1", "scores": []}, "0 scores for 1 samples"),
        ({"version": "1"}, "no scores for 1 samples"),
        ({"version": "1", "scores": [{}]}, "instead of a score"),
        ({"version": "1", "scores": [{"value": None}]}, "instead of a score"),
        ({"version": "1", "scores": [{"value": True}]}, "instead of a score"),
        ({"version": "1", "scores": [{"value": float("nan")}]}, "instead of a score"),
        ({"version": "1", "scores": [{"failed": "no face"}]}, "no face"),
    ],
)
def test_an_answer_without_a_value_is_no_value(answer: object, words: str) -> None:
    with scripted([], lambda _: answer) as script:
        assert words in reason(ask(script)[0])


def test_scores_of_another_version_are_not_mixed_in() -> None:
    versions = iter("aab")
    with scripted([], lambda body: {**echo(body), "version": next(versions)}) as script:
        reward = HttpReward(url=script.url, request=QUICK.model_copy(update={"concurrency": 1}))
        *same, other = score(reward, 3)
        assert same == [Scored(1.0), Scored(2.0)]
        assert "serves version 'b', not 'a'" in reason(other)
    with scripted([], echo) as script:
        assert "serves version '1', not '2'" in reason(ask(script, version="2")[0])


def test_the_token_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted([], echo) as script:
        reward = HttpReward(url=script.url, request=QUICK.model_copy(update={"token_env": "SCORER_TOKEN"}))
        with pytest.raises(RewardError, match="SCORER_TOKEN: this environment variable is not set"):
            reward.load()
        monkeypatch.setenv("SCORER_TOKEN", "secret")
        reward.load()
        assert score(reward, 1) == [Scored(1.0)]
        assert script.tokens == ["Bearer secret"]


def test_no_samples_ask_nobody() -> None:
    with scripted([], echo) as script:
        assert ask(script, 0) == [] and not script.seen


def test_it_is_configured_like_any_reward() -> None:
    with scripted([], echo) as script:
        config = RewardConfig(name="http", label="quality", url=script.url, request=QUICK)
        assert score(make_reward(config), 2) == [Scored(1.0), Scored(2.0)]  # type: ignore[arg-type]
