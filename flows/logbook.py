"""Keeps the course of a run in its log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from digenrl.rewards.base import Scored, values_by_reward
from workers.listener import Evaluation, IterationReport, Listener, TrainerState

logger = logging.getLogger(__name__)


class Logbook(Listener):
    """One line per event."""

    def published(self, version: int, state: TrainerState) -> None:
        """See Listener."""
        logger.info("version %d is published: theta %d, adapter %s", version, state.theta, state.adapter_hash[:12])

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        rewards = report.rewards or [float("nan")]
        logger.info(
            "iteration %d: %.2f s, reward %.4f ± %.4f%s, %d of %d samples scored, %d pairs trained, excluded %s, "
            "%d updates skipped",
            *(report.iteration, report.seconds, np.mean(rewards), np.std(rewards), _alone(report.parts)),
            *(len(report.rewards), len(report.scores), report.trained, report.excluded, report.skipped_updates),
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        values = [score.value for score in evaluation.scores.values() if isinstance(score, Scored)]
        logger.info(
            "version %d evaluated: %d of %d samples scored, held-out reward %.4f%s",
            *(evaluation.version, len(values), len(evaluation.scores), np.mean(values or [float("nan")])),
            _alone(values_by_reward(evaluation.scores.values())),
        )

    def fleet_changed(self, message: str) -> None:
        """See Listener."""
        logger.info("%s", message)


def _alone(parts: Mapping[str, Sequence[float]]) -> str:
    """The mean of each reward where there are several: ` (ocr 0.5000, style 0.2000)`."""
    means = ", ".join(f"{name} {np.mean(values):.4f}" for name, values in parts.items())
    return f" ({means})" if len(parts) > 1 else ""
