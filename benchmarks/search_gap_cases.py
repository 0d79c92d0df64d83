"""Small cases of one iteration, and how the real scheduler does on them: for benchmarks/search_gap.py.

    Case       durations, capabilities and sizes, drawn from a seed
    simulate   the case on the virtual clock, under one way of assisting

Everything moves at once and for nothing, there is one optimiser step that takes no time, and lanes never stand still
between units: what is left is which unit runs where and when.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from digenrl.identity import SampleId
from digenrl.rewards.base import Scored
from digenrl.scheduling import Digenrl, Disaggregated, RunShape, Scheduler, Verdict
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.simulate import Costs, Simulation

Assist = Literal["off", "greedy", "search"]

#: Durations are whole ticks, so that an exact solver can be exact.
TICK_S = 0.1

#: Relative rates of the kinds of a mixed fleet.
RATES = (1.0, 0.6, 0.35)


@dataclass(frozen=True)
class CaseWorker:
    """One worker: what it is able to do, and how long that takes it. Durations in ticks."""

    trains: bool
    rolls: bool
    rate: float
    rollout: int
    train: int


@dataclass(frozen=True)
class Case:
    """One iteration of P groups of G samples, each of them a micro-batch of its own with `units` train units.

    Scoring, on a cpu lane beside the devices, takes `score` ticks everywhere.

    Attributes:
        trainers: how many workers, the first ones, have training as their role.
        shared: the others can train, too.
    """

    seed: int
    workers: tuple[CaseWorker, ...]
    trainers: int
    shared: bool
    score: int
    groups: int
    group_size: int
    units: int

    @classmethod
    def of(cls, seed: int) -> Case:
        """Draw a case: 3-5 workers, half of the fleets mixed, half shared; 2-4 groups of 3-6 samples."""
        rng = random.Random(seed)
        count, mixed, shared = rng.randint(3, 5), rng.random() < 0.5, seed % 2 == 1
        trainers = rng.randint(1, count - 1)
        rollout, train = rng.randint(20, 100), rng.randint(10, 80)
        score = rng.randint(1, max(2, rollout // 5))
        workers = []
        for i in range(count):
            rate = rng.choice(RATES) if mixed else 1.0
            rolls = not 0 < i < trainers or rng.random() > 0.15
            trains = i < trainers or shared
            workers.append(CaseWorker(trains, rolls, rate, round(rollout / rate), round(train / rate)))
        sizes = rng.randint(2, 4), rng.randint(3, 6), rng.choice((1, 1, 2))
        return cls(seed, tuple(workers), trainers, shared, score, *sizes)

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
                "score_s": self.score * TICK_S,
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


@dataclass(frozen=True)
class Outcome:
    """How one case went.

    Attributes:
        ticks: until the iteration is published.
        core_s: processor seconds the scheduler took for all its decisions.
    """

    ticks: int
    core_s: float


class _Metered(Simulation):
    """Takes the time of the scheduler's decisions."""

    core_s = 0.0

    def _tell(self, event: m.Event) -> None:
        self.result.events.append((self._now, event))
        began = time.process_time()
        commands = self.scheduler.handle(event, self._now)
        self.core_s += time.process_time() - began
        for command in commands:
            self.result.commands.append((self._now, command))
            self._perform(command)


def simulate(case: Case, assist: Assist) -> Outcome:
    """Run the case on the virtual clock."""
    layout = Disaggregated(case.trainers) if assist == "off" else Digenrl(case.trainers)
    scheduler = Scheduler(case.shape, layout, _everybody, costs=case.costs, search=assist == "search")
    costs = Costs(case.costs.seconds, case.costs.move_s, case.costs.between_s)
    simulation = _Metered(scheduler, costs=costs, incidents=[(0.0, event) for event in case.joins])
    result = simulation.run()
    if not result.finished:
        raise RuntimeError(f"case {case.seed} does not come to its end: {result.failure or result.waiting_for}")
    return Outcome(round(result.makespan_s / TICK_S), simulation.core_s)


def _kind(worker: CaseWorker) -> str:
    return f"rate {worker.rate}"


def _everybody(groups: Sequence[Mapping[SampleId, Scored]]) -> Verdict:
    """Every sample takes part, so that all work is done."""
    return Verdict({sample: 1.0 for rewards in groups for sample in rewards})
