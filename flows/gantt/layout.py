"""What a Gantt chart shows, before it is drawn: rows, bars, version boundaries, sums. Colours are chosen here too.

chart(spans, names, ...) -> Chart
bars_of(row, resolution_s) -> what to draw, units too narrow to tell apart merged
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from digenrl.scheduling.bubbles import CAUSES, Bubble, Cause, by_cause
from digenrl.scheduling.trace import Activity, TracedUnit
from digenrl.scheduling.units import Lane, RolloutUnit, UpdateUnit

#: Lanes of a chart unless others are asked for.
DEVICES: tuple[Lane, ...] = ("device",)

#: Fill of a unit, for even and odd versions: neighbouring versions are told apart, stale rollouts seen.
COLOURS: dict[Activity, tuple[str, str]] = {
    "rollout": ("#3b6ea5", "#7fa8d1"),
    "train": ("#e07b1f", "#f2ae6b"),
    "update": ("#8c2d19", "#8c2d19"),
    "evaluate": ("#5b9a7d", "#93c4ad"),
    "score": ("#7a6bab", "#a99dcd"),
}

#: Fill of a bubble: pale, so that work stands out.
PALE: dict[Cause, str] = {
    "samples": "#dbe7f4",
    "reward": "#e6e0f3",
    "std scope": "#f7efc4",
    "weights": "#f8d9d3",
    "orchestration": "#dcdcdc",
    "draining": "#cfe6d8",
    "end": "#f7f7f7",
}

#: The same on a dark ground.
DIM: dict[Cause, str] = {
    "samples": "#24384f",
    "reward": "#3a2f57",
    "std scope": "#4d4618",
    "weights": "#55292a",
    "orchestration": "#4a4a4a",
    "draining": "#1f4531",
    "end": "#202226",
}

#: Smaller shares of bubbles are left out of the legend.
_VISIBLE = 0.0005

ACTIVITY_WORDS: dict[Activity, str] = {
    "rollout": "rollout",
    "train": "train",
    "update": "optimiser step",
    "evaluate": "evaluation",
    "score": "score",
}


@dataclass(frozen=True)
class Bar:
    """One rectangle: a unit, or several of one activity and version that are too narrow to tell apart."""

    start_s: float
    end_s: float
    activity: Activity
    version: int
    label: str
    detail: str

    @property
    def colour(self) -> str:
        """Its fill."""
        return COLOURS[self.activity][self.version % 2]

    @property
    def ink(self) -> str:
        """Colour of text on it."""
        return "#ffffff" if self.version % 2 == 0 or self.activity == "update" else "#1c2430"


@dataclass(frozen=True)
class Row:
    """One lane. `busy` is the share of the chart's time it ran units."""

    label: str
    worker: str
    lane: Lane
    units: Sequence[TracedUnit]
    bubbles: Sequence[Bubble]
    busy: float


@dataclass(frozen=True)
class Chart:
    """A window of a run.

    Attributes:
        rows: lanes, by name of the worker.
        start_s, end_s: the window.
        boundaries: (time, version): rollouts use the version from then on.
        busy: share of the device lanes' time that units ran.
        idle: cause -> share of the device lanes' time.
    """

    rows: Sequence[Row]
    start_s: float
    end_s: float
    boundaries: Sequence[tuple[float, int]]
    busy: float
    idle: Mapping[Cause, float]

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return self.end_s - self.start_s


def chart(
    spans: Sequence[TracedUnit],
    names: Mapping[str, str],
    *,
    bubbles: Sequence[Bubble] = (),
    iterations: tuple[int, int] | None = None,
    lanes: Collection[Lane] = DEVICES,
) -> Chart:
    """Lay out a run.

    Args:
        spans: what ran.
        names: worker -> name to show; workers not named are shown as they are.
        bubbles: idle intervals of the same run; none: they stay white.
        iterations: first and last iteration to show; None: everything.
        lanes: which lanes get a row.

    Raises:
        ValueError: there is nothing to show in these iterations.
    """
    shown = [span for span in spans if iterations is None or iterations[0] <= _iteration(span) <= iterations[1]]
    if not shown:
        wanted = "the run" if iterations is None else f"iterations {iterations[0]} to {iterations[1]}"
        raise ValueError(f"there is no unit to show in {wanted}")
    start, end = min(span.start_s for span in shown), max(span.end_s for span in shown)
    length = max(end - start, 1e-12)
    units: dict[tuple[str, Lane], list[TracedUnit]] = defaultdict(list)
    idle: dict[tuple[str, Lane], list[Bubble]] = defaultdict(list)
    for bubble in bubbles:
        if bubble.lane in lanes and bubble.end_s > start and bubble.start_s < end:
            idle[bubble.worker, bubble.lane].append(bubble)
    for span in spans:
        if span.lane in lanes and span.end_s > start and span.start_s < end:
            units[span.worker, span.lane].append(span)
    rows = []

    def place(key: tuple[str, Lane]) -> tuple[object, bool]:
        return natural(names.get(key[0], key[0])), key[1] == "cpu"

    for worker, lane in sorted(units.keys() | idle.keys(), key=place):
        ran = sorted(units[worker, lane], key=lambda span: span.start_s)
        busy = sum(min(span.end_s, end) - max(span.start_s, start) for span in ran) / length
        label = names.get(worker, worker) + ("" if lane == "device" else " cpu")
        rows.append(Row(label, worker, lane, ran, idle[worker, lane], busy))
    devices = [row for row in rows if row.lane == "device"] or rows
    total = length * len(devices)
    causes = by_cause([b for row in devices for b in row.bubbles], (start, end))
    return Chart(
        rows=rows,
        start_s=start,
        end_s=end,
        boundaries=_boundaries(spans, start, end),
        busy=sum(row.busy for row in devices) / len(devices),
        idle={cause: causes[cause] / total for cause in CAUSES if causes[cause] > _VISIBLE * total},
    )


def bars_of(row: Row, resolution_s: float) -> list[Bar]:
    """Bars of a row. Consecutive units of one activity and version that are shorter than the resolution are merged."""
    bars: list[Bar] = []
    merged = 0
    for span in row.units:
        last = bars[-1] if bars else None
        alike = last is not None and (last.activity, last.version) == (span.activity, span.version)
        if last is not None and alike and span.seconds < resolution_s and span.start_s - last.end_s < resolution_s:
            merged += 1
            detail = f"{merged + 1} units: {ACTIVITY_WORDS[span.activity]}, version {span.version}"
            bars[-1] = Bar(last.start_s, span.end_s, last.activity, last.version, "", detail)
        else:
            merged = 0
            bars.append(Bar(span.start_s, span.end_s, span.activity, span.version, _short(span), _detail(span)))
    return bars


def activities_in(rows: Iterable[Row]) -> list[Activity]:
    """Activities that occur, in the order of the legend."""
    present = {span.activity for row in rows for span in row.units}
    return [activity for activity in COLOURS if activity in present]


def natural(text: str) -> list[tuple[bool, float, str]]:
    """Sort key that puts worker 2 before worker 10, and rate 0.35 before rate 0.6."""
    parts = re.split(r"(\d+(?:\.\d+)?)", text)
    return [(not part[0].isdigit(), float(part) if part[0].isdigit() else 0.0, part) for part in parts if part]


def _iteration(span: TracedUnit) -> int:
    return span.version if isinstance(span.unit, UpdateUnit) else span.unit.micro_batch.iteration


def _boundaries(spans: Sequence[TracedUnit], start: float, end: float) -> list[tuple[float, int]]:
    """Version v + 1 exists from the end of the last optimiser step of iteration v."""
    stepped: dict[int, float] = {}
    for span in spans:
        if isinstance(span.unit, UpdateUnit):
            stepped[span.version] = max(stepped.get(span.version, 0.0), span.end_s)
    return [(at, version + 1) for version, at in sorted(stepped.items()) if start <= at <= end]


def _short(span: TracedUnit) -> str:
    """What fits into a bar: the micro-batch, and the timestep if the unit is one of many of its trajectory."""
    match span.unit:
        case UpdateUnit(theta):
            return f"θ{theta}"
        case RolloutUnit(micro_batch, first, last) if last == first + 1:
            return f"m{micro_batch.index} t{first}"
        case unit:
            return f"m{unit.micro_batch.index}"


def _detail(span: TracedUnit) -> str:
    return f"{span.unit.label}, version {span.version}, θ {span.theta}: {span.start_s:.3f} to {span.end_s:.3f} s"
