"""Every scheduling technique on real workers: what it computes does not depend on it, and it did happen.

Samples and weights are those of the plain loop, bit for bit. With streaming advantages it is the samples before the
first update, and that update's gradient to 1e-12 where it is computed in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import pytest
import torch

from combinations import REAL, overrides, settings
from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.identity import MicroBatchId
from digenrl.scheduling.messages import Run
from digenrl.scheduling.units import RolloutUnit, TrainUnit, Unit, UpdateUnit
from runs import Ground, OnUnit, Outcome, assert_as_expected, expected, kill, scheduler_for, small
from wide import WideReplica, gradients
from workers.listener import Dispatched

WORKERS = 3
DIGENRL = ("cluster.workers=3", "schedule.micro_batch=2", "schedule.layout=digenrl")
STALE = (*DIGENRL, "schedule.stale_fraction=0.5", "evaluation.every=0")
STREAMING = (
    *("cluster.workers=3", "schedule.micro_batch=1", "schedule.layout=digenrl"),
    *("schedule.advantage=streaming", "iterations=1", "evaluation.every=0"),
)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(1)
    yield found
    found.close()


@pytest.fixture
def three(ground: Ground) -> Ground:
    """The cluster with all its workers."""
    if len(ground.cards()) != WORKERS:
        ground.scale(WORKERS)
    return ground


def of_kind(outcome: Outcome, kind: type[Unit], iteration: int | None = None) -> list[Run]:
    """Units of training samples that were handed out, in order."""
    found = [run for run in outcome.runs if isinstance(run.unit, kind) and run.unit.micro_batch.phase == "train"]
    return [run for run in found if iteration in (None, run.unit.micro_batch.iteration)]


def lead_helps(outcome: Outcome, iteration: int) -> bool:
    """Whether the trainer that takes the optimiser steps took rollout units of an iteration."""
    leads = {run.worker for run in outcome.runs if isinstance(run.unit, UpdateUnit)}
    assert len(leads) == 1
    return leads <= {run.worker for run in of_kind(outcome, RolloutUnit, iteration)}


@pytest.mark.parametrize(("workers", "layout"), [(1, "colocated"), (2, "disaggregated"), (3, "digenrl")])
def test_layouts_and_roles_change_nothing(ground: Ground, workers: int, layout: str) -> None:
    """In the order of workers: the cluster only grows."""
    if len(ground.cards()) != workers:
        ground.scale(workers)
    config = small("cluster.workers=3", "schedule.micro_batch=2", f"schedule.layout={layout}")
    outcome = ground.run(config)
    assert_as_expected(outcome, config)
    assert len(outcome.reports) == 3
    # In the first iteration the trainer may have been there before the others.
    assert lead_helps(outcome, 2) == (layout != "disaggregated")


# --- stale groups ---


@pytest.fixture(scope="module")
def stale(ground: Ground) -> Outcome:
    if len(ground.cards()) != WORKERS:
        ground.scale(WORKERS)
    return ground.run(small(*STALE))


def test_stale_groups_are_those_of_the_loop(stale: Outcome) -> None:
    assert_as_expected(stale, small(*STALE))
    thetas = defaultdict(set)
    for run in of_kind(stale, RolloutUnit):
        thetas[run.unit.micro_batch.iteration, run.unit.micro_batch.index // 2].add(run.theta)
    assert len(thetas) == 3 * 4
    for (iteration, group), found in thetas.items():
        assert found == {2 * (iteration - 1) if iteration > 0 and group < 2 else 2 * iteration}
    assert [report.metrics["stale"] > 0 for report in stale.reports] == [False, True, True]
    assert lead_helps(stale, 0)


def test_the_log_of_a_run_replays_to_the_same_commands(stale: Outcome) -> None:
    config = small(*STALE)
    fresh = scheduler_for(config, runspec.shape(config, 0))
    assert len(stale.log) > 100
    for now, event, commands in stale.log:
        assert fresh.handle(event, now) == commands


def test_stale_groups_begin_while_the_iteration_before_is_trained(stale: Outcome) -> None:
    for iteration in (1, 2):
        begun = stale.runs.index(of_kind(stale, RolloutUnit, iteration)[0])
        assert begun < stale.runs.index(of_kind(stale, TrainUnit, iteration - 1)[-1])


@pytest.mark.parametrize("version", [1, 2])
def test_a_resumed_run_with_stale_groups_is_the_uninterrupted_one(three: Ground, stale: Outcome, version: int) -> None:
    config = small(*STALE)
    start = stale.states[version - 1]
    assert start.theta == 2 * version
    assert (start.previous.theta if start.previous else None) == (None if version == 1 else 2)
    outcome = three.run(config, start=start)
    assert outcome.finished
    assert outcome.adapter == expected(config).adapter
    assert outcome.fingerprints == {
        label: found for r in stale.reports if r.iteration >= version for label, found in r.fingerprints.items()
    }
    assert {run.theta for run in of_kind(outcome, RolloutUnit, version)} == {2 * version - 2, 2 * version}


def test_a_resumed_on_policy_run_is_the_uninterrupted_one(three: Ground) -> None:
    config = small(*DIGENRL, "iterations=2", "evaluation.every=0")
    whole = three.run(config)
    assert whole.states[0].previous is None
    outcome = three.run(config, start=whole.states[0])
    assert outcome.adapter == whole.adapter == expected(config).adapter
    assert outcome.fingerprints == whole.reports[1].fingerprints


@pytest.mark.parametrize(
    ("kind", "nth"),
    [
        pytest.param(RolloutUnit, 1, id="a-stale-rollout"),
        pytest.param(TrainUnit, 5, id="a-fresh-train-unit"),
    ],
)
def test_a_killed_worker_changes_nothing_about_stale_groups(three: Ground, kind: type[Unit], nth: int) -> None:
    """Each n-th unit of iteration 1; its 4 stale micro-batches come first."""
    three.settle(WORKERS)
    config = small(*STALE, "iterations=2")
    pids = {name: card.pid for name, card in three.cards().items()}
    killed: list[str] = []

    def strike(event: Dispatched) -> None:
        killed.append(event.worker_name)
        kill(pids[event.worker_name])

    def matches(unit: Unit) -> bool:
        return isinstance(unit, kind) and unit.micro_batch == MicroBatchId("train", 1, nth - 1)

    outcome = three.run(config, OnUnit(matches, strike))
    assert len(killed) == 1
    assert_as_expected(outcome, config)
    three.settle(WORKERS)


# --- streaming ---


def streamed(outcome: Outcome) -> int:
    """How many train units began before their group was complete."""
    return sum(bool(run.rewards) for run in of_kind(outcome, TrainUnit))


def first_samples(fingerprints: dict[str, str]) -> dict[str, str]:
    """Of iteration 0: nothing was trained before."""
    return {label: found for label, found in fingerprints.items() if label.startswith("i0 ")}


def test_streaming_makes_the_same_first_samples_and_trains_on_all(three: Ground) -> None:
    config = small(*STREAMING)
    outcome = three.run(config)
    assert outcome.finished
    assert streamed(outcome) > 0
    assert outcome.fingerprints == expected(config).fingerprints
    assert len(outcome.fingerprints) == 16
    (report,) = outcome.reports
    assert report.trained + sum(report.excluded.values()) == 16 * 3


def _wide(three: Ground, config: RunConfig) -> tuple[Outcome, dict[str, torch.Tensor]]:
    outcome = three.run(config, replica=WideReplica)
    assert outcome.finished
    # Of the lead, just before its first optimiser step; the others have none.
    (found,) = [sums for sums in three.everywhere(gradients) if sums]
    return outcome, found


def test_streamed_gradient_is_the_ordinary_one(three: Ground) -> None:
    """The first update of two trainers, in float64, all else as it is: units, sums, closings, merges."""
    streaming = small(*STREAMING, "cluster.trainers=2")
    ordinary = streaming.model_copy(update={"schedule": streaming.schedule.model_copy(update={"advantage": "group"})})
    ours, gradient = _wide(three, streaming)
    theirs, wanted = _wide(three, ordinary)
    assert streamed(ours) > 0 and not streamed(theirs)
    assert len({run.worker for run in of_kind(ours, TrainUnit) if run.rewards}) == 2
    assert ours.fingerprints == theirs.fingerprints
    assert {tensor.dtype for tensor in gradient.values()} == {torch.float64}
    norm = torch.stack([t.square().sum() for t in wanted.values()]).sum().sqrt()
    difference = torch.stack([(gradient[name] - t).square().sum() for name, t in wanted.items()]).sum().sqrt()
    assert norm > 0
    assert float(difference / norm) < 1e-12


# --- together ---


@pytest.mark.parametrize("row", REAL, ids="-".join)
def test_combinations(three: Ground, row: tuple[str, ...]) -> None:
    config = small(*overrides(*settings(row)), "evaluation.every=0")
    outcome = three.run(config)
    if not config.schedule.streams:
        assert_as_expected(outcome, config)
    assert outcome.finished
    assert len(first_samples(outcome.fingerprints)) == 8
    assert first_samples(outcome.fingerprints) == first_samples(expected(config).fingerprints)
    _check_pipeline(outcome, config)
    _check_cuts(outcome, config)


def _check_pipeline(outcome: Outcome, config: RunConfig) -> None:
    """Who generated the 4 groups of the last iteration, when everybody is there."""
    rollers = defaultdict(set)
    for run in of_kind(outcome, RolloutUnit, 1):
        rollers[run.unit.micro_batch.index // 2].add(run.worker)
    assert len(rollers) == 4
    assert len(set.union(*rollers.values())) > 1
    if not config.schedule.gap:
        assert all(len(workers) == 1 for workers in rollers.values())


def _check_cuts(outcome: Outcome, config: RunConfig) -> None:
    """How the 6 steps of a trajectory and the 3 trained ones of a micro-batch were cut in the last iteration."""
    schedule = config.schedule
    rolled = {run.unit.last - run.unit.first for run in of_kind(outcome, RolloutUnit, 1)}
    detailed = schedule.observe.detail == "unit"
    assert rolled == {1 if detailed else 6 if schedule.steps_per_unit == "auto" else schedule.steps_per_unit}
    trained = {len(run.unit.steps) for run in of_kind(outcome, TrainUnit)}
    assert trained == {1: {1}, 2: {1, 2}, "auto": {3}}[schedule.timestep_batch]
