"""Why a lane stood still: idle intervals by cause.

    bubbles       idle intervals of every lane, each with one cause
    by_cause      their sum
    Facts         what besides the spans explains them

The rule. An idle interval [a, b) of a lane ends because a unit X starts at b, or because the run, or the worker's
stay, ends. An instant t in it has the first cause of this list that applies:

    draining        the worker was told to leave at or before t
    end             no unit follows on this lane
    samples         X trains or updates: some sample of X's groups is not generated at t (without GAP: of the iteration)
                    X scores: its micro-batch is not generated at t
    reward          some sample of X's groups is not scored at t
    std scope       some sample of the std scope of X's groups is not scored at t (not with scope `group`)
    weights         the adapter X runs under is not made, or known not to be committed or installed here, at t;
                    X is an update: any other time, which is the tail of other trainers and the merge
    samples         X's trajectory is known not to have arrived here at t
    orchestration   none of these: X could have run. Role switch, gathering, dispatch, or the scheduler's choice

X's groups are the group of its micro-batch; for an update all groups of that optimiser step. A train unit that began
before its group was scored was streamed: it waited for its own micro-batch only. A sample counts as generated when the
last rollout unit that ended at or before b ended, so one that was lost and made again counts when it was made again;
scores are never lost, so the first one counts.

So idle intervals are cut at a few instants and nothing is counted twice: for each lane, busy time and bubbles add up
to the time the worker was there. Spans of one lane that overlap (clocks of different machines) count once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from digenrl.identity import MicroBatchId
from digenrl.scheduling.messages import (
    Committed,
    Event,
    TrajectoryRef,
    Transferred,
    VersionInstalled,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
)
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.trace import TracedUnit
from digenrl.scheduling.units import Lane, RolloutUnit, ScoreUnit, TrainUnit, UpdateUnit

Cause = Literal["samples", "reward", "std scope", "weights", "orchestration", "draining", "end"]

CAUSES: tuple[Cause, ...] = ("samples", "reward", "std scope", "weights", "orchestration", "draining", "end")

_NEVER = math.inf
_ALWAYS = -math.inf


@dataclass(frozen=True)
class Bubble:
    """A stretch of a lane without a unit."""

    worker: str
    lane: Lane
    start_s: float
    end_s: float
    cause: Cause

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Facts:
    """What spans do not tell. Everything but the shape may be left out: then it explains nothing.

    Attributes:
        shape: the run's.
        std_scope: over which samples the standard deviation is taken.
        gap: training may begin with the first complete group; False: when the whole iteration is generated.
        since_s: when the timeline begins.
        until_s: when it ends; None: with the last span.
        installed: (worker, theta) -> when the adapter arrived there first.
        arrived: (micro-batch, worker) -> when the trajectory was copied there.
        committed: theta -> when the step that made it was final.
        draining: worker -> when it was told to leave.
        joined: worker -> when it came. Workers named here have a device lane even if nothing ran on it.
        left: worker -> when it was gone.
    """

    shape: RunShape
    std_scope: StdScope = "group"
    gap: bool = True
    since_s: float = 0.0
    until_s: float | None = None
    installed: Mapping[tuple[str, int], float] = field(default_factory=dict)
    arrived: Mapping[tuple[MicroBatchId, str], float] = field(default_factory=dict)
    committed: Mapping[int, float] = field(default_factory=dict)
    draining: Mapping[str, float] = field(default_factory=dict)
    joined: Mapping[str, float] = field(default_factory=dict)
    left: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_log(
        cls, shape: RunShape, std_scope: StdScope, log: Iterable[tuple[float, Event]], *, gap: bool = True
    ) -> Facts:
        """From a log of events: (time, event), in order."""
        installed: dict[tuple[str, int], float] = {}
        arrived: dict[tuple[MicroBatchId, str], float] = {}
        committed: dict[int, float] = {}
        draining: dict[str, float] = {}
        joined: dict[str, float] = {}
        left: dict[str, float] = {}
        now = 0.0
        for now, event in log:
            match event:
                case VersionInstalled(worker, theta):
                    installed.setdefault((worker, theta), now)
                case Transferred(TrajectoryRef(micro_batch), target):
                    arrived[micro_batch, target] = now
                case Committed(theta):
                    committed[theta] = now
                case WorkerDraining(worker):
                    draining.setdefault(worker, now)
                case WorkerJoined(worker):
                    joined[worker] = now
                case WorkerLost(worker):
                    left[worker] = now
        return cls(shape, std_scope, gap, 0.0, now, installed, arrived, committed, draining, joined, left)


def bubbles(spans: Sequence[TracedUnit], facts: Facts) -> list[Bubble]:
    """Idle intervals of all lanes, by worker, lane and time.

    Lanes are those that have a span, and the device lanes of all workers that are known to have joined.
    """
    lanes: dict[tuple[str, Lane], list[TracedUnit]] = defaultdict(list)
    for name in facts.joined:
        lanes[name, "device"] = []
    for span in spans:
        lanes[span.worker, span.lane].append(span)
    history = _History(spans, facts)
    end = max([s.end_s for s in spans], default=facts.since_s) if facts.until_s is None else facts.until_s
    found: list[Bubble] = []
    for (worker, lane), units in sorted(lanes.items()):
        since = max(facts.joined.get(worker, facts.since_s), facts.since_s)
        until = min(facts.left.get(worker, end), end)
        cursor = since
        for span in sorted(units, key=lambda s: (s.start_s, s.end_s)):
            if span.start_s > cursor:
                for a, b, cause in history.explain(worker, span, cursor, min(span.start_s, until)):
                    found.append(Bubble(worker, lane, a, b, cause))
            cursor = max(cursor, span.end_s)
        for a, b, cause in history.explain(worker, None, cursor, until):
            found.append(Bubble(worker, lane, a, b, cause))
    return found


def by_cause(found: Iterable[Bubble], window: tuple[float, float] = (_ALWAYS, _NEVER)) -> dict[Cause, float]:
    """Seconds of each cause, over all given lanes, within a window of time. Every cause is named."""
    total: dict[Cause, list[float]] = {cause: [] for cause in CAUSES}
    for bubble in found:
        seconds = min(bubble.end_s, window[1]) - max(bubble.start_s, window[0])
        if seconds > 0:
            total[bubble.cause].append(seconds)
    return {cause: math.fsum(parts) for cause, parts in total.items()}


class _History:
    """When what came to be."""

    def __init__(self, spans: Sequence[TracedUnit], facts: Facts) -> None:
        self._facts = facts
        self._shape = facts.shape
        self._generated: dict[MicroBatchId, list[float]] = defaultdict(list)
        self._scored: dict[MicroBatchId, float] = {}
        self._made: dict[int, float] = {}
        # Readiness of whole scopes, asked for many times: groups of (iteration, range) at one time b.
        self._scopes: dict[tuple[int, range], float] = {}
        # When the last sample of such a range was generated for the last time.
        self._finals: dict[tuple[int, range], float] = {}
        for span in spans:
            match span.unit:
                case RolloutUnit(micro_batch, _, last) if last == self._steps(micro_batch):
                    self._generated[micro_batch].append(span.end_s)
                case ScoreUnit(micro_batch):
                    self._scored[micro_batch] = min(self._scored.get(micro_batch, _NEVER), span.end_s)
                case UpdateUnit(theta):
                    self._made[theta] = min(self._made.get(theta, _NEVER), span.end_s)
        for times in self._generated.values():
            times.sort()

    def explain(self, worker: str, after: TracedUnit | None, a: float, b: float) -> list[tuple[float, float, Cause]]:
        """Cut [a, b), which ends with the start of `after`, by cause."""
        if b <= a:
            return []
        told = max(min(self._facts.draining.get(worker, _NEVER), b), a)
        cuts = [*self._causes(worker, after, b), (_NEVER, self._remainder(after))]
        pieces: list[tuple[float, float, Cause]] = []
        cursor = a
        for ready, cause in cuts:
            edge = min(ready, told)
            if edge > cursor:
                pieces.append((cursor, edge, cause))
                cursor = edge
        if b > told:
            pieces.append((told, b, "draining"))
        return pieces

    def _remainder(self, after: TracedUnit | None) -> Cause:
        if after is None:
            return "end"
        return "weights" if isinstance(after.unit, UpdateUnit) else "orchestration"

    def _causes(self, worker: str, after: TracedUnit | None, b: float) -> list[tuple[float, Cause]]:
        """(until when, cause), in the order of the rule."""
        if after is None:
            return []
        match after.unit:
            case RolloutUnit():
                return [(self._theta(after.theta, worker), "weights")]
            case ScoreUnit(micro_batch):
                here = self._facts.arrived.get((micro_batch, worker), _ALWAYS)
                return [(max(self._generation(micro_batch, b), here), "samples")]
            case TrainUnit(micro_batch, _):
                group = self._shape.group_of(micro_batch)
                groups = range(group, group + 1)
                if self._all_scored(micro_batch.iteration, groups) > after.start_s:
                    own = self._scored.get(micro_batch, _ALWAYS)
                    causes: list[tuple[float, Cause]] = [(self._generation(micro_batch, b), "samples"), (own, "reward")]
                else:
                    causes = self._data(micro_batch.iteration, groups, b)
                causes.append((self._theta(after.theta, worker), "weights"))
                return [*causes, (self._facts.arrived.get((micro_batch, worker), _ALWAYS), "samples")]
            case UpdateUnit(theta):
                return self._data(*self._shape.groups_of_update(theta), b)

    def _data(self, iteration: int, groups: range, b: float) -> list[tuple[float, Cause]]:
        awaited = groups if self._facts.gap else range(self._shape.groups)
        causes: list[tuple[float, Cause]] = [
            (self._all_generated(iteration, awaited, b), "samples"),
            (self._all_scored(iteration, groups), "reward"),
        ]
        if self._facts.std_scope != "group":
            causes.append((self._all_scored(iteration, self._scope(groups)), "std scope"))
        return causes

    def _scope(self, groups: range) -> range:
        if self._facts.std_scope == "iteration":
            return range(self._shape.groups)
        size = self._shape.groups_per_update
        return range(groups.start // size * size, -(-groups.stop // size) * size)

    def _batches(self, iteration: int, groups: range) -> list[MicroBatchId]:
        per_group = self._shape.micro_batches_per_group
        indices = range(groups.start * per_group, groups.stop * per_group)
        return [MicroBatchId("train", iteration, i) for i in indices]

    def _all_scored(self, iteration: int, groups: range) -> float:
        key = (iteration, groups)
        if key not in self._scopes:
            self._scopes[key] = max(self._scored.get(batch, _ALWAYS) for batch in self._batches(iteration, groups))
        return self._scopes[key]

    def _all_generated(self, iteration: int, groups: range, b: float) -> float:
        key = (iteration, groups)
        if key not in self._finals:
            batches = self._batches(iteration, groups)
            self._finals[key] = max(self._generation(batch, _NEVER) for batch in batches)
        if self._finals[key] <= b:
            return self._finals[key]
        # Something was lost, and made again after b.
        return max(self._generation(batch, b) for batch in self._batches(iteration, groups))

    def _generation(self, micro_batch: MicroBatchId, b: float) -> float:
        times = self._generated.get(micro_batch, [])
        place = bisect_right(times, b)
        return times[place - 1] if place else _ALWAYS

    def _theta(self, theta: int, worker: str) -> float:
        made = max(self._made.get(theta, _ALWAYS), self._facts.committed.get(theta, _ALWAYS))
        return max(made, self._facts.installed.get((worker, theta), _ALWAYS))

    def _steps(self, micro_batch: MicroBatchId) -> int:
        return self._shape.num_steps if micro_batch.phase == "train" else self._shape.eval_num_steps
