"""The timeline listens to a run, explains its bubbles and leaves its files."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from PIL import Image

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.scheduling import messages as m
from digenrl.scheduling.bubbles import CAUSES
from digenrl.scheduling.units import ScoreUnit, Unit, UpdateUnit
from flows.timeline import Timeline, Written
from workers.listener import Dispatched, IterationReport
from workers.receipts import Receipt

#: Long ago: the clock of the units is their workers'.
T0 = 1_000.0

CONFIG = load_config(
    "tiny-smoke", ["evaluation.every=0", "schedule.observe.every=0", "algorithm.updates_per_iteration=1"]
)


class Silent:
    """A machine that answers nothing."""

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        return []

    def waiting_for(self) -> str:
        return "nothing"


class Clock:
    """The time the timeline reads."""

    now = T0

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("flows.timeline.time", clock)
    return clock


def report(iteration: int) -> IterationReport:
    return IterationReport(iteration, 1.0, [], {}, 0, {}, 0, {}, {})


def iteration(config: RunConfig, number: int) -> list[tuple[Unit, str]]:
    """Units of an iteration (not the first, which is cut finer), rollouts and scores on `a`, the rest on `b`."""
    shape = runspec.shape(config, 0)
    batches = shape.micro_batches(number)
    made = [(unit, "a") for batch in batches for unit in (*shape.rollout_units(batch), ScoreUnit(batch))]
    made += [(unit, "b") for batch in batches for unit in shape.train_units(batch)]
    return [*made, (UpdateUnit(number + 1), "b")]


class Drive:
    """Plays a run to a timeline: one unit after the other, one second each; `a` and `b` take turns."""

    def __init__(self, clock: Clock) -> None:
        self.found: dict[int, dict[str, float]] = {}
        self.clock = clock
        self.units: list[Unit] = []
        self.timeline = Timeline(
            CONFIG, runspec.shape(CONFIG, 0), lambda i, shares: self.found.update({i: dict(shares)})
        )
        self.machine = self.timeline.hearing(Silent())

    def join(self, *workers: str) -> None:
        for worker in workers:
            self.machine.handle(m.WorkerJoined(worker, "cpu", frozenset({"rollout", "train", "score"})), 0.0)

    async def play(self, units: Iterable[tuple[Unit, str]], theta: int) -> None:
        for unit, worker in units:
            outcome: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
            self.timeline.dispatched(Dispatched(m.Run(unit, worker, theta, 0), f"worker {worker[0]}", "", outcome))
            outcome.set_result(Receipt(m.RolloutDone(), self.clock.now, 1.0))
            self.clock.now += 1.0
            self.units.append(unit)
            await asyncio.sleep(0)

    async def finish(self, folder: Path) -> Written:
        return await self.timeline.finish(folder / "timeline.json", folder / "timeline.png", "a run")


def units_of(path: Path) -> list[str]:
    events = json.loads(path.read_bytes())["traceEvents"]
    return [e["name"] for e in events if e["ph"] == "X" and e["cat"] != "bubble"]


def test_every_unit_is_in_the_trace_once_and_bubbles_have_causes(clock: Clock, tmp_path: Path) -> None:
    async def run() -> tuple[Drive, Written]:
        drive = Drive(clock)
        drive.join("a", "b")
        for number in (1, 2):
            await drive.play(iteration(CONFIG, number), theta=number)
            drive.timeline.iteration_closed(report(number))
        return drive, await drive.finish(tmp_path)

    drive, written = asyncio.run(run())
    assert written.trace is not None and written.picture is not None and written.shares is not None
    assert sorted(units_of(written.trace)) == sorted(unit.label for unit in drive.units)
    assert Image.open(io.BytesIO(written.picture.read_bytes())).width > 1000

    # An iteration: 4 times a rollout and a score on `a`, then 4 train units and a step on `b`; 13 s.
    assert set(drive.found) == {1, 2}
    assert set(drive.found[1]) == set(CAUSES)
    assert drive.found[1]["weights"] == pytest.approx(6 / 26), "`a` waits from its last rollout to the end"
    assert drive.found[2]["end"] == pytest.approx(6 / 26), "after which nothing comes the second time"
    for shares in (*drive.found.values(), written.shares):
        # 9 of these 13 units are on devices, of which there are two.
        assert sum(shares.values()) == pytest.approx(1 - 9 / 26)


def test_a_worker_that_was_started_anew_gets_a_row_of_its_own(clock: Clock, tmp_path: Path) -> None:
    async def run() -> Written:
        drive = Drive(clock)
        drive.join("a", "b")
        units = iteration(CONFIG, 1)
        await drive.play(units[:4], theta=1)
        drive.machine.handle(m.WorkerLost("a"), 0.0)
        drive.join("a2")
        await drive.play([(unit, "a2" if worker == "a" else worker) for unit, worker in units[4:]], theta=1)
        return await drive.finish(tmp_path)

    written = asyncio.run(run())
    assert written.trace is not None and written.shares is None, "no iteration was closed"
    events = json.loads(written.trace.read_bytes())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"worker a", "worker a (2)", "worker b"}


def test_an_attempt_without_units_leaves_nothing(clock: Clock, tmp_path: Path) -> None:
    async def run() -> Written:
        return await Drive(clock).finish(tmp_path)

    assert asyncio.run(run()) == Written()
    assert list(tmp_path.iterdir()) == []


def test_of_a_long_run_the_end_is_kept(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flows.timeline.MAX_UNITS", 20)

    async def run() -> tuple[Drive, Written]:
        drive = Drive(clock)
        drive.join("a", "b")
        for number in (1, 2, 3, 4):
            await drive.play(iteration(CONFIG, number), theta=number)
            drive.timeline.iteration_closed(report(number))
        return drive, await drive.finish(tmp_path)

    drive, written = asyncio.run(run())
    assert written.trace is not None
    assert sorted(units_of(written.trace)) == sorted(unit.label for unit in drive.units[-20:])
    assert set(drive.found) == {1, 2, 3, 4}
