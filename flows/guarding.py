"""Lets the guard hear a run, tells what it thinks, and ends the run when it says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from digenrl.config import RunConfig
from digenrl.guard.evidence import IterationFacts, Sighting
from digenrl.guard.watch import Guard, Verdict
from flows.pictures import side_by_side
from storage.runs import RunDirectory
from workers.listener import Evaluation, IterationReport, Listener

logger = logging.getLogger(__name__)


def guard_of(config: RunConfig, seen: Mapping[str, Any] | None) -> Guard | None:
    """The guard of a run; None if nothing is watched.

    Args:
        config: of the run.
        seen: what it knew at a checkpoint; None: nothing yet.
    """
    if config.guard.mode == "off":
        return None
    guard = Guard(config)
    if seen is not None:
        guard.restore(seen)
    return guard


class Guarding(Listener):
    """Judges an evaluation once the iterations that made its weights are complete.

    Args:
        config: of the run.
        guard: of the run.
        complete: iterations that are complete.
        tell: each hears every verdict.
        stop: ends the run.
    """

    def __init__(
        self,
        config: RunConfig,
        guard: Guard,
        complete: int,
        tell: tuple[Callable[[Verdict], None], ...],
        stop: Callable[[], None],
    ) -> None:
        self._tolerance = config.algorithm.zero_variance_tolerance
        self._guard = guard
        self._complete = complete
        self._tell = tell
        self._stop = stop
        self._waiting: Evaluation | None = None

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._guard.iteration(IterationFacts.of(report.iteration, report.scores, report.metrics, self._tolerance))
        self._complete = report.iteration + 1
        self._judge()

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        self._waiting = evaluation
        self._judge()

    def _judge(self) -> None:
        evaluation = self._waiting
        if evaluation is None or self._complete < evaluation.version:
            return
        self._waiting = None
        sighting = Sighting.of(evaluation.version, evaluation.scores, evaluation.inspection)
        verdict = self._guard.evaluation(sighting)
        logger.info(
            "guard after %d iterations: %s %s", verdict.version, verdict.level, verdict.reason or verdict.metrics()
        )
        for tell in self._tell:
            tell(verdict)
        if verdict.stops:
            self._stop()


def draw_stop(directory: RunDirectory, verdict: Verdict) -> Path | None:
    """Write before | after of a run that the guard stopped; None if it has no pictures of both."""
    grids = [directory.picture_path("held-out", version) for version in (0, verdict.version)]
    if not all(grid.is_file() for grid in grids):
        return None
    path = directory.path / "pictures" / "guard-stop.png"
    titles = ["before training", f"stopped after {verdict.version} iterations, same noise"]
    side_by_side([Image.open(grid) for grid in grids], titles).save(path)
    return path
