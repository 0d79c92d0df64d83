"""How well a run's speed is predicted from a profile: both sides within a minute, on the workers of this machine.

    python benchmarks/prediction.py --json prediction.json       (about two minutes; --quick: one layout, once)

For every layout the workers are profiled as before a run, `predict` says what an iteration will take, and the tiny
model is trained for seven iterations, of which the first and the last do not count. The prediction knows seconds of
units and the pause between them that docs/performance.md reports; it knows nothing of the run. No Prefect and no MLflow
take part. benchmarks/emulated_fleet.py compares the same prediction with runs of 16 emulated devices.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

# What is measured is the checkout this file lies in, here and in every process started from here.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.overhead_tables import aligned
from digenrl import choices, runspec
from digenrl.config import RunConfig
from digenrl.config.load import load_config
from digenrl.profile import Profile
from digenrl.prompts import load_prompts
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.predict import predict
from flows.plan.costs import GAP_S
from workers.cluster import open_cluster
from workers.engine import Engine
from workers.listener import IterationReport, Listener
from workers.profile import measure
from workers.receipts import RunSetup

#: Iterations of a run; five count.
ITERATIONS = 7

LAYOUTS = ("colocated", "disaggregated", "digenrl")


class _Seconds(Listener):
    """Seconds of every iteration."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self.found.append(report.seconds)


def configured(layout: str) -> RunConfig:
    """The tiny model, in pieces of a quarter of a group, so that there is something to schedule."""
    return load_config(
        "tiny-ocr",
        [
            f"iterations={ITERATIONS}",
            f"schedule.layout={layout}",
            "schedule.micro_batch=4",
            "schedule.advantage=group",
            "schedule.observe.every=0",
            "evaluation.every=0",
        ],
    )


def predicted_s(config: RunConfig, profiles: Sequence[Profile]) -> float:
    """Seconds per iteration, from what the workers were measured to take."""
    model = choices.model_of(runspec.shape(config, 0), profiles)
    for kind in model.kinds:
        model.note("gap_s", kind, GAP_S)
    pools = [Pool(kind, count) for kind, count in Counter(profile.kind for profile in profiles).items()]
    layout, assist = runspec.layout_of(config), config.schedule.assist
    return predict(model, pools, layout, gap=config.schedule.gap, search=assist == "search").iteration_s


async def compare(layout: str) -> dict[str, Any]:
    """Profile, predict, train."""
    config = configured(layout)
    shape = runspec.shape(config, 0)
    prompts = load_prompts(config.data.prompts)
    setup = RunSetup(uuid.uuid4().hex, config, held_out=0)
    seconds = _Seconds()
    async with open_cluster(config.cluster) as client:
        first = tuple(runspec.prompts_of(shape, shape.micro_batches(0)[0], prompts, ()))
        profiles = await measure(client, setup, first, everything=True)
        expected_s = predicted_s(config, profiles)
        costs = choices.model_of(shape, profiles)
        engine = Engine(
            client=client,
            setup=setup,
            scheduler=runspec.scheduler_of(config, shape, CostModel.from_json(shape, costs.to_json())),
            start=None,
            prompts_of=lambda m: tuple(runspec.prompts_of(shape, m, prompts, ())),
            listener=seconds,
        )
        await engine.run()
    measured_s = median(seconds.found[1:-1])
    return {
        "layout": layout,
        "predicted_s": expected_s,
        "measured_s": measured_s,
        "off": expected_s / measured_s - 1,
        "iterations_s": seconds.found,
        "profile": costs.to_json()["kinds"],
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """What people read."""
    header = ("layout", "predicted, s", "measured, s", "off, %")
    lines = [
        (
            row["layout"],
            f"{row['predicted_s']:.3f}",
            f"{row['measured_s']:.3f}",
            f"{100 * row['off']:+.1f}",
        )
        for row in rows
    ]
    return aligned(header, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one layout, once")
    parser.add_argument("--repeats", type=int, default=3, help="runs per layout; the one in the middle counts")
    parser.add_argument("--json", type=Path, help="also write everything here")
    options = parser.parse_args(arguments)
    began, load = time.monotonic(), os.getloadavg()[0]
    rows, everything = [], []
    for layout in LAYOUTS[1:2] if options.quick else LAYOUTS:
        found = [asyncio.run(compare(layout)) for _ in range(1 if options.quick else options.repeats)]
        everything += found
        rows.append(sorted(found, key=lambda row: row["off"])[len(found) // 2])
    where = {"cores": os.cpu_count(), "seconds": time.monotonic() - began, "load_average_before": load}
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "runs": everything, "machine": where}, indent=1))
    print(table(rows))
    print(f"{where['cores']} cores, load average {load:.2f} at the start, {where['seconds']:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
