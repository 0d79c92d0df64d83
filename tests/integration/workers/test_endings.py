"""However a run ends, it ends within seconds, says why, and leaves nothing behind on the cluster or in this process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import pytest

from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit
from runs import Ground, OnUnit, Outcome, assert_as_expected, engine_for, kill, small
from workers import engine as engine_module
from workers import process
from workers.courier import RunFailed
from workers.fleet import FleetError
from workers.listener import Listeners

CONFIG = small("iterations=2")
PROMPT_S = 10.0


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def nothing_left(ground: Ground, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No replica, no Dask task, no complaint of asyncio about tasks that nobody awaited."""
    ground.settle(2)
    yield
    ground.settle(2)
    deadline = time.monotonic() + PROMPT_S
    while ground.everywhere(_held) != [[], []] or ground.do(ground.client.processing) != _idle(ground):
        assert time.monotonic() < deadline, (ground.everywhere(_held), ground.do(ground.client.processing))
        time.sleep(0.05)
    complaints = [r.getMessage() for r in caplog.records if r.name == "asyncio" and r.levelno >= logging.ERROR]
    assert not complaints


def _held() -> list[str]:
    return sorted(process._REPLICAS)


def _idle(ground: Ground) -> dict[str, tuple[str, ...]]:
    return {card.address: () for card in ground.cards().values()}


def training(unit: Unit) -> bool:
    return isinstance(unit, TrainUnit)


async def _stopped(ground: Ground, outcome: Outcome) -> bool:
    made = []
    stop = OnUnit(training, lambda _: made[0].stop(), nth=5)
    made.append(engine_for(ground.client, CONFIG, Listeners(outcome, stop)))
    return await made[0].run()


def test_stopped_in_the_middle(ground: Ground) -> None:
    outcome = Outcome()
    began = time.monotonic()
    assert not ground.do(_stopped, ground, outcome)
    assert time.monotonic() - began < 3 * PROMPT_S
    assert not outcome.evaluations.keys() & {2}
    assert_as_expected(ground.run(CONFIG), CONFIG)


async def _cancelled(ground: Ground) -> float:
    reached = asyncio.Event()
    run = asyncio.create_task(engine_for(ground.client, CONFIG, OnUnit(training, lambda _: reached.set(), nth=5)).run())
    await reached.wait()
    began = time.monotonic()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    return time.monotonic() - began


def test_cancelled_in_the_middle(ground: Ground) -> None:
    assert ground.do(_cancelled, ground) < PROMPT_S


def test_a_model_that_no_worker_can_load(ground: Ground) -> None:
    broken = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"path": "/nowhere/at-all"})})
    with pytest.raises(FleetError, match=r"no worker can take part in the run: worker \d on .*: model.path='/nowhere"):
        ground.run(broken)


def test_nobody_there(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers are gone and none comes: the run says so and what it was waiting for."""
    monkeypatch.setattr(engine_module, "STALL_S", 2.0)
    ground.scale(0)
    try:
        with pytest.raises(RunFailed, match=r"nothing happened for 2 s with 0 workers: .*worker"):
            ground.run(CONFIG)
    finally:
        ground.scale(2)


def test_a_worker_that_leaves_for_good(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is retired in the middle of the run."""
    monkeypatch.setattr(engine_module, "STALL_S", 2.0)
    leave = OnUnit(training, lambda _: ground.client.cluster.scale(0), nth=3)
    try:
        with pytest.raises(RunFailed, match=r"nothing happened for 2 s with 0 workers: .*; lost so far: worker \d"):
            ground.run(CONFIG, leave)
    finally:
        ground.scale(2)


@pytest.mark.parametrize("kind", [RolloutUnit, ScoreUnit])
def test_a_replacement_that_is_starting_when_run_and_cluster_end(
    kind: type[Unit], caplog: pytest.LogCaptureFixture
) -> None:
    own = Ground(2)
    try:
        pids = {name: card.pid for name, card in own.cards().items()}

        def last(unit: Unit) -> bool:
            return isinstance(unit, kind) and unit.micro_batch.phase == "eval" and unit.micro_batch.iteration == 2

        outcome = own.run(CONFIG, OnUnit(last, lambda event: kill(pids[event.worker_name])))
        assert_as_expected(outcome, CONFIG)
    finally:
        began = time.monotonic()
        own.close()
    assert time.monotonic() - began < PROMPT_S
