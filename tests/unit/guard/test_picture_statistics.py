"""Statistics of constructed pictures, whose values are known."""

from __future__ import annotations

import numpy as np
import pytest

from digenrl.guard.pictures import PictureStatistics, diversity, picture_statistics


def flat(*rgb: int, height: int = 96, width: int = 96) -> np.ndarray:
    """One frame of one colour."""
    return np.full((1, height, width, 3), rgb, dtype=np.uint8)


def pattern(wave: np.ndarray, mean: float = 128, swing: float = 60) -> np.ndarray:
    """One grey frame from values in [-1, 1]."""
    return np.repeat((mean + swing * wave).round().astype(np.uint8)[None, ..., None], 3, axis=3)


def waves(cycles: float, size: int = 96) -> np.ndarray:
    return np.repeat(np.cos(2 * np.pi * cycles * np.arange(size))[None], size, axis=0)


def test_a_black_picture_is_dark_and_nothing_else() -> None:
    assert picture_statistics(flat(0, 0, 0)) == PictureStatistics(1.0, 0.0, 0.0, 0.0, 0.0)
    assert picture_statistics(flat(255, 255, 255)).dark == 0


def test_half_of_a_picture_may_be_dark() -> None:
    picture = flat(255, 255, 255)
    picture[:, :, :48] = 20
    found = picture_statistics(picture)
    assert found.dark == 0.5
    assert found.edges == pytest.approx(2 / 96)  # both columns at the border between the halves


def test_saturation_is_the_distance_of_the_channels() -> None:
    assert picture_statistics(flat(255, 0, 0)).saturation == 1
    assert picture_statistics(flat(204, 102, 102)).saturation == pytest.approx(0.4)
    assert picture_statistics(flat(90, 90, 90)).saturation == 0


def test_frequencies_are_high_from_half_of_the_highest_on() -> None:
    assert picture_statistics(pattern(waves(1 / 12))).high_frequency < 0.01
    assert picture_statistics(pattern(waves(1 / 3))).high_frequency > 0.99
    both = picture_statistics(pattern(waves(1 / 12) / 2 + waves(1 / 3) / 2))
    assert both.high_frequency == pytest.approx(0.5, abs=0.01)
    crossed = picture_statistics(pattern(waves(1 / 12) / 2 + waves(1 / 3).T / 2))
    assert crossed.high_frequency == pytest.approx(0.5, abs=0.01), "whichever way the waves run"


def test_noise_has_the_share_of_high_frequencies_that_lies_outside_the_circle() -> None:
    noise = np.random.default_rng(0).uniform(-1, 1, (256, 256))
    assert picture_statistics(pattern(noise)).high_frequency == pytest.approx(1 - np.pi * 0.25**2, abs=0.02)


@pytest.mark.parametrize(("size", "period"), [(96, 16), (30, 8), (12, 4), (50, 16)])
def test_a_grid_is_found_whatever_the_size(size: int, period: int) -> None:
    lines = np.zeros((size, size))
    lines[::period] = lines[:, ::period] = 1
    noise = np.random.default_rng(1).uniform(-1, 1, (size, size))
    assert picture_statistics(pattern(lines)).grid > 0.99
    assert picture_statistics(pattern(noise)).grid < 0.15
    assert picture_statistics(pattern(0.5 * lines + 0.5 * noise)).grid > 0.25


def test_too_small_a_picture_has_no_grid() -> None:
    checks = np.indices((8, 8)).sum(axis=0) % 2 * 2.0 - 1
    found = picture_statistics(pattern(checks))
    assert (found.grid, found.high_frequency) == (0.0, 1.0)


def test_a_line_of_pixels_has_no_edges() -> None:
    assert picture_statistics(flat(9, 200, 30, height=1, width=5)).edges == 0


def test_a_video_is_the_mean_of_its_frames() -> None:
    video = np.concatenate([flat(0, 0, 0)] * 2 + [flat(255, 0, 0)] * 2)
    assert picture_statistics(video).dark == 0.5 and picture_statistics(video).saturation == 0.5
    long = np.concatenate([flat(0, 0, 0, height=4, width=4)] * 40 + [flat(255, 255, 255, height=4, width=4)])
    assert picture_statistics(long).dark == 0.75  # four of them are looked at, the first and the last among them


def test_diversity_is_the_distance_between_two() -> None:
    same = np.stack([flat(90, 10, 200)] * 3)
    assert diversity(same) == 0
    assert diversity(np.stack([flat(0, 0, 0), flat(255, 255, 255)])) == pytest.approx(1)
    three = np.stack([flat(0, 0, 0), flat(0, 0, 0), flat(255, 255, 255)])
    assert diversity(three) == pytest.approx(2 / 3)
    assert diversity(three[:1]) is None


def test_diversity_looks_at_what_is_shown_and_not_at_noise() -> None:
    rng = np.random.default_rng(2)
    noisy = rng.integers(0, 256, (4, 1, 128, 128, 3), dtype=np.uint8)
    assert diversity(noisy) < 0.1  # type: ignore[operator]
    small = rng.integers(0, 256, (4, 1, 12, 24, 3), dtype=np.uint8)
    assert diversity(small) > 0.2  # type: ignore[operator]
