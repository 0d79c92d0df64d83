"""A checkpoint holds the weights, the iteration count and the history of one moment, whatever order they came in."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from digenrl.config import RunConfig
from digenrl.config.load import ConfigError, load_config
from digenrl.policy import NumberedAdapter
from digenrl.prompts import load_prompts
from flows import patience
from flows.checkpointing import Checkpointer
from flows.history import History
from flows.resuming import check_resumable, restore
from flows.stores import Stores, stores_of
from storage import checkpoints
from storage.runs import RunDirectory
from storage.stores import open_store
from workers.listener import Evaluation, IterationReport, TrainerState

#: Optimiser steps of an iteration of tiny-smoke.
UPDATES = 2


def stores(root: Path) -> Stores:
    """As by default: everything in one directory."""
    store = open_store(root)
    return Stores(store, store)


def resumable(directory: RunDirectory, config: RunConfig) -> None:
    """What is asked before a resume."""
    places = stores_of(directory, config)
    check_resumable(directory, config, places, checkpoints.newest(*places.distinct))


class Run:
    """What a checkpointer hears of a run."""

    def __init__(self, root: Path, every: int) -> None:
        config = load_config("tiny-smoke", ["iterations=9", f"checkpoint.every={every}"])
        self.root = root
        self.history = History()
        self.checkpointer = Checkpointer(stores(root), config, self.history, load_prompts(config.data.prompts))
        self.checkpointer.extra["mlflow_run_id"] = "abc"

    def publish(self, version: int) -> None:
        theta = version * UPDATES
        weights = {"w": torch.full((2,), float(theta))}
        self.checkpointer.published(version, TrainerState(theta, weights, {"step": torch.tensor(theta)}, f"h{theta}"))

    def close(self, iteration: int) -> None:
        report = IterationReport(iteration, 1.0, [0.5], {}, 6, {}, 0, {}, {"worker 0": 0.5})
        self.history.iteration_closed(report)
        self.checkpointer.iteration_closed(report)

    def saved(self) -> list[str]:
        return sorted(path.parent.name[:11] for path in self.root.glob("step-*/manifest.json"))


def go(work: Callable[[], object], run: Run) -> None:
    """Do `work` on an event loop, let background saves end, and finish."""

    async def main() -> None:
        work()
        while any(task is not asyncio.current_task() for task in asyncio.all_tasks()):
            await asyncio.sleep(0.001)
        await run.checkpointer.finish()

    asyncio.run(main())


@pytest.mark.parametrize("published_first", [True, False])
def test_every_second_iteration_and_the_last_are_saved(tmp_path: Path, published_first: bool) -> None:
    run = Run(tmp_path, every=2)

    async def main() -> None:
        for iteration in range(5):
            steps = [lambda i=iteration: run.publish(i + 1), lambda i=iteration: run.close(i)]
            for step in steps if published_first else reversed(steps):
                step()
            while any(task is not asyncio.current_task() for task in asyncio.all_tasks()):
                await asyncio.sleep(0.001)
        await run.checkpointer.finish()

    asyncio.run(main())
    assert run.saved() == ["step-000002", "step-000004", "step-000005"]
    for info in (checkpoints.latest(tmp_path), run.checkpointer.last):
        assert info is not None
        assert info.iteration == 5
    restored = restore(stores(tmp_path))
    assert restored is not None
    iteration, state, checkpoint = restored
    assert (iteration, state.theta, state.adapter_hash) == (5, 10, "h10")
    assert state.adapter["w"].tolist() == [10.0, 10.0]
    assert checkpoint.state["mlflow_run_id"] == "abc"
    assert [row.iteration for row in History.from_state(checkpoint.state["history"]).rows] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("published", "closed"), [(2, 3), (3, 2)])
def test_a_run_that_stops_between_the_two_saves_what_belongs_together(
    tmp_path: Path, published: int, closed: int
) -> None:
    run = Run(tmp_path, every=0)

    def work() -> None:
        run.publish(published)
        for iteration in range(closed):
            run.close(iteration)
        for version in (0, 2, 3):
            run.history.evaluated(Evaluation(version, {}, {}))

    go(work, run)
    restored = restore(stores(tmp_path))
    assert restored is not None
    iteration, state, checkpoint = restored
    assert (iteration, state.theta) == (published, published * UPDATES)
    history = History.from_state(checkpoint.state["history"])
    assert [row.iteration for row in history.rows] == list(range(min(published, closed)))
    assert max(history.evaluations) == published


@pytest.mark.parametrize("previous", [None, NumberedAdapter(4, {"w": torch.ones(2)})])
def test_the_adapter_before_is_saved_where_it_is_still_used(tmp_path: Path, previous: NumberedAdapter | None) -> None:
    run = Run(tmp_path, every=0)
    state = TrainerState(6, {"w": torch.zeros(2)}, {"step": torch.tensor(6)}, "h6", previous)
    go(lambda: run.checkpointer.published(3, state), run)
    restored = restore(stores(tmp_path))
    assert restored is not None
    _, found, checkpoint = restored
    assert ("previous_adapter" in checkpoint.tensors) == (previous is not None)
    assert (found.theta, found.adapter["w"].tolist()) == (6, [0.0, 0.0])
    if previous is None or found.previous is None:
        assert found.previous is previous
    else:
        assert (found.previous.theta, found.previous.weights["w"].tolist()) == (4, [1.0, 1.0])


def test_the_behaviour_policy_is_saved_where_it_has_weights_of_its_own(tmp_path: Path) -> None:
    run = Run(tmp_path, every=0)
    state = TrainerState(
        6, {"w": torch.zeros(2)}, {"step": torch.tensor(6)}, "h6", None, behaviour={"w": torch.full((2,), 0.5)}
    )
    go(lambda: run.checkpointer.published(3, state), run)
    restored = restore(stores(tmp_path))
    assert restored is not None and restored[1].behaviour is not None
    assert restored[1].behaviour["w"].tolist() == [0.5, 0.5] and restored[1].generator.tag == (6, "behaviour")


def test_nothing_published_is_nothing_saved(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    go(lambda: None, run)
    assert run.checkpointer.last is None
    assert restore(stores(tmp_path)) is None


def test_storage_that_fails_for_a_while_is_said_twice_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.02)
    root = tmp_path / "checkpoints"
    root.write_text("a file where the directory should be")
    run = Run(root, every=1)

    async def main() -> None:
        for iteration in range(3):
            run.publish(iteration + 1)
            run.close(iteration)
            await asyncio.sleep(0.05)
        assert run.saved() == []
        root.unlink()
        async with asyncio.timeout(10):
            while run.checkpointer.last is None:
                await asyncio.sleep(0.01)
        await run.checkpointer.finish()

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    begun, ended = caplog.messages
    assert begun.startswith(f"checkpoints cannot be saved in {root} ([Errno 20] Not a directory")
    assert begun.endswith("the run goes on, and it is tried again")
    assert re.fullmatch(rf"checkpoints are saved in {root} again after \d+ s; the newest has 3 iterations", ended)
    assert run.saved() == ["step-000003"]
    assert 0.1 < run.checkpointer.degraded_s < 10


def test_a_last_checkpoint_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("a file where the directory should be")
    run = Run(root, every=0)
    with pytest.raises(OSError, match="checkpoints"):
        go(lambda: run.publish(1), run)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of 3 iterations that has a checkpoint after 2."""
    home = tmp_path_factory.mktemp("home")
    directory = RunDirectory.create(home, "tiny-smoke", load_config("tiny-smoke", ["iterations=3"]))
    save(directory, 2, [0])
    return directory


def save(directory: RunDirectory, iterations: int, evaluated: Sequence[int]) -> None:
    """Save what a run that has come so far would save."""
    config = directory.read_config()
    prompts = load_prompts(config.data.prompts)
    checkpointer = Checkpointer(stores_of(directory, config), config, history := History(), prompts)
    for version in evaluated:
        history.evaluated(Evaluation(version, {}, {}))
    theta = iterations * UPDATES
    state = TrainerState(theta, {"w": torch.ones(2)}, {"step": torch.tensor(theta)}, "h")

    async def main() -> None:
        checkpointer.published(iterations, state)
        await checkpointer.finish()

    asyncio.run(main())


@pytest.mark.parametrize(
    "override",
    [
        *("iterations=9", "optimizer.learning_rate=1e-4", "schedule.observe.every=0", "cluster.workers=3"),
        *("evaluation.prompts=4", "checkpoint.keep.last=1", "gates.max_bad_updates=0", "tracking.uri=none"),
    ],
)
def test_what_may_change_between_attempts(stopped: RunDirectory, override: str) -> None:
    resumable(stopped, load_config(str(stopped.config_path), [override]))


@pytest.mark.parametrize(
    ("override", "fragment"),
    [
        ("seed=7", "seed was 0 when the checkpoint was saved and is 7 now"),
        ("algorithm.prompts_per_iteration=2", "algorithm.prompts_per_iteration was 4 when"),
        ("algorithm.updates_per_iteration=4", "algorithm.updates_per_iteration was 2 when"),
        ("lora.rank=2", "lora.rank was "),
        ("rewards.0.weight=2", "rewards was "),
        ("optimizer.betas=[0.5, 0.5]", "optimizer.betas was [0.9, 0.999] when"),
        ("schedule.micro_batch=1", "schedule.micro_batch was "),
        ("data.prompts=package:other", "data.prompts was "),
    ],
)
def test_what_would_make_another_run_is_refused(stopped: RunDirectory, override: str, fragment: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resumable(stopped, load_config(str(stopped.config_path), [override]))
    assert fragment in str(refused.value)
    assert f"set it back in {stopped.config_path}" in str(refused.value)


def test_the_cursor_says_how_far_each_source_has_come(tmp_path: Path) -> None:
    directory = weighted_run(tmp_path)
    save(directory, 5, [])
    info = checkpoints.latest(directory.checkpoints)
    assert info is not None
    saved = checkpoints.load(info).state["data"]
    assert (saved["prompts"], saved["taken"]) == (30, [15, 5]), "20 prompts, three of four from the first source"


def test_prompts_that_changed_make_another_run(tmp_path: Path) -> None:
    directory = weighted_run(tmp_path)
    save(directory, 1, [])
    config = directory.read_config()
    resumable(directory, config)
    with (tmp_path / "b.txt").open("a") as file:
        file.write("one more\n")
    with pytest.raises(
        ConfigError, match=r"a\.txt, .*b\.txt no longer holds the prompts .* \(30 then, 31 now\); put the"
    ):
        resumable(directory, config)


def weighted_run(folder: Path) -> RunDirectory:
    """A run with two sources of 20 and 10 prompts, weights 3 and 1."""
    for name, size in (("a", 20), ("b", 10)):
        (folder / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(size)))
    sources = f"[{{path: {folder}/a.txt, weight: 3}}, {{path: {folder}/b.txt}}]"
    config = load_config(
        "tiny-smoke", ["iterations=9", f"data.prompts={sources}", "rewards.0.name=jpeg_compressibility"]
    )
    return RunDirectory.create(folder / "home", "tiny-smoke", config)


def test_a_run_is_complete_with_its_last_iteration_and_evaluation(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "tiny-smoke", load_config("tiny-smoke", ["iterations=3"]))
    config = directory.read_config()
    resumable(directory, config)  # nothing is saved yet
    save(directory, 3, [0])
    resumable(directory, config)  # the evaluation at the end is left
    resumable(directory, config.model_copy(update={"iterations": 4}))
    shutil.rmtree(directory.checkpoints)
    save(directory, 3, [0, 3])
    for fewer in (3, 2):
        with pytest.raises(ConfigError, match=r"is complete: .* has 3 iterations"):
            resumable(directory, config.model_copy(update={"iterations": fewer}))
