"""The live display of a run, and one line per event where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from digenrl.rewards.base import Scored
from workers.listener import Dispatched, Evaluation, IterationReport, Listener

_BLOCKS = " ▁▂▃▄▅▆▇█"


class Progress(Listener):
    """Shows how a run stands. Use as a context manager.

    Args:
        run_name: shown in front.
        iterations: of the whole run.
        console: where to; a live display if it is a terminal, otherwise a line now and then.
    """

    def __init__(self, run_name: str, iterations: int, console: Console) -> None:
        self._run_name = run_name
        self._iterations = iterations
        self._console = console
        self._phase = "starting"
        self._started = time.monotonic()
        self._reports: list[IterationReport] = []
        self._held_out: list[tuple[int, float]] = []
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Say what is going on before the first iteration and after the last."""
        self._phase = text
        self._line(text)

    def dispatched(self, event: Dispatched) -> None:
        """See Listener."""
        if not self._reports:
            self._phase = "first iteration"

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._phase = "training"
        self._reports.append(report)
        done = report.iteration + 1
        if done % max(self._iterations // 20, 1) == 0 or done == self._iterations:
            self._line(self._status(report))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        values = [score.value for score in evaluation.scores.values() if isinstance(score, Scored)]
        if values:
            self._held_out.append((evaluation.version, float(np.mean(values))))
            self._line(f"held-out reward after {evaluation.version} iterations: {self._held_out[-1][1]:.3f}")

    def fleet_changed(self, message: str) -> None:
        """See Listener."""
        if self._console.is_terminal:
            self._live.console.print(Text(message, style="dim"))
        else:
            self._line(message)

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"[{time.monotonic() - self._started:6.1f} s] {text}", markup=False, highlight=False)

    def _status(self, report: IterationReport) -> str:
        rewards = np.asarray(report.rewards or [np.nan])
        recent = self._reports[-5:]
        rate = sum(len(r.rewards) for r in recent) / sum(r.seconds for r in recent)
        return (
            f"iteration {report.iteration + 1}/{self._iterations}  reward {rewards.mean():.3f} ± {rewards.std():.3f}  "
            f"{rate:.0f} samples/s  ETA {_clock(self._remaining_s())}"
        )

    def _remaining_s(self) -> float:
        recent = [report.seconds for report in self._reports[-10:]]
        left = self._iterations - (self._reports[-1].iteration + 1)
        return float(np.mean(recent)) * left

    def _render(self) -> RenderableType:
        done = self._reports[-1].iteration + 1 if self._reports else 0
        head = Table.grid(padding=(0, 1), expand=False)
        head.add_row(
            Text(self._run_name, style="bold"),
            ProgressBar(total=self._iterations, completed=done, width=30),
            Text(f"{done}/{self._iterations}"),
            Text(_clock(time.monotonic() - self._started), style="dim"),
            Text(f"ETA {_clock(self._remaining_s())}" if self._reports else self._phase, style="dim"),
        )
        if not self._reports:
            return head
        report = self._reports[-1]
        rewards = np.asarray(report.rewards or [np.nan])
        rows = Table.grid(padding=(0, 2))
        curve = sparkline([float(np.mean(r.rewards)) if r.rewards else 0.0 for r in self._reports[-40:]])
        rows.add_row("reward", Text(f"{rewards.mean():.3f} ± {rewards.std():.3f}"), Text(curve, style="blue"))
        if self._held_out:
            version, value = self._held_out[-1]
            first = self._held_out[0][1]
            since = f"after {version} iterations (start {first:.3f})"
            rows.add_row("held-out", Text(f"{value:.3f}", style="bold green"), Text(since, style="dim"))
        recent = self._reports[-5:]
        rate = sum(len(r.rewards) for r in recent) / sum(r.seconds for r in recent)
        failed = len(report.scores) - len(report.rewards)
        rows.add_row("samples/s", Text(f"{rate:.1f}"), Text(f"{failed} failed" if failed else "", style="red"))
        for name, share in report.busy.items():
            rows.add_row(name, Text(f"{share:4.0%} busy"), ProgressBar(total=1.0, completed=share, width=20))
        return Group(head, rows)


def sparkline(values: Sequence[float]) -> str:
    """Values as a row of block characters, scaled to their own range."""
    if not values:
        return ""
    low, span = min(values), max(values) - min(values)
    level: Callable[[float], int] = lambda v: 1 + round((v - low) / span * 7) if span else 4  # noqa: E731
    return "".join(_BLOCKS[level(v)] for v in values)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
