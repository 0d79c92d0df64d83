"""Writes a run to MLflow as it goes: metrics per iteration, evaluations, sample grids, the adapter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from storage.tracker import Tracker

from digenrl.rewards.base import PromptRecord, Scored
from flows.pictures import montage
from flows.statistics import mean_interval
from storage.runs import RunDirectory
from workers.listener import Evaluation, IterationReport, Listener


class Tracking(Listener):
    """Listens and logs. Nothing here waits for MLflow.

    Args:
        tracker: an open MLflow run; None writes pictures to the run's directory only.
        directory: of the run.
        held_out: prompts in evaluation order, for the captions of the grids.
    """

    def __init__(self, tracker: Tracker | None, directory: RunDirectory, held_out: Sequence[PromptRecord]) -> None:
        self._tracker = tracker
        self._directory = directory
        self._held_out = held_out

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        if self._tracker is not None:
            self._tracker.log_iteration(report.iteration, iteration_metrics(report))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        values = {s.group: score.value for s, score in evaluation.scores.items() if isinstance(score, Scored)}
        if evaluation.previews:
            captions = {i: self._caption(i, values.get(i)) for i in evaluation.previews}
            grid = montage(evaluation.previews, captions)
            grid.save(self._directory.picture_path("held-out", evaluation.version))
            if self._tracker is not None:
                self._tracker.log_image(f"samples/held-out-{evaluation.version:06d}.png", grid, evaluation.version)
        if self._tracker is not None and values:
            low, high = mean_interval(list(values.values()))
            mean = float(np.mean(list(values.values())))
            metrics = {"eval/reward_mean": mean, "eval/reward_low": low, "eval/reward_high": high}
            self._tracker.log_iteration(evaluation.version, metrics)

    def _caption(self, index: int, reward: float | None) -> str:
        record = self._held_out[index]
        text = record.fields.get("target", record.text)
        return f"{text} {reward:.2f}" if reward is not None else f"{text} failed"


def iteration_metrics(report: IterationReport) -> dict[str, float]:
    """What MLflow shows of one iteration."""
    rewards = np.asarray(report.rewards, dtype=np.float64)
    metrics = {
        "reward/mean": float(rewards.mean()) if len(rewards) else float("nan"),
        "reward/std": float(rewards.std()) if len(rewards) else float("nan"),
        "samples/scored": float(len(rewards)),
        "samples/failed": float(len(report.scores) - len(rewards)),
        "samples/per_second": len(rewards) / report.seconds,
        "iteration/seconds": report.seconds,
        "update/skipped": float(report.skipped_updates),
        "update/pairs_trained": float(report.trained),
        "update/pairs_excluded": float(sum(report.excluded.values())),
    }
    if len(rewards):
        for q in (5, 25, 50, 75, 95):
            metrics[f"reward/p{q:02d}"] = float(np.percentile(rewards, q))
    metrics |= {f"train/{name}": value for name, value in report.metrics.items()}
    metrics |= {f"utilisation/{name.replace(' ', '_')}": share for name, share in report.busy.items()}
    return metrics
