"""Which checkpoints stay."""

from __future__ import annotations

import pytest

from digenrl.config import KeepConfig
from storage.retention import Merits, retained

SAVED = range(5, 45, 5)


@pytest.mark.parametrize(
    ("keep", "expected"),
    [
        (KeepConfig(last=1), {40}),
        (KeepConfig(last=3), {30, 35, 40}),
        (KeepConfig(last=100), set(SAVED)),
        (KeepConfig(last=1, every=20), {20, 40}),
        (KeepConfig(last=1, every=15), {15, 30, 40}),
        (KeepConfig(last=1, best=1), {25, 40}),
        (KeepConfig(last=1, best=2), {20, 25, 40}),
        (KeepConfig(last=2, best=1, every=10), {10, 20, 25, 30, 35, 40}),
    ],
)
def test_the_last_the_best_and_every_nth_stay(keep: KeepConfig, expected: set[int]) -> None:
    rewards = {0: 0.9, 10: 0.5, 20: 0.7, 25: 0.7, 35: 0.6}  # 0 was evaluated and never saved
    assert retained(SAVED, keep, Merits(rewards)) == expected


def test_what_may_turn_out_the_best_stays_until_that_is_known() -> None:
    keep = KeepConfig(last=1, best=1)
    assert retained([10, 20, 30, 40], keep, Merits({10: 0.5}, awaited=[20, 30])) == {10, 20, 30, 40}
    assert retained([10, 20, 30, 40], keep, Merits({10: 0.5, 20: 0.4, 30: 0.6})) == {30, 40}
    assert retained([10, 20, 30, 40], KeepConfig(last=1), Merits({}, awaited=[20, 30])) == {40}


@pytest.mark.parametrize(
    ("needed", "expected"),
    [([20], {20, 40}), ([24, 29], {20, 25, 40}), ([4], {40}), ([50], {40}), ([0, 5, 39], {5, 35, 40})],
)
def test_what_the_run_may_go_back_to_stays_or_what_is_next_to_it(needed: list[int], expected: set[int]) -> None:
    assert retained(SAVED, KeepConfig(last=1), Merits(needed=needed)) == expected
    assert retained(SAVED, KeepConfig(last=1, every=20), Merits(needed=needed)) == expected | {20}


def test_nothing_saved_is_nothing_kept() -> None:
    assert retained([], KeepConfig(best=1, every=2), Merits()) == set()
