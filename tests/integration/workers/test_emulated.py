"""Emulated devices: two processes, eight Dask workers, units that sleep, and everything else as in a training run."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from digenrl import runspec
from digenrl.identity import MicroBatchId
from digenrl.scheduling import messages as m
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.policies import Digenrl
from digenrl.scheduling.predict import joining
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.simulate import Costs, Simulation
from digenrl.scheduling.simworker import SimulationError
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from digenrl.scheduling.workloads import workload
from runs import DEADLINE_S, OnUnit, Outcome
from workers.emulated import EmulatedCluster, EmulatedReplica, Emulation, config_for, emulated_cluster, scaled
from workers.engine import Engine
from workers.listener import Listeners
from workers.receipts import Assignment, RunSetup

POOLS = (Pool("rate-1.0", 4), Pool("rate-0.35", 4))
KINDS = tuple(join.kind for join in joining(POOLS))


def costs_of(groups: int, iterations: int, factor: float) -> CostModel:
    """Qwen-Image, fewer groups, units of tens of milliseconds."""
    whole = workload("qwen-image-20b")
    cut = replace(whole, run=replace(whole.run, groups=groups))
    return scaled(cut.cost_model(cut.shape(iterations)), factor)


COSTS = costs_of(groups=4, iterations=2, factor=0.01)
SHAPE = COSTS.shape


def scheduler() -> Scheduler:
    rule = runspec.advantage_rule(config_for(SHAPE))
    return Scheduler(SHAPE, Digenrl(4), rule, costs=CostModel.from_json(SHAPE, COSTS.to_json()))


def units_of(shape: RunShape) -> set[Unit]:
    """Every unit of a run."""
    found: set[Unit] = {UpdateUnit(theta) for theta in range(1, shape.iterations * shape.updates + 1)}
    for iteration in range(shape.iterations):
        for micro_batch in shape.micro_batches(iteration):
            found |= {*shape.rollout_units(micro_batch), ScoreUnit(micro_batch), *shape.train_units(micro_batch)}
    return found


def run(interfere: Callable[[EmulatedCluster], OnUnit] | None = None) -> Outcome:
    """One run on eight devices."""
    outcome = Outcome()

    async def driven() -> None:
        async with asyncio.timeout(DEADLINE_S), emulated_cluster(KINDS) as cluster:
            engine = Engine(
                client=cluster.client,
                setup=RunSetup(uuid.uuid4().hex, config_for(SHAPE), 0, replica=Emulation(COSTS)),
                scheduler=scheduler(),
                start=None,
                prompts_of=lambda micro_batch: (),
                listener=Listeners(outcome, *([interfere(cluster)] if interfere else [])),
            )
            outcome.finished = await engine.run()

    asyncio.run(driven())
    return outcome


def assert_complete(outcome: Outcome) -> None:
    """All work counted once."""
    pairs = SHAPE.groups * SHAPE.group_size * len(SHAPE.trained_steps(0))
    assert outcome.finished
    assert [(report.trained, report.metrics["pairs"]) for report in outcome.reports] == [(pairs, pairs)] * 2
    assert set(outcome.receipts) == units_of(SHAPE)
    assert outcome.versions[-1] == (2, f"emulated theta {2 * SHAPE.updates}")


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run()


def test_every_unit_runs_once_and_takes_its_time(outcome: Outcome) -> None:
    assert_complete(outcome)
    assert Counter(unit for unit, _ in outcome.units) == Counter(units_of(SHAPE))
    assert len({worker for _, worker in outcome.units}) == len(KINDS)
    fastest_s = min(COSTS.seconds(rollout_of(0), kind) for kind in KINDS)
    slept = [outcome.receipts[unit][0].seconds for unit in units_of(SHAPE) if isinstance(unit, RolloutUnit)]
    assert min(slept) >= fastest_s


def test_it_takes_no_less_than_the_virtual_clock_says(outcome: Outcome) -> None:
    receipts = [receipt for found in outcome.receipts.values() for receipt in found]
    elapsed_s = max(r.started_at + r.seconds for r in receipts) - min(r.started_at for r in receipts)
    timed = Costs(COSTS.seconds, COSTS.move_s, COSTS.between_s, COSTS.streamed)
    virtual = Simulation(scheduler(), costs=timed, incidents=[(0.0, join) for join in joining(POOLS)]).run()
    # Orchestration comes on top; a different order of arrival may help a little.
    assert elapsed_s > 0.8 * virtual.makespan_s


def test_half_of_the_devices_die_with_their_process() -> None:
    def killing(cluster: EmulatedCluster) -> OnUnit:
        return OnUnit(lambda unit: isinstance(unit, TrainUnit), lambda _: cluster.hosts[0].kill(), nth=3)

    outcome = run(killing)
    assert_complete(outcome)
    assert sum(message.endswith("is gone") for message in outcome.messages) == len(KINDS) // 2


def rollout_of(index: int) -> RolloutUnit:
    return RolloutUnit(MicroBatchId("train", 0, index), 0, SHAPE.num_steps)


# --- the replica alone ---


def replica() -> EmulatedReplica:
    setup = RunSetup("epoch", config_for(SHAPE), 0, replica=Emulation(COSTS))
    return EmulatedReplica(setup, "here", "rate-1.0", COSTS)


def test_it_refuses_what_a_replica_could_not_do() -> None:
    with pytest.raises(SimulationError, match="needs adapter 0"):
        replica().run(Assignment("epoch", m.Run(rollout_of(0), "here", 0, 0)))


def test_it_holds_what_its_units_made_until_that_is_dropped() -> None:
    device, ref = replica(), m.TrajectoryRef(rollout_of(0).micro_batch)
    device.initialise()
    assert device.holds(m.AdapterRef(0)) and not device.holds(ref)
    device.run(Assignment("epoch", m.Run(rollout_of(0), "here", 0, 0)))
    assert device.holds(ref)
    device.drop(((1, ref),))
    assert not device.holds(ref)


def test_scores_are_a_function_of_identity() -> None:
    first, second = replica(), replica()
    scores = []
    for device in (first, second):
        device.initialise()
        device.run(Assignment("epoch", m.Run(rollout_of(3), "here", 0, 0)))
        receipt = device.run(Assignment("epoch", m.Run(ScoreUnit(rollout_of(3).micro_batch), "here", 0, 0)))
        assert isinstance(receipt.outcome, m.ScoresDone)
        scores.append(receipt.outcome.scores)
    assert scores[0] == scores[1]
    assert len({score.value for score in scores[0].values()}) == SHAPE.micro_batch


def test_an_accumulator_arrives_whole_or_not_at_all() -> None:
    lead, helper = replica(), replica()
    unit = SHAPE.train_units(rollout_of(0).micro_batch)[0]
    advantages = dict.fromkeys(SHAPE.samples(unit.micro_batch), 1.0)
    for device in (lead, helper):
        device.initialise()
    helper.run(Assignment("epoch", m.Run(rollout_of(0), "here", 0, 0)))
    helper.run(Assignment("epoch", m.Run(unit, "here", 0, 0, advantages=advantages, old_theta=0)))
    meta, tensors = helper.load(m.AccumulatorRef(1, "here"))
    with pytest.raises(ValueError, match="not what was announced"):
        lead.merge(1, meta, tensors, frozenset(), {})
    assert not lead.holds(m.AccumulatorRef(1, "here"))
    lead.merge(1, meta, tensors, frozenset({unit}), {})
    assert lead.holds(m.AccumulatorRef(1, "here"))


def test_scaling_leaves_no_orchestration_gap() -> None:
    whole = workload("wan2.1-14b")
    model = whole.cost_model(whole.shape(2), gap_s=0.01)
    half, unit = scaled(model, 0.5), UpdateUnit(1)
    for kind in model.kinds:
        assert half.seconds(unit, kind) == pytest.approx(0.5 * model.seconds(unit, kind))
        assert half.between_s(unit, unit, kind) == 0.0
        assert half.between_s(rollout_of(0), unit, kind) == pytest.approx(0.5 * (model.of_kind(kind).switch_s or 0.0))
