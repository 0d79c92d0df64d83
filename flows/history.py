"""What a run has shown so far: reward per iteration and evaluations. Travels in the checkpoint."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from digenrl.rewards.base import Scored
from workers.listener import Evaluation, IterationReport, Listener


@dataclass(frozen=True)
class IterationRow:
    """One iteration in the history.

    Attributes:
        iteration: 0-based.
        reward_mean: over its scored samples.
        reward_std: likewise.
        samples: scored samples.
        seconds: wall time.
        busy: share of the wall time each worker computed, by worker name.
        parts: mean of each reward alone, by name.
    """

    iteration: int
    reward_mean: float
    reward_std: float
    samples: int
    seconds: float
    busy: dict[str, float]
    parts: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, report: IterationReport) -> IterationRow:
        """What the history keeps of a report."""
        rewards = np.asarray(report.rewards, dtype=np.float64)
        return cls(
            iteration=report.iteration,
            reward_mean=float(rewards.mean()) if len(rewards) else 0.0,
            reward_std=float(rewards.std()) if len(rewards) else 0.0,
            samples=len(rewards),
            seconds=report.seconds,
            busy=report.busy,
            parts={name: float(np.mean(values)) for name, values in report.parts.items()},
        )


@dataclass
class History(Listener):
    """Rows and evaluations in order.

    Attributes:
        rows: closed iterations.
        evaluations: `evaluations[version][prompt index]` is the reward of a held-out prompt.
        earlier_s: wall time of the attempts before this one.
        began: when this attempt began, by `time.monotonic`.
    """

    rows: list[IterationRow] = field(default_factory=list)
    evaluations: dict[int, dict[int, float]] = field(default_factory=dict)
    earlier_s: float = field(default=0.0, compare=False)
    began: float = field(default_factory=time.monotonic, compare=False)

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self.rows.append(IterationRow.of(report))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        self.evaluations[evaluation.version] = {
            sample.group: score.value for sample, score in evaluation.scores.items() if isinstance(score, Scored)
        }

    @property
    def iterations(self) -> int:
        """Iterations that are complete."""
        return self.rows[-1].iteration + 1 if self.rows else 0

    @property
    def seconds(self) -> float:
        """Wall time of all attempts so far."""
        return self.earlier_s + time.monotonic() - self.began

    @property
    def samples_per_second(self) -> float:
        """Training samples over the wall time of the iterations."""
        seconds = sum(row.seconds for row in self.rows)
        return sum(row.samples for row in self.rows) / seconds if seconds else 0.0

    @property
    def utilisation(self) -> dict[str, float]:
        """Share of the iterations' wall time each worker computed on its device."""
        total = sum(row.seconds for row in self.rows)
        names = sorted({name for row in self.rows for name in row.busy})
        return {n: sum(row.busy.get(n, 0.0) * row.seconds for row in self.rows) / total for n in names} if total else {}

    def until(self, iterations: int) -> History:
        """What was known when so many iterations were complete."""
        return replace(
            self,
            rows=[row for row in self.rows if row.iteration < iterations],
            evaluations={version: values for version, values in self.evaluations.items() if version <= iterations},
        )

    def to_state(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "rows": [asdict(row) for row in self.rows],
            "evaluations": {str(v): {str(i): r for i, r in e.items()} for v, e in self.evaluations.items()},
            "seconds": round(self.seconds, 3),
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> History:
        """Inverse of to_state; the new attempt begins now."""
        evaluations = {int(v): {int(i): r for i, r in e.items()} for v, e in state["evaluations"].items()}
        return cls([IterationRow(**row) for row in state["rows"]], evaluations, state.get("seconds", 0.0))
