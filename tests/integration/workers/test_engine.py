"""An orchestrated run is the plain loop, bit for bit: samples, scores and weights, wherever the work was placed."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from distributed import SchedulerPlugin

from digenrl import runspec
from digenrl.guard.watch import Guard
from digenrl.loop import train
from digenrl.scheduling.units import RolloutUnit, TrainUnit, UpdateUnit
from flows.guarding import Guarding
from runs import Ground, Outcome, assert_as_expected, small
from workers import process
from workers.listener import IterationReport, Listener

WORKERS = 3


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(1)
    yield found
    found.close()


#: Workers, then what differs from a disaggregated run. In the order of workers: the cluster only grows.
LAYOUTS = [
    pytest.param(1, ("schedule.layout=colocated",), id="colocated-1"),
    pytest.param(2, (), id="disaggregated-1+1"),
    pytest.param(2, ("schedule.timestep_batch=1", "schedule.observe.detail=unit"), id="single-timesteps"),
    pytest.param(3, ("schedule.layout=colocated",), id="colocated-3"),
    pytest.param(3, ("schedule.micro_batch=2",), id="groups-spread-over-2+1"),
    pytest.param(3, ("cluster.trainers=2", "schedule.micro_batch=2"), id="groups-spread-over-1+2"),
    pytest.param(3, ("cluster.trainers=2", "algorithm.kl_beta=0.04"), id="kl-1+2"),
    pytest.param(3, ("algorithm.std_scope=iteration",), id="iteration-scope"),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {}


@pytest.mark.parametrize(("workers", "overrides"), LAYOUTS)
def test_equals_the_plain_loop(
    ground: Ground, outcomes: dict[str, Outcome], request: pytest.FixtureRequest, workers: int, overrides: tuple[str]
) -> None:
    if len(ground.cards()) != workers:
        ground.scale(workers)
    config = small(f"cluster.workers={WORKERS}", *overrides)
    outcome = ground.run(config)
    assert_as_expected(outcome, config)
    assert all(len(receipts) == 1 for receipts in outcome.receipts.values())
    assert len(outcome.receipts) == len(outcome.units)
    outcomes[request.node.callspec.id] = outcome


def test_every_role_was_played_by_several_workers(outcomes: dict[str, Outcome]) -> None:
    """What was compared above did happen: merges on the lead, standbys, groups in pieces, timesteps one by one."""

    def workers_of(name: str, kind: type) -> Counter[str]:
        return Counter(worker for unit, worker in outcomes[name].units if isinstance(unit, kind))

    assert len(workers_of("groups-spread-over-1+2", TrainUnit)) == 2
    assert len(workers_of("groups-spread-over-1+2", UpdateUnit)) == 1
    assert len(workers_of("groups-spread-over-2+1", RolloutUnit)) == 3
    # An update has two units here, so two of the three are enough.
    assert len(workers_of("colocated-3", TrainUnit)) > 1
    single = [unit for unit, _ in outcomes["single-timesteps"].units if isinstance(unit, TrainUnit)]
    assert {len(unit.steps) for unit in single} == {1}
    pieces = [unit for unit, _ in outcomes["groups-spread-over-1+2"].units if isinstance(unit, TrainUnit)]
    assert len({unit.micro_batch for unit in pieces}) == 3 * 4 * 2
    metrics = [report.metrics for report in outcomes["kl-1+2"].reports]
    assert metrics[-1]["kl"] > 0


def _threads_here() -> tuple[int, str | None]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def test_workers_compute_on_one_thread(ground: Ground) -> None:
    assert set(ground.everywhere(_threads_here)) == {(1, "1")}
    futures = [ground.client.submit(_threads_here, pure=False) for _ in range(2 * WORKERS)]
    assert set(ground.do(ground.client.gather, futures)) == {(1, "1")}


def _sizes() -> dict[str, int]:
    """How many things of each kind the replica of this process holds."""
    (replica,) = process._REPLICAS.values()
    kinds = ("_rollouts", "_finished", "_accumulators", "_receipts")
    weights = ("_adapters", "_behaviours", "_optimizers")
    held = {kind: len(getattr(replica, kind)) for kind in kinds}
    return held | {kind: len(getattr(replica._weights, kind)) for kind in weights}


class Scales(Listener):
    """Weighs all replicas whenever an iteration closes."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self.weighed: list[asyncio.Future[dict[str, dict[str, int]]]] = []

    def iteration_closed(self, report: IterationReport) -> None:
        self.weighed.append(asyncio.ensure_future(self._ground.client.run(_sizes)))


def test_replicas_do_not_grow(ground: Ground) -> None:
    """What a worker keeps does not depend on how many iterations it has seen."""
    config = small(f"cluster.workers={WORKERS}", "cluster.trainers=2", "iterations=5", "evaluation.every=2")
    scales = Scales(ground)
    assert ground.run(config, scales).finished
    weights = [Counter() for _ in scales.weighed]
    for total, weighed in zip(weights, scales.weighed, strict=True):
        for sizes in weighed.result().values():
            total.update(sizes)
    for total in weights:
        assert total["_adapters"] <= 3 * WORKERS
        assert total["_optimizers"] <= 3 * 2
        assert total["_behaviours"] == 0
        assert total["_accumulators"] <= 2
        assert total["_rollouts"] == 0
        # Of the iteration that closes and its evaluation: a worker forgets with the next message to it.
        assert total["_finished"] <= 2 * 4 + 2
    # Of one iteration at most, and of two micro-batches of an evaluation. Iteration 0 is cut into one unit per step.
    shape = runspec.shape(config, 0)
    batches = shape.micro_batches(1)
    units = sum(len(shape.rollout_units(batch)) + len(shape.train_units(batch)) + 1 for batch in batches)
    assert max(total["_receipts"] for total in weights[1:]) <= units + shape.updates + 2 * 2


class Keys(SchedulerPlugin):
    """Keeps the keys of all tasks that Dask finished."""

    name = "keys"

    def __init__(self) -> None:
        self.finished: set[str] = set()

    def transition(self, key: str, start: str, finish: str, *args: object, **kwargs: object) -> None:
        if finish == "memory":
            self.finished.add(key)


def test_two_runs_on_one_cluster_share_no_key(ground: Ground) -> None:
    """A unit that died with a worker would hold a later one of the same key to the slot of the dead."""
    config, keys = small("cluster.workers=1", "schedule.layout=colocated", "iterations=1"), []
    for _ in range(2):
        seen = Keys()
        ground.client.cluster.scheduler.add_plugin(seen)
        outcome = ground.run(config)
        ground.client.cluster.scheduler.remove_plugin(seen.name)
        assert len(seen.finished) > len(outcome.units)  # and one to prepare each worker
        keys.append(seen.finished)
    assert keys[0].isdisjoint(keys[1])


def test_the_guard_sees_what_the_plain_loop_shows_it(ground: Ground) -> None:
    config = small('guard.gold=["ocr_ddddocr"]', "evaluation.every=1", "schedule.micro_batch=2", "iterations=2")
    outcome, guard = Outcome(), Guard(config)
    seen = Guarding(config, guard, 0, (), lambda: None)
    ground.do(ground.drive, config, outcome, seen)
    wanted = train(config).verdicts
    assert [(v, found.level, found.gold) for v, found in guard.verdicts.items()] == [
        (v, found.level, found.gold) for v, found in wanted.items()
    ]
    for version, verdict in wanted.items():
        assert guard.verdicts[version].metrics() == pytest.approx(verdict.metrics())
    assert {"divergence", "edges", "diversity", "failed"} <= set(wanted[2].findings) and len(wanted) == 3


def _epochs() -> list[str]:
    return sorted(process._REPLICAS)


def test_a_finished_run_leaves_nothing_on_its_workers(ground: Ground) -> None:
    assert ground.everywhere(_epochs) == [[]] * WORKERS
