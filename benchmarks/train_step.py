"""Our train step against the straightforward published loop, on the same tiny model in the same process.

    python benchmarks/train_step.py --json train_step.json      (about two minutes; --quick: two sizes, once)

The published loop goes through one timestep of one sample at a time, forward and backward, as Flow-GRPO's scripts do.
Our train unit takes a micro-batch, and of it all trained timesteps (the default) or one in a pass. All sides add up the
gradient of the same loss; by how much they differ is printed. Memory is the allocator's peak above the loaded process.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

# What is measured is the checkout this file lies in, here and in every process started from here.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.overhead_tables import aligned
from benchmarks.sides import Bench, differ, in_turns, peak_bytes, policy_of
from digenrl.config import ModelConfig
from digenrl.models.base import Geometry
from digenrl.models.pipeline import PipelineModel
from digenrl.models.registry import load_model
from digenrl.policy import Policy

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
STEPS, TRAINED, RANK = 10, 4, 32


@dataclass(frozen=True)
class Row:
    """One micro-batch size.

    Attributes:
        micro_batch: samples B.
        published, ours, one_timestep: samples/s of the loop, of our unit, of our unit with a timestep in a pass.
        published_bytes, ours_bytes: peak memory of the first two.
        gradient_off: by how much the two gradients differ, in norms.
    """

    micro_batch: int
    published: float
    ours: float
    one_timestep: float
    published_bytes: float
    ours_bytes: float
    gradient_off: float


def measure(
    model: PipelineModel, policy: Policy, geometry: Geometry, size: int, *, trained: int, repeats: int, device: str
) -> Row:
    """All sides at one micro-batch size."""
    bench = Bench.of(model, policy, geometry, size, trained, STEPS)
    works: dict[str, Callable[[], object]] = {
        "published": bench.published,
        "ours": partial(bench.train, trained),
        "one timestep": partial(bench.train, 1),
    }
    off = differ(bench.train(trained), bench.published())
    seconds = in_turns(works, repeats, device)
    memory = [peak_bytes(works[name], device) for name in ("published", "ours")]
    return Row(size, *(size / seconds[name] for name in works), *memory, off)


def table(rows: Sequence[Row]) -> str:
    """What people read."""
    header = ["micro-batch", "published loop, samples/s", "ours, samples/s", "faster", "one timestep a pass, samples/s"]
    header += ["published loop, MB", "ours, MB", "gradients differ by"]
    cells = [
        [
            str(row.micro_batch),
            f"{row.published:.1f}",
            f"{row.ours:.1f}",
            f"{row.ours / row.published:.2f} x",
            f"{row.one_timestep:.1f}",
            f"{row.published_bytes / 1e6:.1f}",
            f"{row.ours_bytes / 1e6:.1f}",
            f"{row.gradient_off:.1e}",
        ]
        for row in rows
    ]
    return aligned(header, cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--quick", action="store_true", help="two sizes, once")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = ModelConfig()
    model = load_model(config)
    assert isinstance(model, PipelineModel)
    policy, geometry = policy_of(model, RANK, "cpu"), Geometry(config.height, config.width)
    repeats = 1 if options.quick else 5
    rows = [
        measure(model, policy, geometry, size, trained=TRAINED, repeats=repeats, device="cpu")
        for size in ((1, 2) if options.quick else MICRO_BATCHES)
    ]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
