"""How a run hears its guard: when it judges, what it tells, what is saved for it and what is left of a stopped run."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.guard.inspection import Inspection
from digenrl.guard.pictures import PictureStatistics
from digenrl.guard.watch import Guard, Verdict
from digenrl.identity import EVAL_ITERATION, SampleId
from digenrl.prompts import load_prompts
from digenrl.rewards.base import Scored
from flows import patience
from flows.checkpointing import Checkpointer
from flows.guarding import Guarding
from flows.history import History
from flows.progress import Progress
from flows.report import Places, draw, show_summary, summarise
from flows.resuming import Restored, restore
from flows.stores import Stores
from storage import checkpoints
from storage.runs import RunDirectory
from storage.stores import Store, open_store
from workers.listener import Evaluation, IterationReport, TrainerState

CONFIG = load_config(
    "tiny-smoke", ["iterations=20", "checkpoint.every=0", "checkpoint.keep.last=1", "evaluation.every=2"]
)
PROMPTS = load_prompts(CONFIG.data.prompts)
PLACES = Places(None, None, None, None, "flow", None, "042")


def evaluation(version: int, *, gamed: bool = False) -> Evaluation:
    """Four prompts; of a gamed reward the pictures are black and the reward is high."""
    scores = {SampleId(0, EVAL_ITERATION, i, 0): Scored(0.9 if gamed else 0.5) for i in range(4)}
    pictures = dict.fromkeys(range(4), PictureStatistics(1.0 if gamed else 0.1, 0.0, 0.2, 0.2, 0.0))
    return Evaluation(version, scores, {}, Inspection(pictures, {"judge": dict.fromkeys(range(4), Scored(0.25))}))


def report(iteration: int) -> IterationReport:
    scores = {SampleId(0, iteration, 0, i): Scored(reward) for i, reward in enumerate((0.4, 0.6))}
    return IterationReport(iteration, 1.0, [0.4, 0.6], scores, 6, {}, 0, {}, {"worker 0": 0.5})


class Run:
    """A run as its listeners hear it."""

    def __init__(self, root: Path, config: RunConfig = CONFIG, main: Store | None = None) -> None:
        self.directory = RunDirectory(root)
        local = open_store(self.directory.checkpoints)
        self.stores = Stores(main or local, local)
        self.guard = Guard(config)
        self.history = History()
        self.checkpointer = Checkpointer(self.stores, config, self.history, PROMPTS, self.guard)
        self.told: list[Verdict] = []
        self.stops = 0
        self.guarding = Guarding(CONFIG, self.guard, 0, (self.told.append,), self.stop)
        self.listeners = (self.history, self.checkpointer, self.guarding)

    def stop(self) -> None:
        self.stops += 1

    async def go(self, *gamed: bool) -> None:
        """An evaluation after every second iteration, the first of the base model."""
        for number, game in enumerate(gamed):
            for iteration in range(2 * number - 2, 2 * number) if number else ():
                self.close(iteration)
                await self.quiet()
            self.evaluate(2 * number, gamed=game)

    def close(self, iteration: int) -> None:
        """An iteration ends with new weights."""
        theta = 2 * (iteration + 1)
        state = TrainerState(theta, {}, {}, f"h{theta}")
        for listener in self.listeners:
            listener.iteration_closed(report(iteration))
            listener.published(iteration + 1, state)

    def evaluate(self, version: int, *, gamed: bool = False) -> None:
        """The weights after `version` iterations have been evaluated."""
        for listener in self.listeners:
            listener.evaluated(evaluation(version, gamed=gamed))

    async def quiet(self) -> None:
        """Until nothing is being saved."""
        while any(task is not asyncio.current_task() for task in asyncio.all_tasks()):
            await asyncio.sleep(0.001)

    @property
    def saved(self) -> list[int]:
        return sorted(info.iteration for info in checkpoints.committed(self.stores.main))

    def summary(self, status: str) -> dict:
        return summarise(
            "r", CONFIG, self.history, PLACES, status=status, observing=0.0, searching=0.0, bubbles={}, guard=self.guard
        )


def test_an_evaluation_is_judged_once_its_iterations_are_complete(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.guarding.evaluated(evaluation(0))
    run.guarding.iteration_closed(report(0))
    run.guarding.evaluated(evaluation(2))
    assert [verdict.version for verdict in run.told] == [0]
    run.guarding.iteration_closed(report(1))
    assert [verdict.version for verdict in run.told] == [0, 2]
    assert run.told[1].findings["zero_variance"].reading.value == 0


def test_a_stop_is_told_and_asked_for_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    asyncio.run(run.go(False, False, True, True))
    assert [verdict.level for verdict in run.told] == ["ok", "ok", "warn", "stop"] and run.stops == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_the_run_may_go_back_to_is_kept(tmp_path: Path, elsewhere: bool) -> None:
    """`checkpoint.every=0` and `keep.last=1`: only the guard asks for any."""
    run = Run(tmp_path, main=open_store(f"memory://{tmp_path}") if elsewhere else None)

    async def main() -> tuple[list[int], Restored | None]:
        await run.go(False, False, False, True, True)
        return run.saved, await run.checkpointer.go_back(run.told[-1].good)

    before, left = asyncio.run(main())
    assert before == [4, 6, 8], "other checks were ok at 6"
    assert run.told[-1].good == 4 and run.saved == [4]
    restored = restore(run.stores)
    assert restored is not None and (restored[0], restored[1].adapter_hash) == (4, "h8")
    assert left is not None and left[2].info == restored[2].info == run.checkpointer.last
    guard = Guard(CONFIG)
    guard.restore(restored[2].state["guard"])
    assert guard.verdicts == {v: run.guard.verdicts[v] for v in (0, 2)}, "version 4 was saved before it was judged"


def test_what_is_not_judged_yet_is_kept(tmp_path: Path) -> None:
    """An evaluation goes on beside the iterations that follow."""
    config = CONFIG.model_copy(update={"checkpoint": CONFIG.checkpoint.model_copy(update={"every": 1})})
    run = Run(tmp_path, config)

    async def main() -> None:
        run.evaluate(0)
        for iteration in range(5):
            run.close(iteration)
            await run.quiet()
            if iteration == 2:
                assert run.saved == [2, 3]
                run.evaluate(2)

    asyncio.run(main())
    assert run.saved == [2, 4, 5], "the last good one, the one that is judged next, and the newest"


def test_an_outage_takes_nothing_from_the_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    root = tmp_path / "elsewhere"
    root.write_text("a file where the directory should be")
    run = Run(tmp_path / "run", main=open_store(root))

    async def main() -> Restored | None:
        for iteration in range(8):
            run.close(iteration)
            if iteration % 2:
                run.evaluate(iteration + 1, gamed=iteration > 3)
        root.unlink()
        await run.quiet()
        assert run.saved == [4, 8], "the last good one, and the one at which other checks were ok"
        return await run.checkpointer.go_back(run.told[-1].good)

    left = asyncio.run(main())
    assert left is not None and left[0] == run.told[-1].good == 4 and run.saved == [4]


def test_a_guard_that_only_warns_asks_for_no_checkpoints(tmp_path: Path) -> None:
    run = Run(tmp_path, CONFIG.model_copy(update={"guard": CONFIG.guard.model_copy(update={"mode": "warn"})}))
    asyncio.run(run.go(False, False, False))
    assert run.saved == []


def test_the_base_model_may_be_all_that_is_left(tmp_path: Path) -> None:
    run = Run(tmp_path)

    async def main() -> Restored | None:
        await run.go(False, True, True)
        return await run.checkpointer.go_back(run.told[-1].good)

    assert asyncio.run(main()) is None and run.told[-1].good == 0 and run.saved == []


def grid(run: Run, version: int, shade: int) -> None:
    pixels = np.full((20, 60, 3), shade, dtype=np.uint8)
    Image.fromarray(pixels).save(run.directory.picture_path("held-out", version))


def test_what_is_left_of_a_stopped_run_is_its_last_good_evaluation(tmp_path: Path) -> None:
    run = Run(tmp_path)
    asyncio.run(run.go(False, False, True, True))
    for version, shade in ((0, 250), (2, 200), (4, 100), (6, 0)):
        grid(run, version, shade)
    pictures = draw(run.directory, run.history, run.told[-1])
    assert set(pictures) == {"curve", "before-after", "guard"}
    for name, (left, right) in {"before-after": (250, 200), "guard": (250, 0)}.items():
        picture = np.asarray(Image.open(pictures[name]))
        assert (picture[-5, 5].tolist(), picture[-5, -5].tolist()) == ([left] * 3, [right] * 3)
    summary = run.summary("guarded")
    assert (summary["iterations"], summary["eval_iterations"], summary["eval_after"]) == (6, 2, 0.5)
    assert summary["eval_curve"] == {"0": 0.5, "2": 0.5, "4": 0.9, "6": 0.9}
    found = summary["guard"]
    assert (found["state"], found["good_iterations"]) == ("stop", 2)
    assert found["states"] == {"0": "ok", "2": "ok", "4": "warn", "6": "stop"}
    assert found["gold"] == {"judge": {"0": 0.25, "2": 0.25, "4": 0.25, "6": 0.25}}
    assert found["checks"]["dark"] == pytest.approx(0.9)
    console = Console(file=io.StringIO(), width=300)
    show_summary(console, summary, pictures, PLACES)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert found["reason"] in text and "judge, not trained on  0.250 → 0.250" in text
    assert "guard.mode: warn" in text and f"digenrl resume {summary['run']}" in text and "stopped early" not in text


def test_a_run_that_goes_on_ends_with_what_it_has(tmp_path: Path) -> None:
    run = Run(tmp_path)
    asyncio.run(run.go(False, True, False))
    summary = run.summary("completed")
    assert (summary["eval_iterations"], summary["guard"]["state"], summary["guard"]["reason"]) == (4, "ok", None)
    assert summarise("r", CONFIG, run.history, PLACES, status="x", observing=0, searching=0)["guard"] is None


def test_the_display_shows_the_state_and_says_once_why_it_warns() -> None:
    console = Console(file=io.StringIO(), width=120)
    display = Progress("r", 20, console)
    good, bad = Verdict(2, gold={"judge": 0.5}), Verdict(4, "warn", reason="after 4 iterations all is dark")
    for verdict in (good, bad, bad, good):
        display.judged(verdict)
    lines = console.file.getvalue()  # type: ignore[attr-defined]
    assert lines.count("the guard warns: after 4 iterations all is dark") == 1
    assert "guard after 2 iterations: ok; judge 0.500" in lines and lines.count("after 4 iterations: warn") == 2
    display.iteration_closed(report(0))
    shown = Console(file=io.StringIO(), width=120)
    shown.print(display._render())
    assert "judge 0.500" in shown.file.getvalue()  # type: ignore[attr-defined]
