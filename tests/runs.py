"""Runs of the engine on real worker processes, and what they are compared with.

ground = Ground(workers=2)         a local cluster that outlives several runs
outcome = ground.run(config)       one run, from its own initial adapter
expected(config)                   the same run by digenrl.loop, in this process
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from distributed import Client, WorkerPlugin

from digenrl import runspec
from digenrl.config import ClusterConfig, RunConfig, ScheduleConfig
from digenrl.config.load import load_config
from digenrl.loop import LoopResult, train
from digenrl.policy import adapter_hash
from digenrl.prompts import load_data
from digenrl.rewards.base import PromptRecord, Score
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.messages import Command, Event, Run
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import Unit
from workers.cluster import open_cluster
from workers.engine import Engine
from workers.listener import Dispatched, Evaluation, IterationReport, Listener, Listeners, TrainerState
from workers.presence import WorkerCard, card
from workers.receipts import Receipt, RunSetup

T = TypeVar("T")

#: No run here may take longer.
DEADLINE_S = 120.0

#: Seconds on a worker, roughly.
GUESS = {"cpu": {"rollout_step_s": 0.02, "install_s": 0.05}}

#: 3 iterations of 4 groups of 4 samples, 2 updates, 6 steps of which 3 are trained; 6 held-out prompts.
SMALL = (
    "iterations=3",
    "algorithm.num_steps=6",
    "evaluation.prompts=6",
    "evaluation.micro_batch=3",
    "evaluation.num_steps=4",
)


def small(*overrides: str) -> RunConfig:
    """A run of seconds on which everything happens that can happen."""
    return load_config("tiny-smoke", [*SMALL, *overrides])


@dataclass
class Outcome(Listener):
    """What a run leaves.

    Attributes:
        finished: whether it ran to its end.
        reports: of its iterations.
        evaluations: scores by version.
        pictures: PNG files of the evaluations, by version and prompt index.
        versions: published versions with the hash of their adapter.
        states: all that were published, in order.
        runs: every unit handed out, with all that was said with it.
        log: every event with its time, and the commands that followed it.
        receipts: how many receipts each unit left.
        messages: what was said about the fleet.
    """

    finished: bool = False
    reports: list[IterationReport] = field(default_factory=list)
    evaluations: dict[int, dict[Any, Score]] = field(default_factory=dict)
    pictures: dict[int, dict[int, bytes]] = field(default_factory=dict)
    versions: list[tuple[int, str]] = field(default_factory=list)
    states: list[TrainerState] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    log: list[tuple[float, Event, list[Command]]] = field(default_factory=list)
    receipts: dict[Unit, list[Receipt]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def state(self) -> TrainerState | None:
        """Published last."""
        return self.states[-1] if self.states else None

    @property
    def units(self) -> list[tuple[Unit, str]]:
        """Every unit handed out, with the incarnation it was handed to."""
        return [(run.unit, run.worker) for run in self.runs]

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hash of everything every training rollout made, by micro-batch."""
        return {label: found for report in self.reports for label, found in report.fingerprints.items()}

    @property
    def adapter(self) -> str:
        """Content hash of the adapter published last."""
        assert self.state is not None
        return adapter_hash(self.state.adapter)

    def dispatched(self, event: Dispatched) -> None:
        self.runs.append(event.run)
        event.outcome.add_done_callback(functools.partial(self._ended, event.run.unit))

    def _ended(self, unit: Unit, outcome: asyncio.Future[Receipt]) -> None:
        if not outcome.cancelled() and outcome.exception() is None:
            self.receipts.setdefault(unit, []).append(outcome.result())

    def published(self, version: int, state: TrainerState) -> None:
        self.versions.append((version, state.adapter_hash))
        self.states.append(state)

    def iteration_closed(self, report: IterationReport) -> None:
        self.reports.append(report)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations[evaluation.version] = evaluation.scores
        self.pictures[evaluation.version] = evaluation.previews

    def fleet_changed(self, message: str) -> None:
        self.messages.append(message)


class OnUnit(Listener):
    """Does something when the n-th unit that matches is handed out, or has left its receipt."""

    def __init__(
        self, matches: Callable[[Unit], bool], act: Callable[[Dispatched], None], *, nth: int = 1, ended: bool = False
    ) -> None:
        self._matches = matches
        self._act = act
        self._left = nth
        self._ended = ended

    def dispatched(self, event: Dispatched) -> None:
        if not self._matches(event.run.unit):
            return
        self._left -= 1
        if self._left == 0 and self._ended:
            event.outcome.add_done_callback(lambda _: self._act(event))
        elif self._left == 0:
            self._act(event)


class Ground:
    """A local cluster that outlives several runs, on an event loop in a thread of its own."""

    def __init__(self, workers: int, **changes: object) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ground")
        self._thread.start()
        self._closing = asyncio.Event()
        opened: Future[Client] = Future()
        cluster = small().cluster.model_copy(update={"workers": workers, **changes})
        # A client must be closed by the task that opened it.
        self._held = asyncio.run_coroutine_threadsafe(self._hold(cluster, opened), self._loop)
        self._held.add_done_callback(lambda held: opened.done() or opened.set_exception(held.exception()))
        self.client = opened.result(DEADLINE_S)

    async def _hold(self, cluster: ClusterConfig, opened: Future[Client]) -> None:
        async with open_cluster(cluster) as client:
            opened.set_result(client)
            await self._closing.wait()

    def do(self, call: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        """Call something on the loop and wait for what it returns."""

        async def called() -> T:
            async with asyncio.timeout(DEADLINE_S):
                return await call(*arguments, **named)

        return asyncio.run_coroutine_threadsafe(called(), self._loop).result()

    def run(self, config: RunConfig, *listeners: Listener, **named: Any) -> Outcome:
        """One run; `named` as in `engine_for`. What it raises is raised here."""
        outcome = Outcome()
        self.do(self.drive, config, outcome, *listeners, **named)
        return outcome

    async def drive(self, config: RunConfig, outcome: Outcome, *listeners: Listener, **named: Any) -> None:
        """One run into `outcome`, on the loop of the caller."""
        engine = engine_for(self.client, config, Listeners(outcome, *listeners), log=outcome.log, **named)
        outcome.finished = await engine.run()

    def cards(self) -> dict[str, WorkerCard]:
        """The workers there are, by name for people."""
        return {f"worker {c.name}": c for c in self.do(self.client.run, card).values()}

    def everywhere(self, function: Callable[..., T], *arguments: Any) -> list[T]:
        """What a function returns on every worker."""
        return list(self.do(self.client.run, function, *arguments).values())

    def install(self, plugin: WorkerPlugin) -> None:
        """Set up a plugin on the workers that are there and on all that will come."""
        self.do(self.client.register_plugin, plugin)

    def uninstall(self, name: str) -> None:
        """Take a plugin away again."""
        self.do(self.client.unregister_worker_plugin, name)

    def scale(self, workers: int) -> None:
        """Change the number of workers."""
        self._loop.call_soon_threadsafe(self.client.cluster.scale, workers)
        self.settle(workers)

    def settle(self, workers: int) -> None:
        """Wait until so many workers are there: a nanny may still be replacing one."""
        deadline = time.monotonic() + DEADLINE_S
        while len(self.do(self.client.run, os.getpid, on_error="ignore")) != workers:
            assert time.monotonic() < deadline, f"the cluster does not get {workers} workers"
            time.sleep(0.05)

    def close(self) -> None:
        """End the cluster."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._held.result(DEADLINE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def engine_for(
    client: Client,
    config: RunConfig,
    listener: Listener,
    prompts: Sequence[PromptRecord] = (),
    start: TrainerState | None = None,
    replica: Callable[[RunSetup, str], Any] | None = None,
    log: list[tuple[float, Event, list[Command]]] | None = None,
) -> Engine:
    """An engine as the flow makes it.

    Args:
        client: of the cluster.
        config: the run.
        listener: hears of it.
        prompts: to train on instead of the configured ones.
        start: what the run continues from; None: its own initial adapter.
        replica: what runs the units on the workers instead of the ordinary replica.
        log: takes what goes into the scheduler and comes out of it.
    """
    data = load_data(config.data)
    train_prompts, held_out = prompts or data.train, data.held_out
    first = start.theta // config.algorithm.updates_per_iteration if start is not None else 0
    shape = runspec.shape(config, len(held_out), first)
    scheduler = scheduler_for(config, shape)
    return Engine(
        client=client,
        setup=RunSetup(uuid.uuid4().hex, config, len(held_out), first, replica=replica),
        scheduler=scheduler if log is None else Recorder(scheduler, log),
        start=start,
        prompts_of=lambda m: tuple(runspec.prompts_of(shape, m, train_prompts, held_out)),
        listener=listener,
    )


def scheduler_for(config: RunConfig, shape: RunShape) -> Scheduler:
    """The scheduler of such an engine. Greedy help needs no predictions; search begins with GUESS and learns better."""
    costs = CostModel.from_profile(shape, GUESS) if config.schedule.assist == "search" else None
    return runspec.scheduler_of(config, shape, costs)


@dataclass(frozen=True)
class Recorder:
    """A scheduler that is listened to."""

    scheduler: Scheduler
    log: list[tuple[float, Event, list[Command]]]

    def handle(self, event: Event, now: float) -> list[Command]:
        """See Scheduler."""
        commands = self.scheduler.handle(event, now)
        self.log.append((now, event, commands))
        return commands

    def waiting_for(self) -> str:
        """See Scheduler."""
        return self.scheduler.waiting_for()


@dataclass(frozen=True)
class Expected:
    """The run as the plain loop does it."""

    fingerprints: dict[str, str]
    adapter: str
    evaluations: dict[int, dict[Any, Score]]


def expected(config: RunConfig) -> Expected:
    """By digenrl.loop; where and how work is placed makes no difference to it, only how it is cut and what is stale."""
    schedule = config.schedule
    cut = ScheduleConfig(
        micro_batch=schedule.micro_batch,
        timestep_batch=schedule.timestep_batch,
        stale_fraction=schedule.stale_fraction,
        advantage="streaming" if schedule.streams else "group",
    )
    placed = {"cluster": small().cluster, "schedule": cut}
    return _expected(config.model_copy(update=placed).model_dump_json())


@functools.lru_cache
def _expected(config: str) -> Expected:
    torch.set_num_threads(1)
    result: LoopResult = train(RunConfig.model_validate_json(config))
    fingerprints = {m.label: found for i in result.iterations for m, found in i.hashes.items()}
    return Expected(fingerprints, adapter_hash(result.adapter.weights), result.evaluations)


def assert_as_expected(outcome: Outcome, config: RunConfig) -> None:
    """Bit for bit the samples, the scores and the weights of the plain loop, everything counted once."""
    wanted = expected(config)
    assert outcome.finished
    assert outcome.fingerprints == wanted.fingerprints
    assert outcome.evaluations == wanted.evaluations
    assert outcome.adapter == wanted.adapter
    algorithm = config.algorithm
    pairs = algorithm.prompts_per_iteration * algorithm.samples_per_prompt * runspec.trained_step_count(config)
    assert [report.iteration for report in outcome.reports] == list(range(config.iterations))
    for report in outcome.reports:
        assert report.trained + sum(report.excluded.values()) == pairs
        assert report.metrics.get("pairs", 0) == report.trained


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)
