"""What a run measures of itself, and where it is written."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from digenrl import runspec
from digenrl.config.load import load_config
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.messages import Event, RolloutDone, UnitFinished, WorkerJoined
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.simulate import Costs, Simulation
from flows.measured import Clocked, CostBook, known_costs
from flows.tracking import iteration_metrics
from workers.listener import IterationReport

SMALL = ("cluster.workers=3", "schedule.micro_batch=2", "evaluation.every=0")
CONFIG = load_config("tiny-smoke", ["schedule.layout=digenrl", "schedule.trainer_assist=search", *SMALL])


def shape() -> RunShape:
    return runspec.shape(CONFIG, 0)


def scheduler() -> Scheduler:
    return runspec.scheduler_of(CONFIG, shape(), CostModel.guess(shape()))


def joins(count: int) -> list[tuple[float, Event]]:
    return [(0.0, WorkerJoined(f"w{i}", "cpu", frozenset({"rollout", "train", "score"}))) for i in range(count)]


def closed(iteration: int, seconds: float = 2.0) -> IterationReport:
    return IterationReport(iteration, seconds, [], {}, 0, {}, 0, {}, {}, staleness={0: 36, 1: 12})


def test_the_model_is_written_now_and_then_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    model = CostModel.guess(shape())
    model.observe(WorkerJoined("w", "cpu", frozenset({"rollout"})))
    model.observe(UnitFinished(shape().rollout_units(shape().micro_batches(1)[0])[0], "w", 5.0, RolloutDone()))
    book = CostBook(path, model, every=2)

    async def run() -> None:
        book.iteration_closed(closed(0))
        assert not path.exists()
        book.iteration_closed(closed(1))
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(run())
    found = known_costs(path, shape())
    assert found is not None
    assert found.to_json() == {**model.to_json(), "workers": {}}
    assert json.loads(path.read_text())["kinds"].keys() == {"cpu"}
    path.unlink()
    book.write()
    assert known_costs(path, shape()) is not None


def test_a_model_that_cannot_be_used_is_left_out_and_said_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "profile.json"
    assert known_costs(path, shape()) is None
    path.write_text('{"kinds": {}}')
    with caplog.at_level(logging.WARNING):
        assert known_costs(path, shape()) is None
    assert "profile.json is not used" in caplog.text


def test_a_model_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CostBook(tmp_path / "gone" / "profile.json", CostModel.guess(shape()), every=0).write()
    assert "was not written" in caplog.text


def test_the_time_of_searching_is_taken_per_iteration() -> None:
    """By somebody through whom events and commands pass unchanged."""
    result = Simulation(scheduler(), costs=Costs(lambda unit, kind: 1.0), incidents=joins(3)).run()
    assert result.finished
    found: list[tuple[int, float]] = []
    clocked = Clocked(scheduler(), lambda iteration, share: found.append((iteration, share)))
    clocked.iteration_closed(closed(0))
    assert not found, "nobody searched"
    commands = [command for now, event in result.events for command in clocked.handle(event, now)]
    assert commands == [command for _, command in result.commands]
    clocked.iteration_closed(closed(1))
    clocked.iteration_closed(closed(2))
    (one, share), (two, nothing) = found
    assert (one, two, nothing) == (1, 2, 0.0)
    assert 0 < share < 1
    assert clocked.search_share == pytest.approx(share / 3)


def test_staleness_is_a_metric_of_its_own() -> None:
    metrics = iteration_metrics(closed(0))
    assert (metrics["staleness/0"], metrics["staleness/1"]) == (36.0, 12.0)
