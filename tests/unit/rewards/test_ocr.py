"""The OCR reward: its recogniser, its text distance and its case rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from digenrl.data.numbers import CLEAN, render
from digenrl.rewards.base import PromptRecord, Scored
from digenrl.rewards.ocr import (
    BORDER,
    INPUT_HEIGHT,
    OcrReward,
    _prepare,
    exact_match,
    levenshtein,
    text_reward,
)

WORDS = st.text(alphabet="01ab", max_size=6)


@pytest.fixture(scope="module")
def ocr() -> OcrReward:
    return OcrReward()


def pictures(*numbers: str) -> np.ndarray:
    return render(numbers, [CLEAN] * len(numbers))


def prompt(target: str) -> PromptRecord:
    return PromptRecord(f"n{target}", target, {"target": target})


def test_reward_is_one_minus_the_distance_over_the_targets_length(ocr: OcrReward) -> None:
    images = pictures("042", "137", "905", "888")[:, None]
    scores = ocr(images, [prompt("042"), prompt("197"), prompt("042"), prompt("888")])
    assert scores == [Scored(1.0), Scored(pytest.approx(2 / 3)), Scored(0.0), Scored(1.0)]


def test_empty_picture_reads_as_nothing_and_scores_zero(ocr: OcrReward) -> None:
    images = np.full((1, 1, 12, 24, 3), 255, np.uint8)
    assert ocr.recogniser(images[:, 0]) == [""]
    assert ocr(images, [prompt("042")]) == [Scored(0.0)]


def test_a_batch_reads_like_single_pictures_and_always_the_same(ocr: OcrReward) -> None:
    images = pictures(*(f"{n:03d}" for n in range(0, 1000, 31)))
    together = ocr.recogniser(images)
    assert together == [ocr.recogniser(images[i : i + 1])[0] for i in range(len(images))]
    assert together == OcrReward().recogniser(images)


def test_runs_of_a_class_are_one_character_and_blanks_separate(ocr: OcrReward) -> None:
    blank, one, two = (ocr.recogniser._alphabet.index(character) for character in ("", "1", "2"))
    classes = np.array([blank, one, one, blank, blank, one, two, two, blank])
    assert ocr.recogniser._decode(classes) == "112"
    assert ocr.recogniser(pictures("111", "000", "229")) == ["111", "000", "229"]


def test_no_pictures_give_no_scores(ocr: OcrReward) -> None:
    assert ocr(np.zeros((0, 1, 12, 24, 3), np.uint8), []) == []


def test_a_videos_value_is_the_mean_of_its_frames(ocr: OcrReward) -> None:
    video = pictures("042", "137")[None]
    assert ocr(video, [prompt("042")]) == [Scored(0.5)]


def test_recogniser_input_keeps_aspect_replicates_borders_and_is_bgr() -> None:
    picture = np.zeros((1, 12, 24, 3), np.uint8)
    picture[..., 0] = 255
    picture[:, :, :2, 2] = 255
    prepared = _prepare(picture)
    assert prepared.shape == (1, 3, INPUT_HEIGHT, 64 + 2 * BORDER) and prepared.dtype == np.float32
    blue, green, red = prepared[0]
    assert (red == 1).all() and (green == -1).all()
    assert (blue[:, : BORDER + 1] == 1).all() and (blue[:, -BORDER:] == -1).all()


@pytest.mark.parametrize("target", [None, "", "  "])
def test_prompts_without_a_target_are_refused_by_name(ocr: OcrReward, target: str | None) -> None:
    bad = PromptRecord("n7", "007", {"style": "bold"} if target is None else {"target": target})
    with pytest.raises(ValueError, match=r"ocr: prompt 'n7' has .*'?target'?.*expected"):
        ocr.validate([prompt("042"), bad])
    with pytest.raises(ValueError, match="n7"):
        ocr(pictures("007")[:, None], [bad])
    ocr.validate([prompt("042")])


@pytest.mark.parametrize(
    ("reading", "target", "reward"),
    [
        ("Open", "OPEN", 1.0),
        ("o p e n", "open", 1.0),
        ("opem", "OPEN", 0.75),
        ("straße", "STRASSE", 1.0),
        ("", "042", 0.0),
        ("0421111", "042", 0.0),
        ("1042", "042", pytest.approx(2 / 3)),
    ],
)
def test_case_and_white_space_do_not_count_and_the_reward_stays_in_range(
    reading: str, target: str, reward: float
) -> None:
    assert text_reward(reading, target) == reward
    assert exact_match(reading, target) == (reward == 1.0)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("", "", 0), ("kitten", "sitting", 3), ("042", "402", 2), ("abc", "", 3), ("flaw", "lawn", 2)],
)
def test_levenshtein_of_known_pairs(a: str, b: str, distance: int) -> None:
    assert levenshtein(a, b) == levenshtein(b, a) == distance


@given(WORDS, WORDS, WORDS)
def test_levenshtein_is_a_metric(a: str, b: str, c: str) -> None:
    assert (levenshtein(a, b) == 0) == (a == b)
    assert abs(len(a) - len(b)) <= levenshtein(a, b) <= max(len(a), len(b))
    assert levenshtein(a, c) <= levenshtein(a, b) + levenshtein(b, c)


# Scenes


def scene(*lines: str, size: int = 256) -> np.ndarray:
    """(1, 1, size, size, 3): a light board on a darker wall, with lines of text on it."""
    board = Image.new("RGB", (size, size), (150, 130, 110))
    draw = ImageDraw.Draw(board)
    draw.rectangle((size // 10, size // 4, size - size // 10, size - size // 4), fill=(250, 250, 235))
    for place, line in enumerate(lines):
        font = ImageFont.load_default(size // 9)
        draw.text((size // 6, size // 3 + place * size // 6), line, fill=(20, 20, 60), font=font)
    return np.asarray(board)[None, None]


def test_text_in_a_scene_is_found_and_read_from_top_to_bottom(ocr: OcrReward) -> None:
    assert ocr(scene("OPEN"), [prompt("open")]) == [Scored(1.0)]
    assert ocr(scene("BRAVE", "ROCKET"), [prompt("BRAVE ROCKET")]) == [Scored(1.0)]
    assert ocr(scene("OPAN"), [prompt("OPEN")]) == [Scored(0.75)]


def test_a_scene_without_text_reads_as_nothing(ocr: OcrReward) -> None:
    assert ocr(scene(), [prompt("OPEN")]) == [Scored(0.0)]


def test_every_frame_of_a_video_of_scenes_counts(ocr: OcrReward) -> None:
    video = np.concatenate([scene("OPEN"), scene()], axis=1)
    assert ocr(video, [prompt("OPEN")]) == [Scored(0.5)]
