"""What each technique brings on a fleet: four published workloads on the virtual clock, checked on real Dask workers.

    python benchmarks/emulated_fleet.py --page docs/fleets.md     (about 20 minutes; --quick: less than one)
    python benchmarks/emulated_fleet.py --cell qwen-image-20b/16-mixed/+TCSS    (one emulated run and its twins)

The virtual clock runs every policy of every workload on every fleet. Before that, two workloads on two fleets of 16
devices run in four policies for real: engine, courier, Dask scheduler and workers are those of a training run, and only
the units sleep instead of computing (workers/emulated.py). The pause of a device between two units that is measured
there is an input of the virtual clock, and each emulated run is compared with its twin on it. docs/fleets.md explains
the columns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from statistics import median
from typing import Any

# What is measured is the checkout this file lies in, here and in every process started from here.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.emulated_plan import Case, Plan, planned_s
from benchmarks.emulated_run import Figures, Measured, Orchestration, run, twin, twins_s
from benchmarks.emulated_tables import MARKS, agreement_table, orchestration_table, ratio_table
from benchmarks.overhead_tables import replace_block
from digenrl.scheduling.ablation import FLEETS, POLICIES, Fleet, Policy, ablation
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.workloads import workload

WORKLOADS = ("hunyuanvideo-13b", "wan2.1-14b", "flux.1-12b", "qwen-image-20b")

#: What is emulated: workload -> (groups, seconds slept per modelled second). Groups are cut so that all runs together
#: stay below 20 minutes, and time is scaled so that the shortest rollout or train unit still takes half a second.
EMULATED = {"wan2.1-14b": (8, 0.0402), "qwen-image-20b": (16, 0.1986)}
FLEET_NAMES = ("16-homogeneous", "16-mixed")
POLICY_NAMES = ("colocated", "+TSP", "streaming+TAG", "+TCSS")
#: Of each run; the first and the last one are left out.
ITERATIONS = 6

QUICK_WORKLOAD, QUICK_GROUPS, QUICK_FACTOR, QUICK_ITERATIONS = "qwen-image-20b", 8, 0.06, 4
QUICK_FLEET = Fleet("8-homogeneous", (Pool("rate-1.0", 8),))
QUICK_POLICIES = ("colocated", "+TCSS")


def cases(quick: bool) -> list[Case]:
    """What is emulated, in order."""
    policies = {policy.name: policy for policy in POLICIES}
    if quick:
        return [
            Case(QUICK_WORKLOAD, QUICK_FLEET, policies[name], QUICK_GROUPS, QUICK_FACTOR, QUICK_ITERATIONS)
            for name in QUICK_POLICIES
        ]
    return [
        Case(name, FLEETS[fleet], policies[policy], groups, factor, ITERATIONS)
        for name, (groups, factor) in EMULATED.items()
        for fleet in FLEET_NAMES
        for policy in POLICY_NAMES
    ]


def cell(case: Case) -> str:
    """How a case is named on the command line."""
    return f"{case.workload}/{case.fleet.name}/{case.policy.name}"


def emulate(
    planned: Sequence[Plan], earlier: dict[str, Any] | None, afresh: Collection[str], say: Callable[[str], None]
) -> list[tuple[Plan, Measured, Figures]]:
    """Run every case for real and, with what orchestration took there, on the virtual clock.

    Args:
        planned: what is run.
        earlier: written by --json: the emulated runs are taken from there,
        afresh: but for these cells.
        say: tells people.
    """
    found = []
    for plan in planned:
        measured = (
            asyncio.run(run(plan)) if earlier is None or cell(plan.case) in afresh else measured_before(plan, earlier)
        )
        virtual = twin(plan, measured.orchestration)
        off = virtual.iteration_s / measured.figures.iteration_s - 1
        say(
            f"{plan.case.label}, {plan.case.fleet.name}, {plan.case.policy.name}: "
            f"{measured.figures.iteration_s:.2f} s per iteration, virtual clock {off:+.1%}"
        )
        found.append((plan, measured, virtual))
    return found


def measured_before(plan: Plan, earlier: dict[str, Any]) -> Measured:
    """An emulated run of an earlier session.

    Raises:
        StopIteration: it was not run there.
    """
    key = (plan.case.label, plan.case.fleet.name, plan.case.policy.name)
    row = next(row for row in earlier["rows"] if row["clock"] == "emulated" and _key(row) == key)
    took = next(row for row in earlier["orchestration"] if _key(row) == key)
    orchestration = Orchestration(**{field.name: took[field.name] for field in fields(Orchestration)})
    return Measured(
        Figures(row["iteration_s"], row["utilisation"], row["stale_share"]), orchestration, seconds=took["seconds"]
    )


def emulated_rows(found: Sequence[tuple[Plan, Measured, Figures]]) -> list[dict[str, Any]]:
    """Two rows per case, one per clock. Rates are of modelled time, as in the other rows."""
    rates = {}
    for plan, measured, virtual in found:
        for clock, figures in (("emulated", measured.figures), ("virtual twin", virtual)):
            rates[plan.case, clock] = _samples_per_s(plan, figures)
    rows = []
    for plan, measured, virtual in found:
        shortest_s, longest_s = twins_s(plan, measured.orchestration)
        base = replace(plan.case, policy=_policy("colocated"))
        for clock, figures in (("emulated", measured.figures), ("virtual twin", virtual)):
            rate = rates[plan.case, clock]
            rows.append(
                {
                    "workload": plan.case.label,
                    "fleet": plan.case.fleet.name,
                    "policy": plan.case.policy.name,
                    "clock": clock,
                    "samples_per_s": rate,
                    "ratio_colocated": rate / rates[base, clock] if (base, clock) in rates else None,
                    "ratio_published": None,
                    "fraction_of_bound": rate / plan.bound_samples_per_s,
                    "utilisation": figures.utilisation,
                    "stale_share": figures.stale_share,
                    "iteration_s": figures.iteration_s,
                    "planned_s": planned_s(plan),
                    "shortest_twin_s": shortest_s,
                    "longest_twin_s": longest_s,
                }
            )
    return rows


def virtual_rows(quick: bool, gap_s: float, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Every policy of every workload on every fleet; quick: of one on one."""
    rows = []
    fleets = (QUICK_FLEET,) if quick else tuple(FLEETS.values())
    for name in (QUICK_WORKLOAD,) if quick else WORKLOADS:
        for fleet in fleets:
            rows += [vars(row) for row in ablation(workload(name), fleet, gap_s)]
            say(f"{name}, {fleet.name}: on the virtual clock")
    return rows


def orchestration_rows(found: Sequence[tuple[Plan, Measured, Figures]]) -> list[dict[str, Any]]:
    """What engine and Dask took in each emulated run."""
    return [
        {
            "workload": plan.case.label,
            "fleet": plan.case.fleet.name,
            "policy": plan.case.policy.name,
            "shortest_unit_s": plan.shortest_unit_s,
            "seconds": measured.seconds,
            **vars(measured.orchestration),
        }
        for plan, measured, _ in found
    ]


def _policy(name: str) -> Policy:
    return next(policy for policy in POLICIES if policy.name == name)


def _samples_per_s(plan: Plan, figures: Figures) -> float:
    return plan.shape.groups * plan.shape.group_size * plan.case.factor / figures.iteration_s


def block(result: dict[str, Any]) -> str:
    """What goes on the page."""
    where, rows = result["machine"], result["rows"]
    whole = [row for row in rows if row["clock"] == "virtual"]
    lines = [
        f"`{where['command']}` on {time.strftime('%Y-%m-%d')}: {where['cores']} cores, {where['seconds']:.0f} s in "
        f"all, load average {where['load_average_before']:.2f} at the start"
        f"{'; emulated runs of an earlier session (--emulated)' if where['earlier'] else ''}. "
        "Pause between two units on a device, measured in the emulated runs (median of their means) and an input of "
        f"the virtual clock: {1000 * where['gap_s']:.1f} ms.",
        "### Emulated devices against the virtual clock",
        agreement_table(rows),
        f"Largest difference of the virtual clock: {100 * where['worst']:.1f} %; of the plan: "
        f"{100 * where['worst_planned']:.1f} %.",
        "### What engine and Dask took",
        orchestration_table(result["orchestration"]),
        *(["### Every policy on the virtual clock"] if whole else []),
    ]
    for name in dict.fromkeys(row["workload"] for row in whole):
        lines += [f"**{name}**", ratio_table([row for row in whole if row["workload"] == name])]
    return "\n\n".join(lines)


def worst(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """By how much the iteration times of the twins, and the planned ones, differ at most from the emulated ones."""
    twins = {_key(row): row["iteration_s"] for row in rows if row["clock"] == "virtual twin"}
    emulated = [row for row in rows if row["clock"] == "emulated"]
    return (
        max(abs(twins[_key(row)] / row["iteration_s"] - 1) for row in emulated),
        max(abs(row["planned_s"] / row["iteration_s"] - 1) for row in emulated),
    )


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["workload"], row["fleet"], row["policy"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one workload; 8 devices for real, in two policies")
    parser.add_argument(
        "--cell", action="append", default=[], help="WORKLOAD/FLEET/POLICY: emulate only this; repeatable"
    )
    parser.add_argument("--emulated", type=Path, help="take all other emulated runs from this file, which --json wrote")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--page", type=Path, help="also rewrite the marked block of this page")
    options = parser.parse_args(arguments)
    planned = {cell(case): case for case in cases(options.quick)}
    if unknown := [name for name in options.cell if name not in planned]:
        parser.error(f"--cell {unknown[0]} is not emulated; known are {', '.join(planned)}")
    part = bool(options.cell) and options.emulated is None
    if part and options.page is not None:
        parser.error("--page with --cell needs the other runs: add --emulated FILE")
    if options.page is not None:
        replace_block(options.page.read_text(), "", MARKS)  # better now than after a quarter of an hour
    began, load = time.monotonic(), os.getloadavg()[0]

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    earlier = json.loads(options.emulated.read_text()) if options.emulated is not None else None
    chosen = [case.plan() for name, case in planned.items() if not part or name in options.cell]
    found = emulate(chosen, earlier, options.cell, say)
    rows = emulated_rows(found)
    gap_s = median(measured.orchestration.gap_s for _, measured, _ in found)
    rows += [] if part else virtual_rows(options.quick, gap_s, say)
    twins_off, plans_off = worst(rows)
    before = earlier["machine"] if earlier is not None else {"seconds": 0.0, "load_average_before": load}
    where = {
        "command": "python benchmarks/emulated_fleet.py" + (" --quick" if options.quick else ""),
        "earlier": earlier is not None,
        "cores": os.cpu_count(),
        "seconds": before["seconds"] + time.monotonic() - began,
        "load_average_before": before["load_average_before"],
        "gap_s": gap_s,
        "worst": twins_off,
        "worst_planned": plans_off,
    }
    result = {"rows": rows, "orchestration": orchestration_rows(found), "machine": where}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    if options.page is not None:
        options.page.write_text(replace_block(options.page.read_text(), block(result), MARKS))
    print(block(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
