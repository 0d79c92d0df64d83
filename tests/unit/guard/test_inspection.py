"""What workers find out beside the trained reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from digenrl.config import RewardConfig
from digenrl.config.load import load_config
from digenrl.guard.gold import gold_rewards, load_gold
from digenrl.guard.inspection import Inspection, Inspector, inspect_evaluation
from digenrl.identity import EVAL_ITERATION, MicroBatchId, SampleId
from digenrl.rewards import ocr_ddddocr
from digenrl.rewards.base import Failed, PromptRecord, Score, Scored
from digenrl.scoring import NON_FINITE
from digenrl.trajectory import Trajectory

PROMPTS = [PromptRecord(f"p{i}", str(i), {"target": str(i)}) for i in range(4)]
IMAGES = np.full((4, 1, 12, 24, 3), 255, dtype=np.uint8)


class Brightness:
    """Says how bright the first pixel is."""

    name = "brightness"

    def __init__(self, problem: str | None = None) -> None:
        self.problem = problem

    def validate(self, prompts: Sequence[PromptRecord]) -> None:
        pass

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        if self.problem is not None:
            raise RuntimeError(self.problem)
        return [Scored(float(image[0, 0, 0, 0])) for image in images]


def trajectory(phase: str, finite: Sequence[bool] = (True,) * 4) -> Trajectory:
    """Of four samples; nothing but identities and flags is looked at."""
    held_out = [SampleId(0, EVAL_ITERATION, i, 0) for i in range(4)]
    trained = [SampleId(0, 2, 1, i) for i in range(4)]
    found = object.__new__(Trajectory)
    fields = {
        "micro_batch": MicroBatchId(phase, 2, 0),  # type: ignore[arg-type]
        "samples": tuple(held_out if phase == "eval" else trained),
        "finite": torch.tensor(finite),
    }
    for name, value in fields.items():
        object.__setattr__(found, name, value)
    return found


def test_the_first_prompts_are_looked_at() -> None:
    images = IMAGES.copy()
    images[:, 0, 0, 0, 0] = (1, 2, 3, 4)
    found = inspect_evaluation(trajectory("eval", (True, False, True, True)), images, PROMPTS, [Brightness()], 3)
    assert set(found.pictures) == {0, 2}
    assert found.gold == {"brightness": {0: Scored(1.0), 1: NON_FINITE, 2: Scored(3.0)}}


def test_a_gold_reward_that_raises_has_failed_and_ends_nothing() -> None:
    found = inspect_evaluation(trajectory("eval"), IMAGES, PROMPTS, [Brightness("no server")], 2)
    assert found.gold == {"brightness": dict.fromkeys(range(2), Failed("RuntimeError: no server"))}
    assert set(found.pictures) == {0, 1}


def test_micro_batches_add_up() -> None:
    first = inspect_evaluation(trajectory("eval"), IMAGES, PROMPTS, [Brightness()], 2)
    both = (
        first + Inspection({7: first.pictures[0]}, {"brightness": {7: Scored(0.0)}}, (0.5,)) + Inspection({}, {}, (1,))
    )
    assert set(both.pictures) == set(both.gold["brightness"]) == {0, 1, 7}
    assert both.metrics() == {"diversity": 0.75} and Inspection().metrics() == {}


def test_training_groups_are_asked_how_much_they_differ() -> None:
    images = IMAGES.copy()
    images[:2] = 0
    inspect = Inspector(load_config("tiny-ocr", []))
    assert inspect(trajectory("train"), images, PROMPTS).distances == (pytest.approx(4 / 6),)
    assert inspect(trajectory("train", (True, True, False, False)), images, PROMPTS).distances == (0.0,)
    assert inspect(trajectory("train", (True, False, False, False)), images, PROMPTS) == Inspection()


def test_a_guard_that_is_off_asks_for_nothing() -> None:
    inspect = Inspector(load_config("tiny-ocr", ["guard.mode=off"]))
    assert inspect(trajectory("eval"), IMAGES, PROMPTS) == inspect(trajectory("train"), IMAGES, PROMPTS) == Inspection()


def test_ocr_is_judged_by_a_second_engine_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    second = (RewardConfig(name="ocr_ddddocr"),)
    assert gold_rewards(load_config("tiny-ocr", [])) == second
    assert gold_rewards(load_config("tiny-ocr", ["guard.mode=off"])) == ()
    assert gold_rewards(load_config("tiny-ocr", ["guard.gold=[]"])) == ()
    assert gold_rewards(load_config("tiny-ocr", ['rewards=[{"name": "jpeg_compressibility"}]'])) == ()
    assert [reward.name for reward in load_gold([RewardConfig(name="ocr"), *second])] == ["ocr", "ocr_ddddocr"]
    monkeypatch.setattr(ocr_ddddocr, "find_spec", lambda name: None)
    assert gold_rewards(load_config("tiny-ocr", [])) == ()
