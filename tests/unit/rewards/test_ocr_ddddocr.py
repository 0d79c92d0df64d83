"""The second reader: it reads what the first does, by another engine, and imports neither OpenCV nor torchvision."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from digenrl.config import RewardConfig
from digenrl.data.numbers import CLEAN, render, split
from digenrl.rewards import ocr_ddddocr
from digenrl.rewards.base import PromptRecord, RewardError, Scored
from digenrl.rewards.ocr_ddddocr import DdddocrReward
from digenrl.rewards.registry import make_reward


@pytest.fixture(scope="module")
def judge() -> DdddocrReward:
    reward = make_reward(RewardConfig(name="ocr_ddddocr"))
    assert isinstance(reward, DdddocrReward) and reward.name == "ocr_ddddocr"
    return reward


def test_it_reads_every_clean_number(judge: DdddocrReward) -> None:
    numbers = split()[1][:40]
    assert judge.recogniser(render(numbers, [CLEAN] * len(numbers))) == numbers


def test_the_reward_is_that_of_ocr(judge: DdddocrReward) -> None:
    images = render(["042", "137"], [CLEAN] * 2)[:, None]
    prompts = [PromptRecord("a", "042", {"target": "042"}), PromptRecord("b", "197", {"target": "197"})]
    assert judge(images, prompts) == [Scored(1.0), Scored(pytest.approx(2 / 3))]
    with pytest.raises(ValueError, match="has no field 'target'"):
        judge.validate([PromptRecord("c", "042")])


def test_a_blank_picture_reads_as_nothing(judge: DdddocrReward) -> None:
    blank = np.full((1, 1, 12, 24, 3), 255, dtype=np.uint8)
    assert judge(blank, [PromptRecord("a", "042", {"target": "042"})]) == [Scored(0.0)]


def test_only_the_weights_of_the_package_are_used() -> None:
    code = (
        "import sys; from digenrl.rewards.ocr_ddddocr import DdddocrReward; DdddocrReward().load(); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert "onnxruntime" in loaded and not {"cv2", "torchvision", "torch", "ddddocr"} & set(loaded)


def test_without_the_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr_ddddocr, "find_spec", lambda name: None)
    assert not ocr_ddddocr.installed()
    with pytest.raises(RewardError, match=r"pip install 'digenrl\[gold\]'"):
        DdddocrReward().load()
