"""How long a run waits for rewards that take as long as the rollout of their micro-batch.

simulated()         on a virtual clock
on_dask_workers()   on real Dask workers whose units sleep, with the real engine
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from dataclasses import dataclass, field, replace
from itertools import pairwise

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.prompts import load_prompts
from digenrl.rewards.base import Scored
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel, KindCosts
from digenrl.scheduling.policies import Colocated, Digenrl, Layout
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.simulate import Behaviour, Costs, Simulation
from workers.emulated import Emulation, emulated_cluster
from workers.engine import Engine
from workers.listener import IterationReport, Listener
from workers.receipts import RunSetup

KIND = "device"
PER_WORKER = 64
ALLOWANCE = 0.015
#: Seconds of the rollout of a micro-batch and of its train unit, and of its reward unless that takes no time.
UNIT_S = 0.1


@dataclass(frozen=True)
class Exposed:
    """Seconds of an iteration with rewards that take as long as rollouts, and with rewards that take no time."""

    name: str
    with_rewards_s: float
    without_s: float
    limit: float = 1 / PER_WORKER + ALLOWANCE

    @property
    def share(self) -> float:
        """Of the iteration, that is waited."""
        return (self.with_rewards_s - self.without_s) / self.with_rewards_s


def _config(workers: int, iterations: int) -> RunConfig:
    return load_config(
        "tiny-smoke",
        [
            f"iterations={iterations}",
            "evaluation.every=0",
            f"algorithm.prompts_per_iteration={8 * workers}",
            "algorithm.samples_per_prompt=32",
            "algorithm.updates_per_iteration=1",
            "schedule.layout=colocated",
            "schedule.micro_batch=4",
            "schedule.timestep_batch=auto",
            f"cluster.workers={workers}",
        ],
    )


def _shape(config: RunConfig) -> RunShape:
    return replace(runspec.shape(config, 0), detailed=lambda iteration: False)


def _costs(shape: RunShape, score_s: float) -> CostModel:
    costs = KindCosts(
        rollout_step_s=UNIT_S / shape.num_steps, train_s={shape.timestep_batch: UNIT_S}, score_s=score_s, update_s=0.0
    )
    return CostModel(shape, {KIND: costs}, replay_share=0.0)


def simulated() -> list[Exposed]:
    """Colocated and digenrl, also where no advantage is known before the last reward (std_scope=update)."""
    runs: list[tuple[str, int, Layout, StdScope]] = [
        ("simulated, colocated, 1 worker", 1, Colocated(), "group"),
        ("simulated, colocated, 8 workers", 8, Colocated(), "group"),
        ("simulated, colocated, 8 workers, std_scope=update", 8, Colocated(), "update"),
        ("simulated, digenrl, 8 workers of which 2 train", 8, Digenrl(2), "group"),
        ("simulated, digenrl, 8 workers of which 2 train, std_scope=update", 8, Digenrl(2), "update"),
    ]
    return [
        Exposed(name, _simulate(n, layout, scope, UNIT_S), _simulate(n, layout, scope, 0.0))
        for name, n, layout, scope in runs
    ]


def _simulate(workers: int, layout: Layout, scope: StdScope, score_s: float) -> float:
    """Seconds of the second iteration."""
    config = _config(workers, 2)
    shape = _shape(config)
    model = _costs(shape, score_s)
    result = Simulation(
        Scheduler(shape, layout, runspec.advantage_rule(config), std_scope=scope),
        costs=Costs(lambda unit, kind: model.seconds(unit, KIND), move_s=lambda command: 0.0),
        incidents=[
            (0.0, m.WorkerJoined(f"w{i}", KIND, frozenset({"rollout", "train", "score"}))) for i in range(workers)
        ],
        behaviour=Behaviour(score=lambda sample: Scored(float(sample.generation))),
    ).run()
    closed = [now for now, command in result.commands if isinstance(command, m.CloseIteration)]
    return closed[1] - closed[0]


@dataclass
class _Ends(Listener):
    """When iterations ended."""

    at: list[float] = field(default_factory=list)

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self.at.append(time.perf_counter())


def on_dask_workers(workers: int = 1) -> list[Exposed]:
    """The engine on emulated devices, colocated."""

    async def both() -> Exposed:
        async with emulated_cluster((KIND,) * workers) as cluster:
            seconds = [await _drive(cluster.client, workers, score_s) for score_s in (UNIT_S, 0.0)]
        return Exposed(f"Dask, units that sleep, colocated, {workers} worker", *seconds)

    return [asyncio.run(both())]


async def _drive(client: object, workers: int, score_s: float) -> float:
    """Seconds of an iteration: the median of three after one that does not count."""
    config = _config(workers, 4)
    shape, prompts, ends = _shape(config), load_prompts(config.data.prompts), _Ends()
    engine = Engine(
        client=client,  # type: ignore[arg-type]
        setup=RunSetup(uuid.uuid4().hex, config, held_out=0, replica=Emulation(_costs(shape, score_s))),
        scheduler=Scheduler(shape, Colocated(), runspec.advantage_rule(config)),
        start=None,
        prompts_of=lambda micro_batch: tuple(runspec.prompts_of(shape, micro_batch, prompts, ())),
        listener=ends,
    )
    await engine.run()
    return statistics.median(later - earlier for earlier, later in pairwise(ends.at))
