"""What people read of benchmarks/overhead.py: tables of its rows, and the block of a page that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.overhead_figures import side_of


@dataclass(frozen=True)
class Marks:
    """Two lines of a page between which a script writes.

    Attributes:
        name: of the block.
        script: that writes it.
    """

    name: str
    script: str

    @property
    def begin(self) -> str:
        """The line above the block."""
        return f"<!-- {self.name}: begin, written by {self.script} -->"

    @property
    def end(self) -> str:
        """The line below it."""
        return f"<!-- {self.name}: end -->"


MARKS = Marks("overhead", "benchmarks/overhead.py")
BEGIN, END = MARKS.begin, MARKS.end


def throughput_table(rows: Sequence[dict[str, Any]]) -> str:
    """Samples per second against the plain loop, and how busy the devices were."""
    loop = next(row["samples_per_s"] for row in rows if row["layout"] == "loop")
    header = ("run", "observed", "rollout unit", "queue depth", "samples/s", "lowest - highest")
    header += ("of the loop, %", "iteration, s", "devices busy, %")
    lines = []
    for row in _real(rows):
        side, rates = side_of(row), row["samples_per_s_all"]
        is_loop = side.layout == "loop"
        lines.append(
            (
                side.label,
                "-" if is_loop else side.observed,
                "-" if is_loop else side.cut,
                "-" if is_loop else str(side.queue_depth),
                f"{row['samples_per_s']:.1f}",
                f"{min(rates):.1f} - {max(rates):.1f}",
                f"{100 * row['samples_per_s'] / loop:.0f}",
                f"{row['iteration_s']:.2f}",
                " ".join(f"{100 * share:.0f}" for share in row["busy"].values()) or "-",
            )
        )
    return aligned(header, lines)


def gap_table(rows: Sequence[dict[str, Any]]) -> str:
    """Gaps between units, of the runs that are not observed."""
    header = ("run", "rollout unit", "queue depth", "pairs", "queued before, %", "gap p50, ms", "gap p95, ms")
    lines = []
    for row in _real(rows):
        if row["gaps"] and row["detail"] is None:
            side = side_of(row)
            queued = f"{100 * row['gaps_queued'] / row['gaps']:.0f}"
            quantiles = (f"{row['gap_p50_ms']:.1f}", f"{row['gap_p95_ms']:.1f}")
            lines.append((side.label, side.cut, str(side.queue_depth), str(row["gaps"]), queued, *quantiles))
    return aligned(header, lines)


def cpu_table(rows: Sequence[dict[str, Any]]) -> str:
    """CPU time per unit at queue depth 2, by what is observed."""
    header = ("run", "observed", "rollout unit", "units/iteration", "task runs/iteration", "flow process, ms/unit")
    header += ("flow process, % of a core", "observers say, %", "Prefect server, ms/unit")
    lines = []
    for row in _real(rows):
        if row["flow_cpu_ms_per_unit"] is not None and row["queue_depth"] == 2:
            side = side_of(row)
            lines.append(
                (
                    side.label,
                    side.observed,
                    side.cut,
                    f"{row['units_per_iteration']:.0f}",
                    _number(row["task_runs_per_iteration"], 1),
                    f"{row['flow_cpu_ms_per_unit']:.1f}",
                    f"{100 * row['flow_cpu_cores']:.1f}",
                    _number(row["observing_share"], 100),
                    _number(row["server_cpu_ms_per_unit"], 1),
                )
            )
    return aligned(header, lines)


def fleet_table(rows: Sequence[dict[str, Any]]) -> str:
    """Gaps and CPU time per unit where many workers keep one engine busy; empty if that was not measured."""
    header = ("observed", "rollout unit", "queue depth", "units/s", "queued before, %", "gap p50, ms", "gap p95, ms")
    header += ("gap p50, % of 200 ms", "flow process, ms/unit", "flow process, % of a core", "devices busy, %")
    lines = []
    for row in rows:
        if row["layout"] == "emulated":
            side, gap_ms = side_of(row), row["gap_p50_ms"]
            lines.append(
                (
                    side.observed,
                    side.cut,
                    str(side.queue_depth),
                    f"{row['units_per_iteration'] / row['iteration_s']:.0f}",
                    f"{100 * row['gaps_queued'] / row['gaps']:.0f}" if row["gaps"] else "-",
                    _number(gap_ms, 1),
                    _number(row["gap_p95_ms"], 1),
                    _number(gap_ms, 100 / 200),
                    f"{row['flow_cpu_ms_per_unit']:.1f}",
                    f"{100 * row['flow_cpu_cores']:.0f}",
                    f"{100 * sum(row['busy'].values()) / len(row['busy']):.0f}",
                )
            )
    return aligned(header, lines) if lines else ""


def _real(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["layout"] != "emulated"]


def _number(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{factor * value:.1f}"


def aligned(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are also aligned as plain text: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]

    def written(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        return f"| {' | '.join(cells)} |"

    rule = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([written(header), f"| {' | '.join(rule)} |", *map(written, lines)])


def replace_block(page: str, block: str, marks: Marks = MARKS) -> str:
    """The page with what stands between the two marks replaced.

    Raises:
        ValueError: a mark is missing, there twice or in the wrong order.
    """
    begin, end = marks.begin, marks.end
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"the page must have the line {begin!r} once and, after it, the line {end!r} once")
    before, rest = page.split(begin)
    return f"{before}{begin}\n\n{block}\n\n{end}{rest.split(end)[1]}"
