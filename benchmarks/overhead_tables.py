"""What people read of benchmarks/overhead.py: three tables of its rows, and the block of a page that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.overhead_figures import side_of

BEGIN = "<!-- overhead: begin, written by benchmarks/overhead.py -->"
END = "<!-- overhead: end -->"


def throughput_table(rows: Sequence[dict[str, Any]]) -> str:
    """Samples per second against the plain loop, and how busy the devices were."""
    loop = next(row["samples_per_s"] for row in rows if row["layout"] == "loop")
    header = ("run", "observed", "rollout unit", "queue depth", "samples/s", "lowest - highest")
    header += ("of the loop, %", "iteration, s", "devices busy, %")
    lines = []
    for row in rows:
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
    for row in rows:
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
    for row in rows:
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


def replace_block(page: str, block: str) -> str:
    """The page with what stands between the two marks replaced.

    Raises:
        ValueError: a mark is missing, there twice or in the wrong order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have the line {BEGIN!r} once and, after it, the line {END!r} once")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{block}\n\n{END}{rest.split(END)[1]}"
