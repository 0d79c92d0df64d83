"""What the scheduler's tests share: small runs that are simulated to the end, and the check of their books."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from digenrl.algorithms.advantages import GroupStatistics
from digenrl.identity import SampleId
from digenrl.rewards.base import Scored
from digenrl.scheduling import Layout, RunShape, Scheduler, Verdict
from digenrl.scheduling import messages as m
from digenrl.scheduling.simulate import Behaviour, Costs, Result, Simulation
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit

ALL: frozenset[m.Capability] = frozenset({"rollout", "train", "score"})

SHAPE = RunShape(
    run_seed=0,
    eval_seed=1,
    start_iteration=0,
    iterations=2,
    groups=2,
    group_size=4,
    micro_batch=2,
    num_steps=3,
    updates=1,
    timestep_batch=2,
    trained_steps=lambda iteration: (0, 1, 2),
    detailed=lambda iteration: False,
    eval_prompts=0,
    eval_micro_batch=2,
    eval_num_steps=4,
    evaluated=lambda version: False,
)


def shape(**changes: object) -> RunShape:
    """SHAPE with changes."""
    return replace(SHAPE, **changes)  # type: ignore[arg-type]


def centred(groups: Sequence[Mapping[SampleId, Scored]]) -> Verdict:
    """Rewards minus the mean of the group; groups of equal rewards are excluded."""
    advantages: dict[SampleId, float] = {}
    excluded: dict[SampleId, str] = {}
    statistics: list[GroupStatistics | None] = []
    for scores in groups:
        rewards = {sample: score.value for sample, score in scores.items()}
        if len(set(rewards.values())) < 2:
            excluded |= dict.fromkeys(rewards, "zero variance")
            statistics.append(None)
            continue
        mean = sum(rewards.values()) / len(rewards)
        advantages |= {sample: reward - mean for sample, reward in rewards.items()}
        statistics.append(GroupStatistics(mean, 1.0))
    return Verdict(advantages, excluded, statistics)


def unit_s(unit: Unit, kind: str) -> float:
    """Seconds by kind of unit, half as many on a fast worker."""
    seconds = {RolloutUnit: 3.0, ScoreUnit: 1.0, TrainUnit: 2.0, UpdateUnit: 0.5}[type(unit)]
    return seconds / 2 if kind == "fast" else seconds


COSTS = Costs(unit_s, move_s=lambda command: 0.1)


def joins(count: int, capabilities: frozenset[m.Capability] = ALL) -> list[tuple[float, m.Event]]:
    """Workers w0, w1, ... that join at the start."""
    return [(0.0, m.WorkerJoined(f"w{i}", "cpu", capabilities)) for i in range(count)]


def simulate(
    scheduler: Scheduler,
    incidents: Iterable[tuple[float, m.Event]],
    behaviour: Behaviour | None = None,
    costs: Costs = COSTS,
    redraws: int = 0,
) -> Result:
    """Run to the end and check the result."""
    simulation = Simulation(scheduler, costs=costs, incidents=incidents, behaviour=behaviour)
    result = simulation.run()
    if result.finished:
        check_every_pair_has_one_fate(scheduler.shape, result, redraws)
    return result


def run(run_shape: RunShape, layout: Layout, workers: int = 2, **options: object) -> Result:
    """A run on identical workers without incidents."""
    scheduler = Scheduler(run_shape, layout, centred, **options)  # type: ignore[arg-type]
    result = simulate(scheduler, joins(workers))
    assert result.finished, result.failure or result.waiting_for
    return result


def commands(result: Result, kind: type) -> list[m.Command]:
    """Commands of one kind, in order."""
    return [command for _, command in result.commands if isinstance(command, kind)]


def check_every_pair_has_one_fate(run_shape: RunShape, result: Result, redraws: int = 0) -> None:
    """Invariant 1: each (sample, trained step) is in one committed update, or excluded with a reason."""
    closed = {c.iteration: c for c in commands(result, m.CloseIteration)}
    for iteration in range(run_shape.start_iteration, run_shape.start_iteration + len(closed)):
        first = run_shape.theta_of_version(iteration)
        trained: list[tuple[SampleId, int]] = []
        for theta in range(first + 1, first + run_shape.updates + 1):
            _, groups = run_shape.groups_of_update(theta)
            for pairs in result.updates[theta].values():
                trained += pairs
                assert all(sample.group in groups for sample, _ in pairs)
        report = closed[iteration]
        assert all(sample.draw <= redraws for sample, _ in (*trained, *report.excluded))
        skipped = {p for p, reason in report.excluded.items() if reason.endswith("skipped")}
        entered = [pair for pair in trained if pair not in skipped]
        assert len(entered) == len(set(entered)) == report.trained
        assert not set(entered) & report.excluded.keys()
        expected = {
            (sample, step)
            for micro_batch in run_shape.micro_batches(iteration)
            for sample in run_shape.samples(micro_batch)
            for step in run_shape.trained_steps(iteration)
        }
        # Each place in a group has one sample, whatever it took to draw it.
        fates = [(replace(sample, draw=0), step) for sample, step in (*entered, *report.excluded)]
        assert len(fates) == len(expected) and set(fates) == expected
