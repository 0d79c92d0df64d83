"""The trained steps follow from seed and iteration."""

from collections import Counter

import pytest

from digenrl.algorithms.selection import trained_steps


def test_without_a_window_all_steps_but_the_last_are_trained() -> None:
    assert trained_steps(10, 0, (0, 5), 0, 3) == tuple(range(9))


def test_windows_are_consecutive_cover_the_range_and_are_uniform() -> None:
    counts = Counter(trained_steps(10, 2, (1, 6), 0, iteration) for iteration in range(4000))
    assert sorted(counts) == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert min(counts.values()) > 900


def test_a_window_as_wide_as_its_range_never_moves() -> None:
    assert {trained_steps(10, 3, (2, 5), 0, iteration) for iteration in range(50)} == {(2, 3, 4)}


def test_the_window_is_a_function_of_seed_and_iteration() -> None:
    def windows(seed: int) -> list[tuple[int, ...]]:
        return [trained_steps(28, 2, (0, 14), seed, iteration) for iteration in range(40)]

    assert windows(1) == windows(1)
    assert windows(1) != windows(2)
    assert len(set(windows(1))) > 5


@pytest.mark.parametrize(("size", "window"), [(3, (0, 2)), (1, (2, 2)), (1, (5, 11)), (-1, (0, 5)), (2, (-1, 4))])
def test_a_window_that_does_not_fit_is_refused(size: int, window: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="does not fit into num_steps=10"):
        trained_steps(10, size, window, 0, 0)
