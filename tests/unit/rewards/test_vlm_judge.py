"""The judge behind an OpenAI-compatible endpoint, against a local server that answers like one."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from benchmarks.tiny_rewards import pictures
from digenrl.config import RequestConfig, RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, Score, Scored
from digenrl.rewards.registry import make_reward
from digenrl.rewards.wire import decode_picture
from scripted import Script, scripted

PROMPT = PromptRecord("p", "three red {target} cubes", {"target": "wooden"})


def completion(text: str | None) -> Mapping[str, Any]:
    message = {"role": "assistant", "content": text}
    return {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}


def judge(script: Script, frames: np.ndarray, prompt: PromptRecord = PROMPT, **settings: Any) -> Score:
    request = RequestConfig(attempts=2, backoff_s=1e-3)
    config = RewardConfig(name="vlm_judge", url=f"{script.url}/v1/", model="judge-1", request=request, **settings)
    return make_reward(config)(frames[None], [prompt])[0]


def test_the_model_sees_the_question_and_every_frame_without_loss() -> None:
    shown = pictures(2)
    with scripted([], lambda _: completion("7")) as script:
        assert judge(script, shown) == Scored(0.7)
    (body,) = script.seen
    assert body["model"] == "judge-1" and body["temperature"] == 0
    text, *images = body["messages"][0]["content"]
    assert "three red {target} cubes" in text["text"]
    for image, frame in zip(images, shown, strict=True):
        head, _, data = image["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        np.testing.assert_array_equal(decode_picture(base64.b64decode(data)), frame)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 1.0),
        ("0", 0.0),
        (" 7.5\n", 0.75),
        ("The 3 cubes are there.\nScore: 8", 0.8),
        ("**9**", 0.9),
        ("8/10", 0.8),
        ("6 out of 10.", 0.6),
    ],
)
def test_the_last_number_is_the_mark(text: str, value: float) -> None:
    with scripted([], lambda _: completion(text)) as script:
        assert judge(script, pictures(1)) == Scored(pytest.approx(value))


@pytest.mark.parametrize("text", ["I cannot judge this.", "11", "-1", ""])
def test_an_answer_without_a_mark_is_no_value(text: str) -> None:
    with scripted([], lambda _: completion(text)) as script:
        result = judge(script, pictures(1))
    assert isinstance(result, Failed) and "no mark from 0 to 10" in result.reason


@pytest.mark.parametrize("answer", [completion(None), {"error": {"message": "no such model"}}, {"choices": []}])
def test_an_answer_that_is_no_completion_is_no_value(answer: Mapping[str, Any]) -> None:
    with scripted([], lambda _: answer) as script:
        result = judge(script, pictures(1))
    assert isinstance(result, Failed) and "did not answer with a chat completion" in result.reason


def test_it_is_tried_again_like_any_scorer() -> None:
    with scripted([503], lambda _: completion("5")) as script:
        assert judge(script, pictures(1)) == Scored(0.5)
        assert len(script.seen) == 2


def test_a_question_of_ones_own_names_fields_of_the_record() -> None:
    question = "Is the cube {target}? Asked of: {prompt}"
    with scripted([], lambda _: completion("5")) as script:
        judge(script, pictures(1), question=question)
    assert script.seen[0]["messages"][0]["content"][0]["text"] == "Is the cube wooden? Asked of: " + PROMPT.text
    reward = make_reward(RewardConfig(name="vlm_judge", url="http://x/v1", model="m", question=question))
    with pytest.raises(ValueError, match=r"names \{target\}, which prompt 'q' lacks \(it has prompt\)"):
        reward.validate([PromptRecord("q", "a cube")])
