"""Which standstill of a device is orchestration, and how long it is."""

from __future__ import annotations

import pytest

from digenrl.identity import MicroBatchId
from digenrl.scheduling.messages import RolloutDone
from digenrl.scheduling.units import RolloutUnit, ScoreUnit
from workers.gaps import Gaps
from workers.receipts import Receipt

A, B, C = (RolloutUnit(MicroBatchId("train", 0, i), 0, 3) for i in range(3))


def ran(started_at: float, seconds: float) -> Receipt:
    return Receipt(RolloutDone(), started_at, seconds)


def test_a_unit_that_waited_behind_another_tells_the_gap() -> None:
    gaps = Gaps()
    gaps.sent(A, "w")
    gaps.sent(B, "w")
    assert gaps.ended(A, "w", ran(10.0, 1.0)) is None
    assert gaps.ended(B, "w", ran(11.25, 1.0)) == pytest.approx(0.25)


def test_clocks_that_disagree_make_no_negative_gap() -> None:
    gaps = Gaps()
    gaps.sent(A, "w")
    gaps.sent(B, "w")
    gaps.ended(A, "w", ran(10.0, 1.0))
    assert gaps.ended(B, "w", ran(10.9, 1.0)) == 0.0


def test_a_device_with_nothing_to_do_is_not_held_up() -> None:
    gaps = Gaps()
    gaps.sent(A, "w")
    gaps.ended(A, "w", ran(10.0, 1.0))
    gaps.sent(B, "w")
    assert gaps.ended(B, "w", ran(15.0, 1.0)) is None


def test_only_units_that_ran_one_after_the_other_tell() -> None:
    """B was withdrawn, so C ran after A; of B, which overtook, nobody knows what it waited for."""
    gaps = Gaps()
    for unit in (A, B, C):
        gaps.sent(unit, "w")
    gaps.ended(A, "w", ran(10.0, 1.0))
    gaps.withdrawn(B, "w")
    assert gaps.ended(C, "w", ran(12.0, 1.0)) is None
    gaps.sent(A, "w")
    gaps.sent(B, "w")
    assert gaps.ended(B, "w", ran(13.5, 1.0)) is None


def test_workers_and_lanes_are_kept_apart() -> None:
    gaps, score = Gaps(), ScoreUnit(A.micro_batch)
    gaps.sent(A, "v")
    gaps.sent(B, "w")
    gaps.sent(score, "v")
    assert gaps.ended(A, "v", ran(10.0, 1.0)) is None
    assert gaps.ended(score, "v", ran(11.5, 1.0)) is None
    assert gaps.ended(B, "w", ran(11.5, 1.0)) is None
