"""Small cases of one iteration, and how the real scheduler does on them: for benchmarks/search_gap.py.

    Case       durations, capabilities and sizes, drawn from a seed
    makespan   the case on the virtual clock, under one way of assisting

Everything moves at once and for nothing, there is one optimiser step that takes no time, and lanes never stand still
between units: what is left is which unit runs where and when.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from digenrl.identity import SampleId
from digenrl.scheduling import Digenrl, Disaggregated, RunShape, Scheduler, Verdict
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.predict import TimedSimulation

Assist = Literal["off", "greedy", "search"]

#: Durations are whole ticks, so that an exact solver can be exact.
TICK_S = 0.1

#: Relative rates of the kinds of a mixed fleet.
RATES = (1.0, 0.6, 0.35)


@dataclass(frozen=True)
class CaseWorker:
    """One worker. Durations in ticks."""

    trains: bool
    rolls: bool
    rate: float
    rollout: int
    train: int
    score: int


@dataclass(frozen=True)
class Case:
    """One iteration of P groups of G samples, each of them a micro-batch of its own with `units` train units."""

    seed: int
    workers: tuple[CaseWorker, ...]
    groups: int
    group_size: int
    units: int

    @classmethod
    def of(cls, seed: int) -> Case:
        """Draw a case: 3-5 workers, half of the fleets mixed; 2-4 groups of 3-6 samples."""
        rng = random.Random(seed)
        count, mixed = rng.randint(3, 5), rng.random() < 0.5
        trainers = rng.randint(1, count - 1)
        rollout, train = rng.randint(20, 100), rng.randint(10, 80)
        score = rng.randint(1, max(2, rollout // 5))
        workers = []
        for i in range(count):
            rate = rng.choice(RATES) if mixed else 1.0
            only_trains = 0 < i < trainers and rng.random() < 0.15
            slow = [max(1, round(ticks / rate)) for ticks in (rollout, train, score)]
            workers.append(CaseWorker(i < trainers, not only_trains, rate, *slow))
        return cls(seed, tuple(workers), rng.randint(2, 4), rng.randint(3, 6), rng.choice((1, 1, 2)))

    @property
    def trainers(self) -> int:
        """How many workers can train."""
        return sum(worker.trains for worker in self.workers)

    @property
    def shape(self) -> RunShape:
        """The run: a single iteration."""
        return RunShape(
            run_seed=self.seed,
            eval_seed=0,
            start_iteration=0,
            iterations=1,
            groups=self.groups,
            group_size=self.group_size,
            micro_batch=1,
            num_steps=1,
            updates=1,
            timestep_batch=1,
            trained_steps=lambda iteration: tuple(range(self.units)),
            detailed=lambda iteration: False,
            eval_prompts=0,
            eval_micro_batch=1,
            eval_num_steps=1,
            evaluated=lambda version: False,
        )

    @property
    def costs(self) -> CostModel:
        """Every worker is of a kind of its own rate."""
        kinds = {
            _kind(w): {
                "rollout_step_s": w.rollout * TICK_S,
                "train_s": {1: w.train * TICK_S},
                "score_s": w.score * TICK_S,
            }
            for w in self.workers
        }
        return CostModel.from_profile(self.shape, kinds)

    @property
    def joins(self) -> list[m.WorkerJoined]:
        """Trainers join first, so that the layout picks them."""
        events = []
        for i, worker in enumerate(self.workers):
            able: set[m.Capability] = {"score"}
            able |= {"train"} if worker.trains else set()
            able |= {"rollout"} if worker.rolls else set()
            events.append(m.WorkerJoined(f"w{i}", _kind(worker), frozenset(able)))
        return events


def makespan(case: Case, assist: Assist, queue_depth: int = 2) -> int:
    """Ticks until the iteration is published."""
    layout = Disaggregated(case.trainers) if assist == "off" else Digenrl(case.trainers)
    scheduler = Scheduler(
        case.shape, layout, _everybody, queue_depth=queue_depth, costs=case.costs, search=assist == "search"
    )
    result = TimedSimulation(scheduler, case.costs, [(0.0, event) for event in case.joins]).run()
    if not result.finished:
        raise RuntimeError(f"case {case.seed} does not come to its end: {result.failure or result.waiting_for}")
    return round(result.makespan_s / TICK_S)


def _kind(worker: CaseWorker) -> str:
    return f"rate {worker.rate}"


def _everybody(groups: Sequence[Mapping[SampleId, float]]) -> Verdict:
    """Every sample takes part, so that all work is done."""
    return Verdict({sample: 1.0 for rewards in groups for sample in rewards})
