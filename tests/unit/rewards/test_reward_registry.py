"""Rewards by name."""

import subprocess
import sys

import pytest

from digenrl.rewards.registry import make_reward, reward_names


@pytest.mark.parametrize("name", reward_names())
def test_every_registered_reward_can_be_made_and_knows_its_name(name: str) -> None:
    assert make_reward(name).name == name


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'jpg_compressibility' is not a registered reward.*jpeg_compressibility"):
        make_reward("jpg_compressibility")
    with pytest.raises(ValueError, match="jpeg_compressibility, jpeg_incompressibility, ocr"):
        make_reward("xyz")


def test_naming_a_reward_loads_no_other() -> None:
    code = (
        "import sys; from digenrl.rewards.registry import make_reward; make_reward('jpeg_compressibility'); "
        "print(sorted({'onnxruntime', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
