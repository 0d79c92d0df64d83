"""The runs that benchmarks/overhead.py measures, in the process they are measured in.

    open_workers   the workers of a layout
    run_loop       the plain loop
    run_bare       engine and scheduler on Dask workers, nothing else
    run_observed   the same within a Prefect flow run, with the observers that a training run has

All leave the first iteration out: it builds embeddings and is always shown in detail.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import psutil
import torch
from distributed import Client
from prefect import flow
from prefect.runtime import flow_run

from benchmarks.overhead_figures import WORKERS, FlowRun, Ran, Reading, Side, busy_shares, gaps
from digenrl import loop, runspec
from digenrl.config import ClusterConfig, RunConfig
from digenrl.prompts import load_prompts
from digenrl.scheduling.costs import CostModel, KindCosts
from digenrl.scheduling.policies import Colocated, Disaggregated
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from tasks.observers import Observers
from workers.cluster import open_cluster
from workers.emulated import Emulation, emulated_cluster
from workers.engine import Engine, role_of
from workers.listener import Dispatched, IterationReport, Listener, Listeners
from workers.receipts import RunSetup

#: Of emulated devices.
KIND = "device"

#: Seconds of every rollout and train unit of emulated devices.
UNIT_S = 0.2


@asynccontextmanager
async def open_workers(layout: str, config: ClusterConfig) -> AsyncIterator[Client]:
    """A client of the workers that a layout runs on."""
    if layout == "emulated":
        async with emulated_cluster((KIND,) * WORKERS[layout]) as cluster:
            yield cluster.client
    else:
        async with open_cluster(config) as client:
            yield client


def run_loop(config: RunConfig) -> Reading:
    """Iterations one after the other in this process, on one thread, as a worker computes."""
    torch.set_num_threads(1)
    ends: list[float] = []
    result = loop.train(config, on_iteration=lambda _: ends.append(time.perf_counter()))
    # The first call is before iteration 0.
    counted = result.iterations[1:]
    return Reading(sum(len(done.scores) for done in counted), len(counted), ends[-1] - ends[1])


async def run_bare(client: Client, side: Side, config: RunConfig) -> Reading:
    """Without Prefect."""
    shape = runspec.shape(config, 0)
    if side.layout == "emulated":
        # Nobody looks: the first iteration, too, need not be cut into a unit per timestep and device.
        shape = replace(shape, detailed=lambda iteration: side.stepwise)
    recorder = _Recorder(shape)
    await _drive(client, side, config, shape, recorder)
    return recorder.reading(None)


async def run_observed(client: Client, side: Side, config: RunConfig) -> tuple[Reading, FlowRun]:
    """Within a flow run of the server that the environment names."""

    @flow(name="overhead", persist_result=False, validate_parameters=False, retries=0)
    async def overhead() -> tuple[Reading, FlowRun]:
        shape = runspec.shape(config, 0)
        if side.layout == "emulated":
            # A task run per timestep of 32 devices is more than a Prefect server on SQLite records.
            shape = replace(shape, detailed=lambda iteration: False)
        observers = Observers(config.schedule.observe, shape)
        recorder = _Recorder(shape)
        await _drive(client, side, config, shape, Listeners(recorder, observers))
        share = observers.share
        await observers.close(patient=True)
        ids = (str(flow_run.id), *map(str, observers.flow_runs))
        return recorder.reading(share), FlowRun(ids, observers.emitted)

    return await overhead()


async def _drive(client: Client, side: Side, config: RunConfig, shape: RunShape, listener: Listener) -> None:
    prompts = load_prompts(config.data.prompts)
    layout = Disaggregated(config.cluster.trainers) if side.layout == "disaggregated" else Colocated()
    replica = Emulation(_costs(shape, side)) if side.layout == "emulated" else None
    engine = Engine(
        client=client,
        setup=RunSetup(uuid.uuid4().hex, config, held_out=0, replica=replica),
        scheduler=Scheduler(shape, layout, runspec.advantage_rule(config), queue_depth=side.queue_depth),
        start=None,
        prompts_of=lambda m: tuple(runspec.prompts_of(shape, m, prompts, ())),
        listener=listener,
    )
    await engine.run()


def _costs(shape: RunShape, side: Side) -> CostModel:
    """Rollout and train units take UNIT_S each, however they are cut."""
    steps, trained = 1 if side.cut == "1 timestep" else shape.num_steps, shape.timestep_batch
    costs = KindCosts(rollout_step_s=UNIT_S / steps, train_s={trained: UNIT_S}, score_s=UNIT_S / 20, update_s=0.0)
    return CostModel(shape, {KIND: costs}, replay_share=0.0)


class _Mark:
    """Where things stand at the end of an iteration."""

    def __init__(self, units: int) -> None:
        self.at, self.units = time.time(), units
        cpu = psutil.Process().cpu_times()
        self.cpu_s = cpu.user + cpu.system


class _Recorder(Listener):
    """Keeps when every unit ran, and a mark per iteration."""

    def __init__(self, shape: RunShape) -> None:
        self._shape = shape
        self._ran: list[Ran] = []
        self._marks: list[_Mark] = []
        self._samples: list[int] = []
        self._spoilt: list[str] = []

    def dispatched(self, event: Dispatched) -> None:
        """See Listener."""
        event.outcome.add_done_callback(partial(self._ended, event, time.time()))

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._samples.append(len(report.scores))
        self._marks.append(_Mark(len(self._ran)))

    def _ended(self, event: Dispatched, sent_at: float, outcome: object) -> None:
        unit = event.run.unit
        if event.outcome.cancelled() or event.outcome.exception() is not None:
            self._spoilt.append(unit.label)
            return
        receipt = event.outcome.result()
        self._ran.append(
            Ran(
                slot=event.worker_name,
                lane=unit.lane,
                kind=role_of(unit),
                label=unit.label,
                iteration=self._iteration(unit),
                theta=event.run.theta,
                inputs=self._inputs(unit),
                sent_at=sent_at,
                started_at=receipt.started_at,
                ended_at=receipt.started_at + receipt.seconds,
            )
        )

    def _iteration(self, unit: Unit) -> int:
        if isinstance(unit, UpdateUnit):
            return self._shape.groups_of_update(unit.theta)[0]
        return unit.micro_batch.iteration

    def _inputs(self, unit: Unit) -> tuple[str, ...]:
        """Labels of the units that a rollout or train unit builds on, apart from what made its adapter."""
        if isinstance(unit, RolloutUnit):
            return tuple(u.label for u in self._shape.rollout_units(unit.micro_batch) if u.last == unit.first)
        if isinstance(unit, TrainUnit):
            group = self._shape.group_of(unit.micro_batch)
            mates = self._shape.micro_batches(unit.micro_batch.iteration)
            return tuple(ScoreUnit(mate).label for mate in mates if self._shape.group_of(mate) == group)
        return ()

    def reading(self, observing: float | None) -> Reading:
        """What the run shows.

        Raises:
            RuntimeError: a unit failed or was withdrawn; what it cost to do it again is not what is measured here.
        """
        if self._spoilt:
            raise RuntimeError(f"the run does not count, since these units were done again: {', '.join(self._spoilt)}")
        first, last = self._marks[0], self._marks[-1]
        counted = [ran for ran in self._ran if ran.iteration > 0]
        return Reading(
            samples=sum(self._samples[1:]),
            iterations=len(self._marks) - 1,
            seconds=last.at - first.at,
            units=last.units - first.units,
            flow_cpu_s=last.cpu_s - first.cpu_s,
            observing=observing,
            busy=busy_shares(counted, first.at, last.at),
            gaps=tuple(gaps(counted)),
        )
