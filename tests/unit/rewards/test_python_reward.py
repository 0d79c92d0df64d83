"""A function of the user's as a reward."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from digenrl.config import RewardConfig
from digenrl.rewards.base import Failed, PromptRecord, RewardError, Score, Scored
from digenrl.rewards.registry import make_reward

PROMPTS = [PromptRecord("a", "red"), PromptRecord("b", "blue")]
IMAGES = np.zeros((2, 1, 4, 4, 3), np.uint8)
MODULE = """
import numpy as np
constant = 3
def good(images, prompts): return images.mean(axis=(1, 2, 3, 4)) / 255
def one(images): return 0.0
def named(images, *, prompts): return 0.0
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_reward.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_reward"
    monkeypatch.delitem(sys.modules, "own_reward", raising=False)


def scores_of(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> list[Score]:
    reward = make_reward(RewardConfig(name="python:digenrl.rewards.base:frames_of"))
    monkeypatch.setattr(reward, "_function", function)
    reward.name = "mine"
    return list(reward(IMAGES, PROMPTS))


def test_a_function_is_called_with_images_and_prompts(module: str) -> None:
    images = np.stack([np.full((1, 4, 4, 3), 255, np.uint8), np.zeros((1, 4, 4, 3), np.uint8)])
    reward = make_reward(RewardConfig(name=f"python:{module}:good"))
    assert reward.name == "good" and list(reward(images, PROMPTS)) == [Scored(1.0), Scored(0.0)]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("own_reward", "must be python:MODULE:FUNCTION"),
        ("own_reward:", "must be python:MODULE:FUNCTION"),
        ("own_rewards:good", "the module own_rewards cannot be imported.*PYTHONPATH"),
        ("own_reward:goud", "own_reward has no goud; did you mean good?"),
        ("own_reward:constant", "something else than a function as constant"),
        ("own_reward:one", r"two positional arguments.*def one\(images, prompts\)"),
        ("own_reward:named", "two positional arguments"),
    ],
)
def test_what_is_no_such_function_is_an_error_at_start(module: str, target: str, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        make_reward(RewardConfig(name=f"python:{target}"))


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, np.float32(0.5)], [Scored(1.0), Scored(0.5)]),
        (np.asarray([0.25, 0.75]), [Scored(0.25), Scored(0.75)]),
        ([None, Failed("too dark")], [Failed("reward mine returned None"), Failed("too dark")]),
        ([math.nan, Scored(math.inf)], ["non-finite value nan", "non-finite value inf"]),
        (["0.5", True], ["returned str .*no number", Scored(1.0)]),
        ([0.5], ["returned 1 values for 2 samples"] * 2),
        (0.5, ["returned float '0.5', not 2 values"] * 2),
    ],
    ids=["numbers", "array", "nothing", "not finite", "strings", "too few", "one number"],
)
def test_what_is_no_value_is_a_failure_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, returned: Any, expected: list[Score | str]
) -> None:
    for found, wanted in zip(scores_of(monkeypatch, lambda *_: returned), expected, strict=True):
        if isinstance(wanted, str):
            assert isinstance(found, Failed) and re.search(wanted, found.reason), found
        else:
            assert found == wanted


def test_what_a_function_raises_fails_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> list[float]:
        raise ZeroDivisionError("by nothing")

    assert scores_of(monkeypatch, broken) == [Failed("reward mine raised ZeroDivisionError: by nothing")] * 2
