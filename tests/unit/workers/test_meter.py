"""The meter adds up an iteration: each unit once, whatever was done again, in whatever order."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest

from digenrl.contributions import UnitMetrics
from digenrl.guard.inspection import Inspection
from digenrl.guard.pictures import PictureStatistics
from digenrl.identity import MicroBatchId, SampleId
from digenrl.rewards.base import Failed, Scored
from digenrl.scheduling.messages import CloseIteration, RolloutDone, Run, ScoresDone, Trained, Updated
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from workers.meter import Meter
from workers.receipts import Receipt

CLOSED = CloseIteration(0, trained=12, excluded={(SampleId(0, 0, 0, 3), 1): "reason"}, skipped_updates=1)
NAMES = {"a": "worker 0", "b": "worker 0", "c": "worker 1"}


def micro_batch(index: int, iteration: int = 0) -> MicroBatchId:
    return MicroBatchId("train", iteration, index)


def train(index: int, iteration: int = 0) -> tuple[Unit, Receipt]:
    unit = TrainUnit(micro_batch(index, iteration), (1,))
    # Sums of these depend on their order.
    metrics = UnitMetrics(pairs=4, loss=0.1 * 3**index, ratio=4.0, ratio_max=1.0 + index)
    return unit, Receipt(Trained((unit,)), 0.0, 0.5, training=metrics)


def update(theta: int, grad_norm: float) -> tuple[Unit, Receipt]:
    return UpdateUnit(theta), Receipt(Updated(theta), 0.0, 0.25, grad_norm=grad_norm)


def metered(*ended: tuple[Unit, Receipt], worker: str = "a") -> Meter:
    meter = Meter()
    meter.begin(10.0)
    for unit, receipt in ended:
        meter.add(Run(unit, worker, theta=0, priority=0), receipt)
    return meter


def test_metrics_do_not_depend_on_the_order_of_arrival() -> None:
    units = [train(index) for index in range(4)]
    found = {
        tuple(metered(*order).close(CLOSED, NAMES, 12.0).metrics.items()) for order in itertools.permutations(units)
    }
    assert len(found) == 1
    assert dict(found.pop())["ratio_max"] == 4.0


def test_a_unit_that_was_done_again_counts_once() -> None:
    report = metered(train(0), update(1, 2.0), train(1), train(0), update(1, 2.0), update(2, 4.0)).close(
        CLOSED, NAMES, 12.0
    )
    assert report.metrics["pairs"] == 8
    assert report.metrics["grad_norm"] == 3.0


def test_iterations_do_not_mix() -> None:
    meter = metered(train(0), train(0, iteration=1))
    assert meter.close(CLOSED, NAMES, 12.0).metrics["pairs"] == 4
    second = meter.close(CloseIteration(1, 4, {}, 0), NAMES, 13.5)
    assert second.metrics["pairs"] == 4
    assert second.seconds == 1.5


def test_pairs_are_counted_by_the_age_of_their_samples() -> None:
    old = TrainUnit(micro_batch(1), (1,))
    receipt = Receipt(Trained((old,)), 0.0, 0.5, training=UnitMetrics(pairs=4, stale=4))
    assert metered(train(0), (old, receipt), train(2)).close(CLOSED, NAMES, 12.0).staleness == {0: 8, 1: 4}


def score(index: int, found: Inspection, phase: Literal["train", "eval"] = "train") -> tuple[Unit, Receipt]:
    return ScoreUnit(MicroBatchId(phase, 0, index)), Receipt(ScoresDone({}), 0.0, 0.0, inspection=found)


def test_what_the_guard_asked_for_counts_once_and_is_taken_with_its_evaluation() -> None:
    pictures = [Inspection({index: PictureStatistics(0.1 * index, 0, 0, 0, 0)}) for index in range(2)]
    meter = metered(
        *(score(index, Inspection(distances=(distance,))) for index, distance in ((0, 0.2), (1, 0.4), (0, 0.2))),
        *(score(index, pictures[index], "eval") for index in (1, 0)),
    )
    assert meter.close(CLOSED, NAMES, 12.0).metrics == {"diversity": pytest.approx(0.3)}
    assert meter.take_inspection(0) == pictures[0] + pictures[1] and meter.take_inspection(0) == Inspection()
    assert "diversity" not in meter.close(CloseIteration(1, 4, {}, 0), NAMES, 13.5).metrics


def test_scores_prints_and_busy_time() -> None:
    batch = micro_batch(0)
    good, bad = SampleId(0, 0, 0, 1), SampleId(0, 0, 0, 0)
    scores = {good: Scored(0.5), bad: Failed("reason")}
    meter = metered(
        (RolloutUnit(batch, 0, 3), Receipt(RolloutDone(), 0.0, 1.0, fingerprint="print")),
        (ScoreUnit(batch), Receipt(ScoresDone(scores), 0.0, 9.0)),
    )
    meter.add(Run(*train(0)[:1], "c", theta=0, priority=0), train(0)[1])
    report = meter.close(CLOSED, NAMES, 12.0)
    assert report.rewards == [0.5]
    assert list(report.scores) == [bad, good]
    assert report.fingerprints == {batch.label: "print"}
    assert report.excluded == {"reason": 1}
    # Scoring runs beside the device and is no use of it.
    assert report.busy == {"worker 0": 0.5, "worker 1": 0.25}


def test_nothing_at_all_makes_an_empty_report() -> None:
    report = Meter().close(CloseIteration(0, 0, {}, 0), {}, 5.0)
    assert report.seconds == 0
    assert not report.metrics and not report.busy
