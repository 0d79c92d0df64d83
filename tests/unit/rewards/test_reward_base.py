"""What implementations of the reward protocol share."""

import math

import numpy as np
import pytest

from digenrl.rewards.base import Failed, PromptRecord, Scored, frames_of, score_of


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_failure_never_a_zero(value: float) -> None:
    score = score_of("ocr", value)
    assert isinstance(score, Failed) and "ocr" in score.reason and str(value) in score.reason


def test_finite_values_pass_also_from_numpy() -> None:
    assert score_of("ocr", np.float32(0.5)) == Scored(0.5)
    assert type(score_of("ocr", np.float64(0.0)).value) is float


def test_frames_of_a_sample_stay_side_by_side() -> None:
    images = np.arange(2 * 3, dtype=np.uint8).reshape(2, 3, 1, 1, 1).repeat(3, axis=-1)
    frames, per_sample = frames_of(images, [PromptRecord("a", "a"), PromptRecord("b", "b")])
    assert per_sample == 3 and frames[:, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "images",
    [
        np.zeros((1, 12, 24, 3), np.uint8),
        np.zeros((1, 1, 12, 24, 4), np.uint8),
        np.zeros((1, 1, 12, 24, 3), np.float32),
        np.zeros((2, 1, 12, 24, 3), np.uint8),
    ],
    ids=["no frame axis", "four channels", "float", "more samples than prompts"],
)
def test_images_of_another_shape_or_type_are_refused(images: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"expected one prompt each|must be"):
        frames_of(images, [PromptRecord("a", "a")])
