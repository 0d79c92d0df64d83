"""Our rollout against the diffusers pipeline's own call: same model, steps, batch and embeddings, decoding included.

    python benchmarks/rollout.py --json rollout.json      (about two minutes; --quick: one family, one size)

Ours draws noise at four steps of ten and keeps what training needs; `no noise` takes ten Euler steps, as the pipeline.
1.00 x is the pipeline's speed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

# What is measured is the checkout this file lies in, here and in every process started from here.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.overhead_tables import aligned
from benchmarks.sides import Bench, in_turns, policy_of
from digenrl.config import ModelConfig
from digenrl.models.base import Geometry
from digenrl.models.pipeline import PipelineModel, quiet
from digenrl.models.registry import FAMILIES, load_model
from digenrl.models.verify import smallest
from digenrl.policy import Policy

BATCHES = (1, 4, 16)
STEPS, NOISY, RANK = 10, 4, 32
#: Of a prompt: at the families' own lengths the tiny models would do little but read.
TOKENS = 32


@dataclass(frozen=True)
class Row:
    """One family at one batch size: samples/s.

    Attributes:
        family, batch: which.
        pipeline: its own call.
        ours: our rollout.
        no_noise: ours without stochastic steps.
    """

    family: str
    batch: int
    pipeline: float
    ours: float
    no_noise: float


def measure(model: PipelineModel, policy: Policy, geometry: Geometry, batch: int, repeats: int, device: str) -> Row:
    """All sides at one batch size."""
    bench = Bench.of(model, policy, geometry, batch, NOISY, STEPS)
    plain = replace(bench, spec=replace(bench.spec, stochastic=(), steps=()))
    works: dict[str, Callable[[], object]] = {
        "pipeline": bench.call,
        "ours": bench.roll_out,
        "no noise": plain.roll_out,
    }
    seconds = in_turns(works, repeats, device)
    return Row(model.family, batch, *(batch / seconds[name] for name in works))


def table(rows: Sequence[Row]) -> str:
    """What people read."""
    header = ["family", "batch", "pipeline, samples/s", "ours, samples/s", "ours", "no noise"]
    cells = [
        [
            row.family,
            str(row.batch),
            f"{row.pipeline:.2f}",
            f"{row.ours:.2f}",
            f"{row.ours / row.pipeline:.2f} x",
            f"{row.no_noise / row.pipeline:.2f} x",
        ]
        for row in rows
    ]
    return aligned(header, cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--quick", action="store_true", help="one family, one size, once")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    for family in ("flux",) if options.quick else FAMILIES:
        path = "package:tiny-sd3" if family == "sd3" else f"tiny:{family}"
        geometry = smallest(family, path)
        tokens = None if family == "sd3" else TOKENS
        model = load_model(ModelConfig(family=family, path=path, max_sequence_length=tokens, **vars(geometry)))
        assert isinstance(model, PipelineModel)
        policy = policy_of(model, RANK, "cpu")
        repeats = 1 if options.quick else 3
        with quiet():
            rows += [
                measure(model, policy, geometry, batch, repeats, "cpu")
                for batch in ((2,) if options.quick else BATCHES)
            ]
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
