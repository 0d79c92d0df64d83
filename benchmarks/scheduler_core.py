"""How fast the scheduler decides, and what a simulated run costs: pure Python, one thread, no workers.

    python benchmarks/scheduler_core.py --json core.json            (about three minutes; --quick: ten seconds)

A decision is a Run command: which unit, on which worker. Decisions per second are counted over the processor time
spent inside `Scheduler.handle`, from the first worker that joins to the end of the run, with greedy trainer assistance;
a row names the cost model if there is one. The last table simulates a million units, time and memory of the simulated
workers included. Every row is measured in a process of its own; garbage is collected every 50,000 new objects.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from digenrl.identity import SampleId
from digenrl.rewards.base import Scored
from digenrl.scheduling import Digenrl, RunShape, Scheduler, Verdict
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.simulate import Costs, Simulation
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit

#: Seconds of the units, and how many times longer they take on each kind of worker.
SECONDS = {RolloutUnit: 1.0, ScoreUnit: 0.5, TrainUnit: 1.5, UpdateUnit: 0.5}
SLOWNESS = {"fast": 1.0, "slow": 1.7}

PROFILE: Mapping[str, Mapping[str, Any]] = {
    kind: {
        "rollout_step_s": slowness * SECONDS[RolloutUnit],
        "train_s": {1: slowness * SECONDS[TrainUnit]},
        "score_s": slowness * SECONDS[ScoreUnit],
        "update_s": slowness * SECONDS[UpdateUnit],
        "transfer_s": 0.01,
    }
    for kind, slowness in SLOWNESS.items()
}

Foresight = str  # none, costs or search


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        workers: how many; a third of them are trainers.
        iterations: of 2 groups per worker, 8 micro-batches each, 3 units per micro-batch.
        foresight: `none`: no cost model; `costs`: the scheduler has one; `search`: and searches at bubbles.
        mixed: half of the workers are slow.
        keep: keep the log of events and commands, as a simulation does; else forget it.
    """

    workers: int
    iterations: int
    foresight: Foresight = "none"
    mixed: bool = False
    keep: bool = False

    @property
    def shape(self) -> RunShape:
        """The run."""
        return RunShape(
            run_seed=0,
            eval_seed=0,
            start_iteration=0,
            iterations=self.iterations,
            groups=2 * self.workers,
            group_size=8,
            micro_batch=1,
            num_steps=1,
            updates=2,
            timestep_batch=1,
            trained_steps=lambda iteration: (0,),
            detailed=lambda iteration: False,
            eval_prompts=0,
            eval_micro_batch=1,
            eval_num_steps=1,
            evaluated=lambda version: False,
        )

    @property
    def units(self) -> int:
        """Rollouts, scores and train units of the run."""
        return self.iterations * 2 * self.workers * 8 * 3


@dataclass(frozen=True)
class Reading:
    """What was measured.

    Attributes:
        decisions: Run commands.
        events: calls of `handle`.
        core_s: processor seconds inside `handle`.
        total_s: processor seconds of the whole simulation.
        peak_bytes: how much the process grew at most.
    """

    decisions: int
    events: int
    core_s: float
    total_s: float
    peak_bytes: int


class _Metered(Simulation):
    """Counts decisions and the time they take."""

    decisions = events = 0
    core_s = 0.0
    keep = False

    def _tell(self, event: m.Event) -> None:
        began = time.process_time()
        commands = self.scheduler.handle(event, self._now)
        self.core_s += time.process_time() - began
        self.events += 1
        self.decisions += sum(type(command) is m.Run for command in commands)
        if self.keep:
            self.result.events.append((self._now, event))
            self.result.commands += [(self._now, command) for command in commands]
        for command in commands:
            self._perform(command)


def measure(setting: Setting) -> Reading:
    """Simulate one run."""
    gc.set_threshold(50_000, 20, 100)
    shape = setting.shape
    scheduler = Scheduler(
        shape,
        Digenrl(max(1, setting.workers // 3)),
        _everybody,
        costs=None if setting.foresight == "none" else CostModel.from_profile(shape, PROFILE),
        search=setting.foresight == "search",
    )
    able: frozenset[m.Capability] = frozenset({"rollout", "train", "score"})
    kinds = ["slow" if setting.mixed and i % 2 else "fast" for i in range(setting.workers)]
    joins = [(0.0, m.WorkerJoined(f"w{i}", kind, able)) for i, kind in enumerate(kinds)]
    before, began = _peak_bytes(), time.process_time()
    simulation = _Metered(scheduler, costs=Costs(_unit_s, lambda command: 0.01), incidents=joins)
    simulation.keep = setting.keep
    if not simulation.run().finished:
        raise RuntimeError(f"the run does not come to its end: {simulation.result}")
    total_s = time.process_time() - began
    return Reading(simulation.decisions, simulation.events, simulation.core_s, total_s, _peak_bytes() - before)


def _unit_s(unit: Unit, kind: str) -> float:
    return SECONDS[type(unit)] * SLOWNESS[kind]


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _everybody(groups: Sequence[Mapping[SampleId, Scored]]) -> Verdict:
    return Verdict({sample: 1.0 for rewards in groups for sample in rewards})


# --- the script ---


def speed_settings(quick: bool) -> list[Setting]:
    """Fleets the speed is measured on."""
    sizes = (8, 64) if quick else (8, 64, 512)
    plain = [Setting(n, max(2, 256 // n)) for n in sizes]
    mixed = [Setting(n, max(2, 256 // n), foresight, mixed=True) for n in sizes for foresight in ("costs", "search")]
    return plain + mixed


def million_settings(quick: bool) -> list[Setting]:
    """A million units, without and with the log."""
    workers, iterations = (8, 26) if quick else (64, 326)
    return [Setting(workers, iterations, keep=keep) for keep in (False, True)]


def in_own_process(setting: Setting) -> Reading:
    """`measure`, undisturbed by what was measured before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, setting).result()


def speed_row(setting: Setting, repeats: int) -> dict[str, Any]:
    """The median of several runs."""
    readings = [in_own_process(setting) for _ in range(repeats)]
    return {
        **asdict(setting),
        "decisions": readings[0].decisions,
        "decisions_per_s": median(r.decisions / r.core_s for r in readings),
        "events_per_s": median(r.events / r.core_s for r in readings),
        "repeats": repeats,
    }


def million_row(setting: Setting) -> dict[str, Any]:
    """One long run."""
    reading = in_own_process(setting)
    millions = reading.decisions / 1e6
    return {
        **asdict(setting),
        "units": reading.decisions,
        "seconds_per_million": reading.total_s / millions,
        "bytes_per_million": reading.peak_bytes / millions,
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small fleets, one repeat, 16,000 units")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(argv)
    print(f"{'workers':>7} {'fleet':>6} {'foresight':>9} {'decisions/s':>12} {'events/s':>9}")
    speed = []
    for setting in speed_settings(arguments.quick):
        speed.append(row := speed_row(setting, 1 if arguments.quick else 5))
        fleet = "mixed" if setting.mixed else "equal"
        print(
            f"{setting.workers:>7} {fleet:>6} {setting.foresight:>9} "
            f"{row['decisions_per_s']:>12,.0f} {row['events_per_s']:>9,.0f}",
            flush=True,
        )
    million = []
    for setting in million_settings(arguments.quick):
        million.append(row := million_row(setting))
        log = "with its log" if setting.keep else "without a log"
        print(
            f"{row['units']:,} units on {setting.workers} workers {log}: {row['seconds_per_million']:.1f} s and "
            f"{row['bytes_per_million'] / 2**20:,.0f} MiB per million",
            flush=True,
        )
    if arguments.json:
        found = {"python": platform.python_version(), "machine": platform.machine(), "speed": speed, "million": million}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
