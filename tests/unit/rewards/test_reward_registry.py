"""Rewards by name."""

import subprocess
import sys

import pytest

from digenrl.config import RequestConfig, RewardConfig
from digenrl.rewards.base import RewardError
from digenrl.rewards.registry import make_reward, reward_class, reward_names


@pytest.mark.parametrize("name", reward_names())
def test_every_registered_reward_knows_its_name_and_says_what_people_want_to_know(name: str) -> None:
    found = reward_class(name)
    assert found.name == name
    assert all((found.card.says, found.card.range, found.card.media, found.card.licence, found.card.weights))


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'jpg_compressibility' is not a registered reward.*jpeg_compressibility"):
        make_reward(RewardConfig(name="jpg_compressibility"))
    with pytest.raises(ValueError, match="jpeg_compressibility, jpeg_incompressibility, ocr"):
        make_reward(RewardConfig(name="xyz"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RewardConfig(name="ocr", path="a/b", url="http://x"), "ocr has no use for path, url; delete them"),
        (RewardConfig(name="ocr", request=RequestConfig(attempts=2)), "ocr has no use for request; delete it"),
        (RewardConfig(name="clip_score"), r"clip_score needs path \(path: Its weights"),
        (RewardConfig(name="vlm_judge", url="http://x"), "vlm_judge needs model"),
        (RewardConfig(name="http", url="ftp://x"), "must begin with http"),
        (RewardConfig(name="python:math:floor", path="a/b"), "no use for path"),
    ],
)
def test_settings_that_are_missing_wrong_or_of_no_use_are_named(config: RewardConfig, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        make_reward(config)


def test_a_label_is_what_a_reward_is_called() -> None:
    assert make_reward(RewardConfig(name="ocr", label="exact", match="exact")).name == "exact"
    assert make_reward(RewardConfig(name="python:operator:eq")).name == "eq"


def test_naming_a_reward_loads_no_other() -> None:
    code = (
        "import sys; from digenrl.config.rewards import RewardConfig; "
        "from digenrl.rewards.registry import make_reward; make_reward(RewardConfig(name='jpeg_compressibility')); "
        "print(sorted({'onnxruntime', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
