"""Writes a run to MLflow as it goes: metrics per iteration, evaluations, sample grids, the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from digenrl.guard.watch import Verdict
from digenrl.rewards.base import PromptRecord, Scored, values_by_reward
from digenrl.scheduling.bubbles import Cause
from digenrl.statistics import mean_interval
from flows.history import History, IterationRow
from flows.pictures import montage
from storage.runs import RunDirectory
from storage.tracker import Tracker
from workers.listener import Evaluation, IterationReport, Listener

#: MLflow's tag for what the guard thinks of the run.
GUARD_TAG = "digenrl.guard"

#: Iterations whose metrics may still have been on their way when a process was killed.
UNDELIVERED = 50


class Tracking(Listener):
    """Listens and logs. Nothing here waits for MLflow.

    Args:
        tracker: an open MLflow run; None writes pictures to the run's directory only.
        directory: of the run.
        held_out: prompts in evaluation order, for the captions of the grids.
        degraded: seconds that each service has been without an answer so far, by its name.
    """

    def __init__(
        self,
        tracker: Tracker | None,
        directory: RunDirectory,
        held_out: Sequence[PromptRecord],
        degraded: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._tracker = tracker
        self._directory = directory
        self._held_out = held_out
        self._degraded = degraded
        self._iterations = 0

    def catch_up(self, history: History, *, whole: bool = False) -> None:
        """Log the end of the history again: a killed attempt may have saved more than it delivered.

        What MLflow has already is left out.

        Args:
            history: as the checkpoint has it.
            whole: log all of it, into an MLflow run that has none of it.
        """
        if self._tracker is None:
            return
        for row in history.rows if whole else history.rows[-UNDELIVERED:]:
            self._tracker.log_iteration(row.iteration, row_metrics(row))
        evaluations = sorted(history.evaluations.items())
        for version, values in evaluations if whole else evaluations[-1:]:
            self._tracker.log_iteration(version, evaluation_metrics(list(values.values())))

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._iterations = report.iteration + 1
        if self._tracker is not None:
            metrics = iteration_metrics(report) | degraded_metrics(self._degraded())
            self._tracker.log_iteration(report.iteration, metrics)

    def finish(self) -> None:
        """Log what may have changed after the last iteration."""
        if self._tracker is not None and (metrics := degraded_metrics(self._degraded())):
            self._tracker.log_iteration(self._iterations, metrics)

    def bubbles_found(self, iteration: int, shares: Mapping[Cause, float]) -> None:
        """It is known why devices stood still in an iteration: cause -> share of their time."""
        if self._tracker is not None:
            metrics = {f"bubble/{cause.replace(' ', '_')}": share for cause, share in shares.items()}
            self._tracker.log_iteration(iteration, metrics)

    def search_found(self, iteration: int, share: float) -> None:
        """It is known which share of an iteration's time trainer_assist=search took to decide."""
        if self._tracker is not None:
            self._tracker.log_iteration(iteration, {"schedule/search_share": share})

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        values = {s.group: score.value for s, score in evaluation.scores.items() if isinstance(score, Scored)}
        if evaluation.previews:
            captions = {i: self._caption(i, values.get(i)) for i in evaluation.previews}
            grid = montage(evaluation.previews, captions)
            grid.save(self._directory.picture_path("held-out", evaluation.version))
            if self._tracker is not None:
                self._tracker.log_image(f"samples/held-out-{evaluation.version:06d}.png", grid, evaluation.version)
        if self._tracker is not None:
            parts = values_by_reward(evaluation.scores.values())
            metrics = {f"eval/{name}/mean": float(np.mean(alone)) for name, alone in parts.items()}
            self._tracker.log_iteration(evaluation.version, metrics | evaluation_metrics(list(values.values())))

    def judged(self, verdict: Verdict) -> None:
        """The guard judged an evaluation."""
        if self._tracker is not None:
            self._tracker.log_iteration(verdict.version, verdict.metrics())
            self._tracker.set_tag(GUARD_TAG, verdict.reason or verdict.level)

    def _caption(self, index: int, reward: float | None) -> str:
        record = self._held_out[index]
        text = record.fields.get("target", record.text)
        return f"{text} {reward:.2f}" if reward is not None else f"{text} failed"


def iteration_metrics(report: IterationReport) -> dict[str, float]:
    """What MLflow shows of one iteration."""
    metrics = row_metrics(IterationRow.of(report)) | {
        "samples/failed": float(len(report.scores) - len(report.rewards)),
        "samples/failed_share": (len(report.scores) - len(report.rewards)) / max(len(report.scores), 1),
        "update/skipped": float(report.skipped_updates),
        "update/pairs_trained": float(report.trained),
        "update/pairs_excluded": float(sum(report.excluded.values())),
    }
    metrics |= {f"staleness/{versions}": float(pairs) for versions, pairs in report.staleness.items()}
    for prefix, values in [("reward", report.rewards), *((f"reward/{name}", v) for name, v in report.parts.items())]:
        if values:
            metrics[f"{prefix}/std"] = float(np.std(values))
            metrics |= {f"{prefix}/p{q:02d}": float(np.percentile(values, q)) for q in (5, 25, 50, 75, 95)}
    metrics |= {f"logp_gap/{name.replace(' ', '_')}": gap for name, gap in report.logp_gap.items()}
    trained = {name: value for name, value in report.metrics.items() if not name.startswith("logp_")}
    return metrics | {f"train/{name}": value for name, value in trained.items()}


def degraded_metrics(seconds: Mapping[str, float]) -> dict[str, float]:
    """Of the services that have been without an answer."""
    return {f"degraded_seconds/{service}": value for service, value in seconds.items() if value > 0}


def row_metrics(row: IterationRow) -> dict[str, float]:
    """The part of it that the history keeps."""
    metrics = {
        "samples/scored": float(row.samples),
        "samples/per_second": row.samples / row.seconds,
        "iteration/seconds": row.seconds,
    }
    if row.samples:
        metrics |= {"reward/mean": row.reward_mean, "reward/std": row.reward_std}
    metrics |= {f"reward/{name}/mean": mean for name, mean in row.parts.items()}
    return metrics | {f"utilisation/{name.replace(' ', '_')}": share for name, share in row.busy.items()}


def evaluation_metrics(rewards: Sequence[float]) -> dict[str, float]:
    """What MLflow shows of one evaluation; nothing if no sample was scored."""
    if not rewards:
        return {}
    low, high = mean_interval(rewards)
    return {"eval/reward_mean": float(np.mean(rewards)), "eval/reward_low": low, "eval/reward_high": high}
