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

from digenrl.guard.watch import Verdict
from digenrl.rewards.base import Scored
from flows.history import History
from workers.listener import Dispatched, Evaluation, IterationReport, Listener

#: Columns below which only numbers are shown; the run's name needs its own length more.
WIDE = 68
#: Iterations of this attempt from which on the end is predicted without "about".
SURE_AFTER = 6
#: Roles that are shown: what a worker's device does.
ROLES = ("rollout", "train")

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
        self._before: list[float] = []
        self._done = 0
        self._busy_with: dict[str, set[str]] = {}
        self._roles: dict[str, str] = {}
        self._held_out: list[tuple[int, float]] = []
        self._verdict: Verdict | None = None
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

    def notice(self, text: str) -> None:
        """Print a line that stays."""
        if self._console.is_terminal:
            # Never wrapped or cut: addresses are there to be copied.
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            self._line(text)

    def resumed(self, history: History) -> None:
        """Go on where the attempts before this one ended."""
        self._done = history.iterations
        self._before = [row.reward_mean for row in history.rows]
        self._held_out = [(v, float(np.mean(list(e.values())))) for v, e in sorted(history.evaluations.items()) if e]

    def dispatched(self, event: Dispatched) -> None:
        """See Listener."""
        if event.role in ROLES:
            self._busy_with.setdefault(event.worker_name, set()).add(event.role)
        if not self._reports:
            self._phase = "first iteration"

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._phase = "training"
        self._reports.append(report)
        self._done = report.iteration + 1
        self._roles = {name: " + ".join(role for role in ROLES if role in did) for name, did in self._busy_with.items()}
        self._busy_with.clear()
        if self._done % max(self._iterations // 20, 1) == 0 or self._done == self._iterations:
            self._line(self._status(report))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        values = [score.value for score in evaluation.scores.values() if isinstance(score, Scored)]
        if values:
            # A resumed run may do the last one again.
            before = [found for found in self._held_out if found[0] != evaluation.version]
            self._held_out = [*before, (evaluation.version, float(np.mean(values)))]
            self._line(f"held-out reward after {evaluation.version} iterations: {self._held_out[-1][1]:.3f}")

    def judged(self, verdict: Verdict) -> None:
        """The guard judged an evaluation. What it warns of stays on the screen."""
        gold = "".join(f"; {name} {mean:.3f}" for name, mean in verdict.gold.items())
        self._line(f"guard after {verdict.version} iterations: {verdict.level}{gold}")
        # Why it stops is the first thing the summary says.
        if verdict.level == "warn" and (self._verdict is None or self._verdict.level == "ok"):
            self.notice(f"the guard warns: {verdict.reason}")
        self._verdict = verdict

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
        means = ", ".join(f"{name} {np.mean(values):.3f}" for name, values in report.parts.items())
        alone = f" ({means})" if len(report.parts) > 1 else ""
        return (
            f"iteration {report.iteration + 1}/{self._iterations}  "
            f"reward {rewards.mean():.3f} ± {rewards.std():.3f}{alone}  "
            f"{self._rate():.0f} samples/s  {self._eta()}"
        )

    def _rate(self) -> float:
        """Samples per second of the last iterations."""
        recent = self._reports[-5:]
        return sum(len(r.rewards) for r in recent) / sum(r.seconds for r in recent)

    def _eta(self) -> str:
        """When the run will be over. The first iteration, in which models are loaded, says little of the others."""
        left = self._iterations - self._done
        recent = [report.seconds for report in self._reports[1:][-10:]] or [self._reports[0].seconds]
        about = "about " if left and len(self._reports) < SURE_AFTER else ""
        return f"ETA {about}{_clock(float(np.mean(recent)) * left)}"

    def _render(self) -> RenderableType:
        wide = self._console.width >= WIDE
        training = bool(self._reports) and self._phase == "training"
        head = Table.grid(padding=(0, 1), expand=False)
        cells: list[RenderableType] = [
            Text(f"{self._done}/{self._iterations}", no_wrap=True),
            Text(_clock(time.monotonic() - self._started), style="dim", no_wrap=True),
            Text(self._eta() if training else self._phase, style="dim", no_wrap=True, overflow="ellipsis"),
        ]
        if wide:
            cells.insert(0, ProgressBar(total=self._iterations, completed=self._done, width=30))
        if self._console.width > WIDE + len(self._run_name):
            cells.insert(0, Text(self._run_name, style="bold"))
        head.add_row(*cells)
        if not self._reports:
            return head
        return Group(head, self._rows(self._reports[-1], wide))

    def _rows(self, report: IterationReport, wide: bool) -> Table:
        """Name, value and picture of each figure; a narrow terminal has no room for the pictures."""
        rows = Table.grid(padding=(0, 2 if wide else 1))

        def add(name: str, value: Text, picture: RenderableType) -> None:
            value.no_wrap = True
            rows.add_row(Text(name, no_wrap=True), value, *([picture] if wide else []))

        rewards = np.asarray(report.rewards or [np.nan])
        means = [*self._before, *(float(np.mean(r.rewards)) if r.rewards else 0.0 for r in self._reports)]
        curve = Text(sparkline(means[-40:]), style="blue", no_wrap=True)
        add("reward", Text(f"{rewards.mean():.3f} ± {rewards.std():.3f}"), curve)
        if len(report.parts) > 1:
            for name, values in report.parts.items():
                alone = [float(np.mean(r.parts[name])) for r in self._reports[-40:] if name in r.parts]
                picture = Text(sparkline(alone), style="dim", no_wrap=True)
                add(f"  {name}", Text(f"{np.mean(values):.3f} ± {np.std(values):.3f}"), picture)
        if self._held_out:
            version, value = self._held_out[-1]
            since = f"after {version} iterations (start {self._held_out[0][1]:.3f})"
            add(
                "held-out",
                Text(f"{value:.3f}", style="bold green"),
                Text(since, style="dim", no_wrap=True, overflow="ellipsis"),
            )
        if self._verdict is not None:
            gold = ", ".join(f"{name} {mean:.3f}" for name, mean in self._verdict.gold.items())
            style = {"ok": "green", "warn": "yellow", "stop": "bold red"}[self._verdict.level]
            add("guard", Text(self._verdict.level, style=style), Text(gold, style="dim", no_wrap=True))
        failed = len(report.scores) - len(report.rewards)
        add("samples/s", Text(f"{self._rate():.1f}"), Text(f"{failed} failed" if failed else "", style="red"))
        for name, share in report.busy.items():
            label = f"{name} {self._roles[name]}" if name in self._roles else name
            add(label, Text(f"{share:4.0%} busy"), ProgressBar(total=1.0, completed=share, width=20))
        return rows


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
