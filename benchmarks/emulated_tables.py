"""What people read of benchmarks/emulated_fleet.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.overhead_tables import Marks, aligned

MARKS = Marks("emulated_fleet", "benchmarks/emulated_fleet.py")


def agreement_table(rows: Sequence[dict[str, Any]]) -> str:
    """Emulated runs beside their twins."""
    header = ("workload", "fleet", "policy", "iteration, s", "virtual clock, s", "difference, %", "if pauses vary, %")
    header += ("planned, s", "difference, %", "of the bound, %", "busy, %", "to colocated")
    twins = {_key(row): row for row in rows if row["clock"] == "virtual twin"}
    lines = []
    for row in rows:
        if row["clock"] == "emulated":
            seconds, virtual_s = row["iteration_s"], twins[_key(row)]["iteration_s"]
            lines.append(
                (
                    *_key(row),
                    f"{seconds:.2f}",
                    f"{virtual_s:.2f}",
                    f"{100 * (virtual_s / seconds - 1):+.1f}",
                    f"{100 * (row['shortest_twin_s'] / seconds - 1):+.1f} to "
                    f"{100 * (row['longest_twin_s'] / seconds - 1):+.1f}",
                    f"{row['planned_s']:.2f}",
                    f"{100 * (row['planned_s'] / seconds - 1):+.1f}",
                    f"{100 * row['fraction_of_bound']:.0f}",
                    f"{100 * row['utilisation']:.0f}",
                    "-" if row["ratio_colocated"] is None else f"{row['ratio_colocated']:.2f}",
                )
            )
    return aligned(header, lines)


def orchestration_table(rows: Sequence[dict[str, Any]]) -> str:
    """Seconds that no model of a device contains."""
    header = ("workload", "fleet", "policy", "shortest unit, ms", "gap, ms", "to an idle device, ms")
    header += ("install, ms", "merge, ms", "flow process, ms/unit", "hosts, ms/unit", "run, s")
    lines = [
        (
            *_key(row),
            f"{1000 * row['shortest_unit_s']:.0f}",
            f"{1000 * row['gap_s']:.1f}",
            f"{1000 * row['trip_s']['device']:.1f}",
            f"{1000 * row['move_s'].get('install', 0.0):.1f}",
            f"{1000 * row['move_s'].get('merge', 0.0):.1f}",
            f"{1000 * row['flow_cpu_s']:.1f}",
            f"{1000 * row['host_cpu_s']:.1f}",
            f"{row['seconds']:.0f}",
        )
        for row in rows
    ]
    return aligned(header, lines)


def ratio_table(rows: Sequence[dict[str, Any]]) -> str:
    """The ablation of one workload."""
    header = ("fleet", "policy", "samples/s", "of the bound, %", "to colocated", "to colocated as published")
    header += ("busy, %", "stale, %", "because of")
    lines = [
        (
            row["fleet"],
            row["policy"],
            f"{row['samples_per_s']:.3f}",
            f"{100 * row['fraction_of_bound']:.1f}",
            f"{row['ratio_colocated']:.2f}",
            f"{row['ratio_published']:.2f}",
            f"{100 * row['utilisation']:.1f}",
            f"{100 * row['stale_share']:.0f}",
            row["because"],
        )
        for row in rows
    ]
    return aligned(header, lines)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["workload"], row["fleet"], row["policy"]
