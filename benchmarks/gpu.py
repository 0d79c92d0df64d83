"""Train step and rollout at real sizes on a GPU: FLUX.1-dev and Wan2.1-1.3B with random weights, nothing downloaded.

    python benchmarks/gpu.py --json gpu.json          (about ten minutes on one GPU of 80 GB)
    python benchmarks/gpu.py --device cpu --quick     (tiny sizes: does it run)

Both comparisons, of train_step.py and of rollout.py, and MFU: FLOPs of one forward as torch's FlopCounterMode counts
them, three times for a train step (forward, recomputation, backward to activations: the base is frozen), over seconds
and the device's dense bfloat16 peak. Without a GPU it says so and ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What is measured is the checkout this file lies in, here and in every process started from here.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import rollout, train_step
from benchmarks.overhead_tables import aligned
from benchmarks.sides import policy_of
from digenrl.config import ModelConfig
from digenrl.memory import rollout_pass
from digenrl.models.base import Geometry
from digenrl.models.blank import blank_model

#: Dense bfloat16 FLOP/s by what a device's name contains; from NVIDIA's data sheets.
PEAKS = {"H200": 9.89e14, "H100": 9.89e14, "H800": 9.89e14, "A100": 3.12e14, "L40S": 3.62e14, "4090": 1.65e14}

#: Forwards' worth of FLOPs of a train step: forward, recomputation, backward to activations.
FORWARDS = 3


@dataclass(frozen=True)
class Case:
    """A model at a published size: fields of the transformer that differ from the tiny checkpoint's."""

    config: ModelConfig
    transformer: dict[str, Any]
    rank: int
    micro_batch: int


CASES = {
    # The defaults of FluxTransformer2DModel are FLUX.1-dev's, guidance apart.
    "FLUX.1-dev": Case(
        ModelConfig(family="flux", path="tiny:flux", height=512, width=512),
        {
            "num_layers": 19,
            "num_single_layers": 38,
            "attention_head_dim": 128,
            "num_attention_heads": 24,
            "joint_attention_dim": 4096,
            "pooled_projection_dim": 768,
            "axes_dims_rope": (16, 56, 56),
        },
        rank=64,
        micro_batch=4,
    ),
    "Wan2.1-T2V-1.3B": Case(
        ModelConfig(family="wan", path="tiny:wan", height=480, width=832, frames=33),
        {
            "num_layers": 30,
            "num_attention_heads": 12,
            "attention_head_dim": 128,
            "ffn_dim": 8960,
            "text_dim": 4096,
            "freq_dim": 256,
            "rope_max_seq_len": 1024,
        },
        rank=64,
        micro_batch=2,
    ),
}

#: The same models at the sizes of the tiny checkpoints.
QUICK = {
    "FLUX.1-dev": Case(
        ModelConfig(family="flux", path="tiny:flux", height=32, width=64, max_sequence_length=16), {}, 4, 2
    ),
    "Wan2.1-T2V-1.3B": Case(
        ModelConfig(family="wan", path="tiny:wan", height=32, width=48, frames=5, max_sequence_length=16), {}, 4, 2
    ),
}


@dataclass(frozen=True)
class Row:
    """One model.

    Attributes:
        model: which.
        parameters: of its transformer.
        flops: of one forward of a micro-batch.
        train: samples/s and bytes of the train step.
        rollout: samples/s of rollout.
        train_mfu, rollout_mfu: share of the device's peak; None: its peak is not known.
    """

    model: str
    parameters: int
    flops: float
    train: train_step.Row
    rollout: rollout.Row
    train_mfu: float | None
    rollout_mfu: float | None


def measure(name: str, case: Case, device: str, peak: float | None, repeats: int) -> Row:
    """One model, made on the device."""
    config = case.config
    model = blank_model(config, device, case.transformer)
    policy, geometry = policy_of(model, case.rank, device), Geometry(config.height, config.width, config.frames)
    policy.bind(policy.initial_adapter(), 0)
    with FlopCounterMode(display=False) as counter:
        rollout_pass(policy, config, case.micro_batch, model.latent_shape(geometry))
    flops = float(counter.get_total_flops())
    size, trained = case.micro_batch, train_step.TRAINED
    train = train_step.measure(model, policy, geometry, size, trained=trained, repeats=repeats, device=device)
    rolled = rollout.measure(model, policy, geometry, size, repeats, device)
    train_s, step_s = size / train.ours, size / rolled.ours / rollout.STEPS
    return Row(
        name,
        sum(p.numel() for p in model.transformer.parameters()),
        flops,
        train,
        rolled,
        FORWARDS * flops * trained / train_s / peak if peak else None,
        flops / step_s / peak if peak else None,
    )


def table(rows: Sequence[Row]) -> str:
    """What people read."""
    header = ["model", "B parameters", "train, samples/s", "against the loop", "train MFU", "peak, GB"]
    header += ["rollout, samples/s", "against the pipeline", "rollout MFU"]

    def share(found: float | None) -> str:
        return "unknown" if found is None else f"{found:.1%}"

    cells = [
        [
            row.model,
            f"{row.parameters / 1e9:.2f}",
            f"{row.train.ours:.3g}",
            f"{row.train.ours / row.train.published:.2f} x",
            share(row.train_mfu),
            f"{row.train.ours_bytes / 1e9:.1f}",
            f"{row.rollout.ours:.3g}",
            f"{row.rollout.ours / row.rollout.pipeline:.2f} x",
            share(row.rollout_mfu),
        ]
        for row in rows
    ]
    return aligned(header, cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table; without a GPU say why not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, once")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu only with --quick")
    options = parser.parse_args(argv)
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu: real sizes need a GPU; add --quick for tiny ones")
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"not measured: torch {torch.__version__} sees no CUDA device here")
        return
    device_name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    peak = next((flops for part, flops in PEAKS.items() if part in device_name), None)
    cases, repeats = (QUICK, 1) if options.quick else (CASES, 3)
    rows = []
    for name, case in cases.items():
        rows.append(measure(name, case, options.device, peak, repeats))
        if options.device == "cuda":
            torch.cuda.empty_cache()
    print(f"on {device_name}\n\n{table(rows)}")
    if options.json:
        found = {"device": device_name, "peak_flops": peak, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
