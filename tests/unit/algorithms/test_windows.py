"""MixGRPO's window: the published one wherever that is whole, without counting; refusals."""

from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
from golden_cases import Sequence, golden_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.algorithms.windows import SlidingWindow, WindowStrategy, published_random_steps, window_steps

Steps = tuple[int, ...]


def _window(parameters: dict[str, Any]) -> SlidingWindow:
    """The reference's parameters in our words."""
    overlaps = parameters.get("prog_overlap", False)
    return SlidingWindow(
        size=parameters["group_size"],
        limit=parameters["max_timesteps"],
        strategy=parameters["sample_strategy"],
        iterations=parameters["iters_per_group"],
        stride=parameters["prog_overlap_step"] if overlaps else parameters["group_size"],
        rewind=parameters.get("roll_back", False),
    )


def _steps(window: SlidingWindow, iterations: int) -> list[Steps]:
    return [window_steps(window, 0, iteration) for iteration in range(iterations)]


@golden_sequence("mix_window")
def test_windows_are_the_published_ones_up_to_the_first_that_is_cut(case: Sequence) -> None:
    window = _window(case.parameters)
    published = [tuple(steps) for steps in case.data["train_step_indices_per_iteration"]]
    if window.strategy == "random":
        assert published[0] == tuple(range(window.size))
        assert [published_random_steps(window, seed) for seed in case.data["seeds"]][:-1] == published[1:]
        return
    whole = [steps for steps in published if len(steps) == window.size]
    assert _steps(window, len(whole)) == whole
    cut = next((i for i, steps in enumerate(published) if len(steps) < window.size), len(published))
    assert cut and _steps(window, cut) == published[:cut]


def _counting(window: SlidingWindow, iterations: int) -> list[Steps]:
    """The published rule: a start and a count that are carried along, the start going up to the limit itself."""
    start, count, made = 0, 0, []
    for _ in range(iterations):
        made.append(tuple(range(start, min(start + window.size, window.limit))))
        count += 1
        if count >= window.stay(start):
            start, count = start + window.stride, 0
        if start > window.limit:
            start, count = (0, 0) if window.rewind else (window.limit, count)
    return made


windows = st.builds(
    lambda size, room, **rest: SlidingWindow(size=size, limit=size + room, **rest),
    size=st.integers(1, 6),
    room=st.integers(0, 24),
    strategy=st.sampled_from(["progressive", "decay", "exp_decay"]),
    iterations=st.integers(1, 7),
    stride=st.integers(1, 8),
    rewind=st.booleans(),
    least_iterations=st.none() | st.integers(1, 7),
    decay_after=st.integers(0, 15),
)


@settings(deadline=None, derandomize=True)
@given(windows)
def test_no_window_is_cut_and_the_whole_ones_come_in_the_published_order(window: SlidingWindow) -> None:
    published = _counting(window, 300)
    whole = [steps for steps in published if len(steps) == window.size]
    ours = _steps(window, 300)
    assert ours[: len(whole)] == whole
    assert all(len(steps) == window.size and steps[-1] < window.limit for steps in ours)
    if not window.rewind:
        rest = tuple(range(window.limit - window.size, window.limit))
        assert set(ours[len(whole) :]) <= {rest}


@settings(deadline=None, derandomize=True)
@given(windows, st.integers(0, 10_000))
def test_a_window_that_rewinds_repeats_itself(window: SlidingWindow, iteration: int) -> None:
    window = replace(window, rewind=True)
    starts = range(0, window.limit - window.size + 1, window.stride)
    period = sum(window.stay(start) for start in starts)
    assert window_steps(window, 0, iteration) == window_steps(window, 1, iteration + period)
    assert Counter(steps[0] for steps in _steps(window, period)) == {start: window.stay(start) for start in starts}


@pytest.mark.parametrize(
    ("strategy", "stays"),
    [
        ("progressive", [25, 25, 25, 25]),
        ("decay", [25, 15, 6, 6]),  # the least is 25 // 4; at step 12 of 23: int(25 * 11 / 23 + 6 * 12 / 23) = 15
        ("exp_decay", [25, 25, 10, 7]),  # at steps 22 and 25: ceil(25 exp(-0.9)) = 11, ceil(25 exp(-1.2)) = 8
    ],
)
def test_how_long_it_stays(strategy: WindowStrategy, stays: list[int]) -> None:
    window = SlidingWindow(4, 23, strategy)
    at = {"progressive": [0, 6, 12, 19], "decay": [0, 12, 23, 30], "exp_decay": [0, 13, 23, 26]}[strategy]
    assert [window.stay(start) for start in at] == stays


def test_a_stay_is_never_shorter_than_an_iteration() -> None:
    assert SlidingWindow(1, 2000, "exp_decay", decay_rate=1.0).stay(1999) == 1
    assert SlidingWindow(1, 20, "decay", iterations=1, least_iterations=0).stay(19) == 1


def test_random_windows_follow_from_seed_and_iteration_and_are_uniform() -> None:
    window = SlidingWindow(3, 6, "random")
    draws = [window_steps(window, 7, iteration) for iteration in range(4000)]
    counts = Counter(draws)
    assert sorted(counts) == [(0, 1, 2), (1, 2, 3), (2, 3, 4), (3, 4, 5)]
    assert min(counts.values()) > 900
    assert draws[:40] == [window_steps(window, 7, iteration) for iteration in range(40)]
    assert draws[:40] != [window_steps(window, 8, iteration) for iteration in range(40)]


def test_a_window_as_wide_as_its_range_never_moves() -> None:
    for strategy in ("progressive", "decay", "exp_decay", "random"):
        for rewind in (True, False):
            window = SlidingWindow(4, 4, strategy, iterations=2, rewind=rewind)
            assert set(islice(_steps(window, 20), 20)) == {(0, 1, 2, 3)}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"size": 0}, "size=0 does not fit into limit=10"),
        ({"size": 11}, "size=11 does not fit into limit=10"),
        ({"stride": 0}, "never moves with stride=0"),
        ({"iterations": 0}, "never moves with stride=1 and iterations=0"),
        ({"strategy": "linear"}, "'linear'.*progressive, decay, exp_decay, random"),
    ],
)
def test_a_window_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlidingWindow(**{"size": 4, "limit": 10, **wrong})
