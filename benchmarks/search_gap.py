"""How far trainer assistance (off, greedy, bubble search) is from the shortest schedule there is.

    python benchmarks/search_gap.py --json gap.json            (about ten minutes; --quick: two seconds)

Small iterations drawn from seeds (search_gap_cases.py) are run by the real scheduler on the virtual clock, and solved
by OR-Tools CP-SAT (search_gap_exact.py) with the same durations, precedence and capabilities. A gap is how much longer
a makespan is than the shortest one known. Where the solver ran out of its effort, that one need not be the shortest
there is: gaps to its lower bound are given as well; the truth lies between the two. The last column is the processor
time of all decisions of the scheduler as a share of the time of the run that it decides about.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.overhead_tables import aligned
from benchmarks.search_gap_cases import TICK_S, Assist, Case, Outcome, simulate
from benchmarks.search_gap_exact import Exact, solve

ASSISTS: tuple[Assist, ...] = get_args(Assist)

#: Seeds and the solver's effort for each of them.
CASES, EFFORT = 200, 1.0
QUICK_CASES, QUICK_EFFORT = 12, 0.02

#: The mean gap and the 95th percentile that the search is to keep to.
MEAN_GOAL, P95_GOAL = 0.05, 0.15

#: The search is worth its complexity if it shortens a greedy iteration by so much in the mean.
GAIN_GOAL = 0.01


@dataclass(frozen=True)
class Row:
    """One case."""

    seed: int
    shared: bool
    exact: Exact
    outcomes: dict[Assist, Outcome]

    @property
    def gain(self) -> float:
        """By what fraction the search shortens the greedy makespan."""
        return 1 - self.outcomes["search"].ticks / self.outcomes["greedy"].ticks

    def gap(self, assist: Assist, *, bound: bool = False) -> float:
        """How much longer the makespan is than the shortest one known, or than the lower bound."""
        return self.outcomes[assist].ticks / (self.exact.bound if bound else self.exact.best) - 1


def measure(seed: int, effort: float) -> Row:
    """Schedule one case in every way."""
    case = Case.of(seed)
    outcomes = {assist: simulate(case, assist) for assist in ASSISTS}
    return Row(seed, case.shared, solve(case, effort, min(o.ticks for o in outcomes.values())), outcomes)


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures over all cases. Gaps and shares are fractions."""
    found: dict[str, Any] = {
        "cases": len(rows),
        "proven": sum(row.exact.proven for row in rows),
        "gain_over_greedy": {
            "all": float(np.mean([row.gain for row in rows])),
            "separate": float(np.mean([row.gain for row in rows if not row.shared])),
            "shared": float(np.mean([row.gain for row in rows if row.shared])),
        },
        "worse_than_greedy": sum(row.gain < 0 for row in rows),
    }
    for assist in ASSISTS:
        ran_s = TICK_S * sum(row.outcomes[assist].ticks for row in rows)
        found[assist] = {
            "gap": _spread([row.gap(assist) for row in rows]),
            "gap_to_bound": _spread([row.gap(assist, bound=True) for row in rows]),
            "shortest": sum(row.gap(assist) == 0 for row in rows),
            "share_of_time": sum(row.outcomes[assist].core_s for row in rows) / ran_s,
        }
    found["search_share_of_time"] = found["search"]["share_of_time"] - found["greedy"]["share_of_time"]
    return found


def _spread(gaps: Sequence[float]) -> dict[str, float]:
    return {"mean": float(np.mean(gaps)), "p95": float(np.percentile(gaps, 95)), "max": max(gaps)}


def table(found: dict[str, Any]) -> str:
    """One line per way of assisting."""
    header = ("trainers assist", "mean gap", "p95", "max", "mean to bound", "p95 to bound", "shortest", "decisions")
    lines = []
    for assist in ASSISTS:
        one = found[assist]
        gaps = [one["gap"][key] for key in ("mean", "p95", "max")] + [one["gap_to_bound"][k] for k in ("mean", "p95")]
        lines.append(
            (assist, *(f"{gap:.1%}" for gap in gaps), f"{one['shortest']}", f"{one['share_of_time']:.3%} of time")
        )
    return aligned(header, lines)


def verdict(found: dict[str, Any]) -> str:
    """What the figures say, in words."""
    gap = found["search"]["gap"]
    kept = gap["mean"] <= MEAN_GOAL and gap["p95"] <= P95_GOAL
    gain, worth = found["gain_over_greedy"], found["gain_over_greedy"]["all"] >= GAIN_GOAL
    return (
        f"{found['proven']} of {found['cases']} optima are proven.\n"
        f"Goal of the search, mean gap <= {MEAN_GOAL:.0%} and p95 <= {P95_GOAL:.0%}: {'met' if kept else 'missed'}.\n"
        f"It shortens greedy iterations by {gain['all']:.1%} in the mean ({'at least' if worth else 'less than'} "
        f"{GAIN_GOAL:.0%}) and lengthens {found['worse_than_greedy']} of them;\n"
        f"by {gain['separate']:.1%} where only trainers can train, by {gain['shared']:.1%} where everybody can."
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_CASES} cases, little effort of the solver")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(argv)
    cases, effort = (QUICK_CASES, QUICK_EFFORT) if arguments.quick else (CASES, EFFORT)
    rows = []
    for seed in range(cases):
        rows.append(measure(seed, effort))
        if sys.stderr.isatty():
            print(f"\r{seed + 1} of {cases}", end="\n" if seed + 1 == cases else "", file=sys.stderr, flush=True)
    found = summary(rows)
    print(table(found))
    print(verdict(found))
    if arguments.json:
        environment = {"python": platform.python_version(), "machine": platform.machine(), "solver_effort": effort}
        written = {**environment, "summary": found, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
