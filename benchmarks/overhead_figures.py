"""From what benchmarks/overhead.py measured to figures. Nothing here runs anything.

Side                         what is compared
Ran, Gap, Reading, FlowRun   what one run of a side leaves
gaps, busy_shares            figures of one run
row_of, side_of              figures of a side over its repeats, and the side they are of
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

#: Workers by layout.
WORKERS = {"colocated": 1, "disaggregated": 2, "emulated": 32}


@dataclass(frozen=True)
class Side:
    """One side of the comparison.

    Attributes:
        layout: `loop` is the plain loop in one process; `emulated` is colocated on devices that sleep.
        detail: `observe.detail` of a Prefect flow run; None: no flow, nothing is observed.
        stepwise: with detail None, rollouts are cut per timestep as for detail `unit`; otherwise that sets the cut.
        queue_depth: units outstanding per lane.
        warm_up_only: only the iteration that is never counted; its server time is taken off the other observed sides.
    """

    layout: str
    detail: str | None = None
    stepwise: bool = False
    queue_depth: int = 2
    warm_up_only: bool = False

    @property
    def label(self) -> str:
        """For people."""
        if self.layout == "loop":
            return "digenrl.loop, one process"
        return f"{self.layout}, {WORKERS[self.layout]} worker{'s' if WORKERS[self.layout] > 1 else ''}"

    @property
    def cut(self) -> str:
        """What one rollout unit is."""
        return "1 timestep" if self.stepwise or self.detail == "unit" else "trajectory"

    @property
    def observed(self) -> str:
        """For people: what Prefect shows."""
        return self.detail or "no"


@dataclass(frozen=True)
class Ran:
    """One unit that ran.

    Attributes:
        slot: worker it ran on.
        lane: device or cpu.
        kind: rollout, score, train or update.
        label: of the unit.
        iteration: it belongs to.
        theta: adapter it ran under.
        inputs: labels of the units it builds on.
        sent_at: Unix time in seconds when the engine handed it out.
        started_at: Unix time in seconds.
        ended_at: likewise.
    """

    slot: str
    lane: str
    kind: str
    label: str
    iteration: int
    theta: int
    inputs: tuple[str, ...]
    sent_at: float
    started_at: float
    ended_at: float


@dataclass(frozen=True)
class Gap:
    """Idle seconds of a device lane in front of a unit that could have run; `queued`: the worker had it already."""

    seconds: float
    queued: bool


@dataclass(frozen=True)
class Reading:
    """One run of a side, its first iteration left out unless said otherwise.

    Attributes:
        samples: generated and scored.
        iterations: counted ones.
        seconds: their wall time.
        units: that ended within them.
        task_runs: Prefect task runs, first iteration included.
        flow_cpu_s: CPU time of the process with engine, Dask client and Dask scheduler, all its threads.
        observing: share of the run's wall time that the observers say they took, first iteration included.
        busy: share of the time the device lane ran units, by worker.
        gaps: on device lanes.
        server_cpu_s: CPU time of the Prefect server from the start of the run until it had nothing left to record,
            without what it needs when idle; first iteration included.
        others_cores: CPU time of all processes that are not ours, per second of the run.
    """

    samples: int
    iterations: int
    seconds: float
    units: int = 0
    task_runs: int = 0
    flow_cpu_s: float | None = None
    observing: float | None = None
    busy: dict[str, float] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    server_cpu_s: float | None = None
    others_cores: float = 0.0


@dataclass(frozen=True)
class FlowRun:
    """A Prefect flow run that was made with its subflow runs, and how many task runs they emitted."""

    ids: tuple[str, ...]
    task_runs: int


def gaps(ran: Iterable[Ran]) -> list[Gap]:
    """Gaps between consecutive units of a device lane, where only orchestration can have caused them.

    Counted are pairs of one kind, iteration and adapter whose second unit had all its inputs before the first one
    began (the first one itself may be an input): its worker had to wait for nothing else in between.
    """
    ran = list(ran)
    ended = {unit.label: unit.ended_at for unit in ran}
    lanes: dict[str, list[Ran]] = defaultdict(list)
    for unit in ran:
        if unit.lane == "device":
            lanes[unit.slot].append(unit)
    found = []
    for lane in lanes.values():
        for before, unit in pairwise(sorted(lane, key=lambda u: u.started_at)):
            same = (before.kind, before.iteration, before.theta) == (unit.kind, unit.iteration, unit.theta)
            others = [label for label in unit.inputs if label != before.label]
            if same and all(ended.get(label, np.inf) <= before.started_at for label in others):
                found.append(Gap(unit.started_at - before.ended_at, unit.sent_at <= before.ended_at))
    return found


def busy_shares(ran: Iterable[Ran], begin: float, end: float) -> dict[str, float]:
    """Share of the time from `begin` to `end` (Unix, seconds) that each worker's device lane ran units."""
    total: dict[str, float] = defaultdict(float)
    for unit in ran:
        if unit.lane == "device":
            total[unit.slot] += max(min(unit.ended_at, end) - max(unit.started_at, begin), 0.0)
    return {slot: total[slot] / (end - begin) for slot in sorted(total)}


def row_of(side: Side, readings: Sequence[Reading], warm_up: Sequence[Reading] = ()) -> dict[str, Any]:
    """The figures of a side: medians over its repeats; gaps are pooled over them.

    Args:
        side: what was run.
        readings: one per repeat.
        warm_up: for observed sides, the runs of the same repeats that consist of the first iteration only.
    """
    rates = [r.samples / r.seconds for r in readings]
    pooled = [gap for r in readings for gap in r.gaps]
    milliseconds = [1000 * gap.seconds for gap in pooled]
    row: dict[str, Any] = {
        **asdict(side),
        "repeats": len(readings),
        "samples_per_s": median(rates),
        "samples_per_s_all": rates,
        "iteration_s": median(r.seconds / r.iterations for r in readings),
        "units_per_iteration": median(r.units / r.iterations for r in readings),
        "others_cores": median(r.others_cores for r in readings),
        "busy": {worker: median(r.busy[worker] for r in readings) for worker in readings[0].busy},
        "gaps": len(pooled),
        "gaps_queued": sum(gap.queued for gap in pooled),
        "gap_p50_ms": float(np.percentile(milliseconds, 50)) if pooled else None,
        "gap_p95_ms": float(np.percentile(milliseconds, 95)) if pooled else None,
    }
    row["flow_cpu_ms_per_unit"] = _median(_per_unit(r.flow_cpu_s, r) for r in readings)
    row["flow_cpu_cores"] = _median(None if r.flow_cpu_s is None else r.flow_cpu_s / r.seconds for r in readings)
    row["observing_share"] = _median(r.observing for r in readings)
    pairs = list(zip(readings, warm_up, strict=True)) if side.detail else []
    row["server_cpu_ms_per_unit"] = _median(_per_unit(_beyond(r.server_cpu_s, w.server_cpu_s), r) for r, w in pairs)
    row["task_runs_per_iteration"] = _median((r.task_runs - w.task_runs) / r.iterations for r, w in pairs)
    return row


def side_of(row: dict[str, Any]) -> Side:
    """The side a row is about."""
    return Side(**{name: row[name] for name in Side.__dataclass_fields__})


def _beyond(whole: float | None, warm_up: float | None) -> float | None:
    return None if whole is None or warm_up is None else whole - warm_up


def _per_unit(seconds: float | None, reading: Reading) -> float | None:
    return None if seconds is None else 1000 * seconds / reading.units


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None
