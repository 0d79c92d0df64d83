"""Weighted sums of rewards."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from digenrl.config import RewardConfig
from digenrl.data.numbers import CLEAN, render
from digenrl.rewards.base import Failed, PromptRecord, Reward, Score, Scored
from digenrl.rewards.jpeg import JpegCompressibility, JpegIncompressibility
from digenrl.rewards.mix import RewardMix, sampled_frames
from digenrl.rewards.ocr import OcrReward

PROMPTS = [PromptRecord(f"n{n}", n, {"target": n}) for n in ("042", "137")]
IMAGES = render(["042", "197"], [CLEAN, CLEAN])[:, None]


class Given(Reward):
    """A reward that returns what it was told to."""

    def __init__(self, name: str, scores: list[Score]) -> None:
        self.name = name
        self.scores = scores

    def __call__(self, images: np.ndarray, prompts: Sequence[PromptRecord]) -> list[Score]:
        return self.scores


def rewards(**weights: float) -> list[RewardConfig]:
    return [RewardConfig(name=name, weight=weight) for name, weight in weights.items()]


def test_scores_are_the_weighted_sum_and_parts_are_kept_unweighted() -> None:
    mixed = RewardMix.of(rewards(ocr=2.0, jpeg_compressibility=0.5))(IMAGES, PROMPTS)
    sizes = JpegCompressibility()(IMAGES, PROMPTS)
    assert mixed.parts["ocr"] == (Scored(1.0), Scored(pytest.approx(2 / 3)))
    assert mixed.parts["jpeg_compressibility"] == tuple(sizes)
    expected = [2.0 * closeness + 0.5 * size.value for closeness, size in zip((1.0, 2 / 3), sizes, strict=True)]
    assert [s.value for s in mixed.scores] == pytest.approx(expected)


def test_a_failed_part_fails_its_sample_alone_and_is_named() -> None:
    part = Given("server", [Failed("HTTP 500"), Scored(0.25)])
    mixed = RewardMix([(JpegIncompressibility(), 0.0), (part, 1.0)])(IMAGES, PROMPTS)
    assert mixed.scores == (
        Failed("server: HTTP 500"),
        Scored(0.25, parts={"jpeg_incompressibility": 1.0, "server": 0.25}),
    )
    assert isinstance(mixed.parts["jpeg_incompressibility"][0], Scored)


def test_every_failed_part_gives_its_reason() -> None:
    parts = [(Given(name, [Failed(f"no {name}")] * 2), 1.0) for name in ("a", "b")]
    assert RewardMix(parts)(IMAGES, PROMPTS).scores[0] == Failed("a: no a; b: no b")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_part_that_is_not_finite_fails_even_with_weight_zero(value: float) -> None:
    mixed = RewardMix([(Given("broken", [Scored(value), Scored(1.0)]), 0.0)])(IMAGES, PROMPTS)
    assert isinstance(mixed.scores[0], Failed) and "broken" in mixed.scores[0].reason
    assert isinstance(mixed.parts["broken"][0], Failed)
    assert mixed.scores[1] == Scored(0.0, parts={"broken": 1.0})


def test_a_sum_that_overflows_fails() -> None:
    mixed = RewardMix([(Given("huge", [Scored(1e308)] * 2), 1e10)])(IMAGES, PROMPTS)
    assert isinstance(mixed.scores[0], Failed) and "huge" in mixed.scores[0].reason


def test_a_reward_that_loses_samples_is_an_error() -> None:
    with pytest.raises(ValueError, match="short returned 1 scores for 2 samples"):
        RewardMix([(Given("short", [Scored(1.0)]), 1.0)])(IMAGES, PROMPTS)


def test_a_prompt_is_checked_by_its_rewards_alone() -> None:
    mix = RewardMix.of(rewards(jpeg_compressibility=1.0, ocr=1.0))
    mix.check(PROMPTS[0])
    mix.check(PromptRecord("routed", "a cat", rewards=("jpeg_compressibility",)))
    with pytest.raises(ValueError, match="'no target here' has no field 'target'"):
        mix.check(PromptRecord("no target here", "042"))
    with pytest.raises(ValueError, match=r"'n1' names the reward 'orc', which is not among .*; did you mean ocr\?"):
        mix.check(PromptRecord("n1", "042", {"target": "042"}, ("orc",)))


def test_a_reward_sees_only_the_pictures_that_are_routed_to_it() -> None:
    class Counting(Given):
        def __call__(self, images: np.ndarray, prompts: Sequence[PromptRecord]) -> list[Score]:
            assert np.array_equal(images, IMAGES[1:]) and prompts == [routed]
            return [Scored(0.5)]

    routed = replace(PROMPTS[1], rewards=("counting", "ocr"))
    mix = RewardMix([(OcrReward(), 1.0), (Counting("counting", []), 4.0)])
    mixed = mix(IMAGES, [replace(PROMPTS[0], rewards=("ocr",)), routed])
    closeness = pytest.approx(2 / 3)
    assert mixed.parts == {"ocr": (Scored(1.0), Scored(closeness)), "counting": (None, Scored(0.5))}
    assert mixed.scores[0] == Scored(1.0, {"ocr": 1.0})
    assert mixed.scores[1] == Scored(pytest.approx(2 + 2 / 3), {"ocr": closeness, "counting": 0.5})


def test_a_reward_that_no_picture_is_routed_to_is_not_called() -> None:
    class Never(Given):
        def __call__(self, images: np.ndarray, prompts: Sequence[PromptRecord]) -> list[Score]:
            raise AssertionError("called")

    mix = RewardMix([(JpegCompressibility(), 1.0), (Never("never", []), 1.0)])
    mixed = mix(IMAGES, [replace(prompt, rewards=("jpeg_compressibility",)) for prompt in PROMPTS])
    assert mixed.parts["never"] == (None, None) and all(isinstance(score, Scored) for score in mixed.scores)


def test_a_mix_needs_rewards_and_each_once() -> None:
    for terms in ([], [(JpegCompressibility(), 1.0)] * 2):
        with pytest.raises(ValueError, match="each name once"):
            RewardMix(terms)


@pytest.mark.parametrize(
    ("frames", "wanted", "rows"),
    [(5, None, [0, 1, 2, 3, 4]), (5, 9, [0, 1, 2, 3, 4]), (81, 3, [0, 40, 80]), (6, 1, [3]), (4, 2, [0, 3])],
)
def test_sampled_frames_are_evenly_spaced_with_both_ends(frames: int, wanted: int | None, rows: list[int]) -> None:
    assert sampled_frames(frames, wanted).tolist() == rows


def test_a_term_sees_as_many_frames_as_it_is_configured_to() -> None:
    class Shape(Reward):
        name = "shape"

        def __call__(self, images: np.ndarray, prompts: Sequence[PromptRecord]) -> list[Score]:
            return [Scored(float(images.shape[1]))] * len(prompts)

    video = np.zeros((1, 9, 8, 8, 3), np.uint8)
    assert RewardMix([(Shape(), 1.0)])(video, PROMPTS[:1]).scores[0] == Scored(9.0, {"shape": 9.0})
    assert RewardMix([(Shape(), 1.0)], {"shape": 3})(video, PROMPTS[:1]).scores[0] == Scored(3.0, {"shape": 3.0})


def test_one_reward_twice_under_two_labels_keeps_both_parts() -> None:
    terms = [RewardConfig(name="ocr"), RewardConfig(name="ocr", label="ocr_exact", match="exact", weight=0.0)]
    mixed = RewardMix.of(terms).load()(IMAGES, PROMPTS)
    assert [s.value for s in mixed.parts["ocr"]] == [1.0, pytest.approx(2 / 3)]
    assert [s.value for s in mixed.parts["ocr_exact"]] == [1.0, 0.0]
