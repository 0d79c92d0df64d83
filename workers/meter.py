"""Adds up what units report into one report per iteration, and keeps the spans for the timeline.

A unit that was done again after a loss counts once, and sums are taken in the order of the units: metrics do not depend
on where, when or how often work was done.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from digenrl.contributions import UnitMetrics
from digenrl.guard.inspection import Inspection
from digenrl.identity import SampleId
from digenrl.rewards.base import Score, Scored
from digenrl.scheduling.messages import CloseIteration, Run, ScoresDone
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from workers.listener import IterationReport
from workers.receipts import Receipt


@dataclass(frozen=True)
class Span:
    """One unit on one worker.

    Attributes:
        unit: what ran.
        worker: incarnation.
        theta: adapter it ran under.
        started_at: Unix time in seconds.
        seconds: duration.
    """

    unit: Unit
    worker: str
    theta: int
    started_at: float
    seconds: float


class Meter:
    """Sums over the units that ended since the last closed iteration."""

    def __init__(self) -> None:
        """The clock of the first iteration starts with the first unit."""
        self._opened: float | None = None
        self._training: dict[int, dict[TrainUnit, tuple[UnitMetrics, str]]] = defaultdict(dict)
        self._grad_norms: dict[int, float] = {}
        self._scores: dict[int, dict[SampleId, Score]] = defaultdict(dict)
        self._prints: dict[int, dict[str, str]] = defaultdict(dict)
        self._previews: dict[int, dict[int, bytes]] = defaultdict(dict)
        self._inspections: dict[tuple[str, int], dict[int, Inspection]] = defaultdict(dict)
        self._busy: dict[str, float] = defaultdict(float)
        self.workers: set[str] = set()
        self.spans: list[Span] = []

    def begin(self, now: float) -> None:
        """A unit is handed out at `now` (monotonic seconds)."""
        if self._opened is None:
            self._opened = now

    def add(self, run: Run, receipt: Receipt) -> None:
        """A unit ended."""
        unit = run.unit
        self.workers.add(run.worker)
        self.spans.append(Span(unit, run.worker, run.theta, receipt.started_at, receipt.seconds))
        if unit.lane == "device":
            self._busy[run.worker] += receipt.seconds
        if isinstance(unit, UpdateUnit):
            self._grad_norms[unit.theta] = receipt.grad_norm or 0.0
            return
        micro_batch = unit.micro_batch
        if isinstance(unit, ScoreUnit):
            self._inspections[micro_batch.phase, micro_batch.iteration][micro_batch.index] = receipt.inspection
        if micro_batch.phase == "eval":
            self._previews[micro_batch.iteration].update(receipt.previews)
            return
        if isinstance(unit, TrainUnit):
            self._training[micro_batch.iteration][unit] = receipt.training, run.worker
        if isinstance(receipt.outcome, ScoresDone):
            self._keep_scores(micro_batch.iteration, receipt.outcome.scores)
        if isinstance(unit, RolloutUnit) and receipt.fingerprint:
            self._prints[micro_batch.iteration][micro_batch.label] = receipt.fingerprint

    def _keep_scores(self, iteration: int, found: Mapping[SampleId, Score]) -> None:
        """Of a sample that is drawn again, only the last draw counts."""
        scores = self._scores[iteration]
        for sample, score in found.items():
            for draw in range(sample.draw):
                scores.pop(replace(sample, draw=draw), None)
            scores[sample] = score

    def take_previews(self, version: int) -> dict[int, bytes]:
        """Pictures of the evaluation of `version`, by prompt index; forgotten afterwards."""
        return dict(sorted(self._previews.pop(version, {}).items()))

    def take_inspection(self, version: int) -> Inspection:
        """What the guard asked for in the evaluation of `version`; forgotten afterwards."""
        return self._taken_inspection("eval", version)

    def _taken_inspection(self, phase: str, iteration: int) -> Inspection:
        found = self._inspections.pop((phase, iteration), {})
        return sum((found[index] for index in sorted(found)), Inspection())

    def close(self, closed: CloseIteration, names: Mapping[str, str], now: float) -> IterationReport:
        """The report of an iteration; its sums are forgotten afterwards.

        Args:
            closed: the scheduler's command.
            names: worker names by incarnation.
            now: monotonic seconds.
        """
        iteration, seconds = closed.iteration, now - (self._opened if self._opened is not None else now)
        scores = dict(sorted(self._scores.pop(iteration, {}).items()))
        busy: dict[str, float] = defaultdict(float)
        for worker, busy_s in self._busy.items():
            busy[names[worker]] += busy_s
        training = self._training.pop(iteration, {})
        trained = sum((training[unit][0] for unit in sorted(training)), UnitMetrics())
        metrics = trained.means()
        if self._grad_norms:
            metrics["grad_norm"] = sum(self._grad_norms[t] for t in sorted(self._grad_norms)) / len(self._grad_norms)
        metrics |= self._taken_inspection("train", iteration).metrics()
        self._opened = now
        self._busy.clear()
        self._grad_norms.clear()
        return IterationReport(
            iteration=iteration,
            seconds=seconds,
            rewards=[score.value for score in scores.values() if isinstance(score, Scored)],
            scores=scores,
            trained=closed.trained,
            excluded=dict(Counter(closed.excluded.values())),
            skipped_updates=closed.skipped_updates,
            metrics=metrics,
            logp_gap=_gaps(trained, training.values(), names),
            busy={name: min(busy[name] / seconds, 1.0) for name in sorted(set(names.values()))},
            staleness=trained.staleness,
            fingerprints=dict(sorted(self._prints.pop(iteration, {}).items())),
        )


def _gaps(
    trained: UnitMetrics, units: Collection[tuple[UnitMetrics, str]], names: Mapping[str, str]
) -> dict[str, float]:
    """|log p at training - log p at rollout|: mean and largest, and the largest of each timestep and worker."""
    if not trained.pairs or trained.forward:
        return {}
    found = {"mean": trained.logp_gap / trained.pairs, "max": trained.logp_gap_max}
    found |= {f"t={step}": gap for step, gap in sorted(trained.logp_gaps.items())}
    if trained.probed:
        found["floor"] = trained.logp_floor_max
    for name in sorted({names[worker] for _, worker in units}):
        found[name] = max(metrics.logp_gap_max for metrics, worker in units if names[worker] == name)
    return found
