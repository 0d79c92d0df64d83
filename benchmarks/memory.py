"""The memory model against what allocators report, on sizes where it exceeds 256 MB.

    python benchmarks/memory.py --json memory.json      (about six minutes; --quick: one family, one unit)

Every case is a random model of a family, wider and deeper than the tiny one, in a process of its own. Its rollout step,
its training pass (one and three timesteps, with and without gradient checkpointing) and its decoding are traced without
data, and its optimiser's states counted, then run for real. The peak above the loaded process is
torch.cuda.max_memory_allocated on a GPU; on the CPU it is the sum of what torch's profiler saw the allocator give and
take back, and the growth of the process's resident memory stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# What is measured is the checkout this file lies in, here and in every process started from here.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.overhead_tables import aligned
from benchmarks.sides import peak_bytes, resident_bytes
from digenrl.algorithms.accumulate import Accumulator
from digenrl.algorithms.optimizer import OptimizerState, adamw_step
from digenrl.config import LoraConfig, ModelConfig, OptimizerConfig
from digenrl.config.load import load_config
from digenrl.memory import adapter_copies, rollout_pass, trace, train_pass
from digenrl.models.base import Geometry
from digenrl.models.blank import blank_model
from digenrl.policy import Policy

#: Below it, what a library holds for itself counts for too much.
LEAST_BYTES = 256e6

LORA = LoraConfig(rank=32, alpha=32)
#: For the optimiser's memory to be measurable.
WIDE = LoraConfig(rank=512, alpha=512)


@dataclass(frozen=True)
class Case:
    """A family at a size.

    Attributes:
        model: family, geometry.
        transformer: fields of the tiny checkpoint's transformer that differ.
        micro_batch: samples.
    """

    model: ModelConfig
    transformer: dict[str, Any]
    micro_batch: int


@dataclass(frozen=True)
class Row:
    """One unit of one case; bytes above the loaded process.

    Attributes:
        family, unit: which.
        predicted: by the memory model.
        measured: by the allocator.
        resident: growth of the process's resident memory; 0 on a GPU.
    """

    family: str
    unit: str
    predicted: float
    measured: float
    resident: float

    @property
    def off(self) -> float:
        """Share of what was measured by which the prediction differs."""
        return self.predicted / self.measured - 1


def cases() -> dict[str, Case]:
    """By name: family, and what is different about it."""
    tall = {"height": 512, "width": 512}
    film = {"height": 128, "width": 128, "frames": 17}

    def of(family: str, size: dict[str, int], micro_batch: int, **transformer: Any) -> Case:
        path = "package:tiny-sd3" if family == "sd3" else f"tiny:{family}"
        return Case(ModelConfig(family=family, path=path, dtype="float32", **size), transformer, micro_batch)

    head = {"attention_head_dim": 64, "num_attention_heads": 8}
    rope = {"axes_dims_rope": (16, 24, 24)}
    return {
        "flux": of("flux", tall, 1, num_layers=2, num_single_layers=4, **head, **rope),
        "qwen": of("qwen", tall, 1, num_layers=4, **head, **rope),
        "wan": of("wan", film, 2, num_layers=4, ffn_dim=1024, **head),
        "hunyuan": of("hunyuan", film, 2, num_layers=2, num_single_layers=2, rope_axes_dim=(16, 24, 24), **head),
        "sd3": of(
            "sd3",
            {"height": 128, "width": 128},
            2,
            num_layers=4,
            caption_projection_dim=512,
            pos_embed_max_size=64,
            **head,
        ),
    }


def measure(name: str, device: str, *, quick: bool = False) -> list[Row]:
    """All units of a case in this process; `quick`: one training pass only."""
    case = cases()[name]
    rows = []
    for checkpointing in (True,) if quick else (False, True):
        config = case.model.model_copy(update={"gradient_checkpointing": checkpointing})
        traced = trace(config, LORA, case.micro_batch, device, case.transformer)
        model = blank_model(config, device, case.transformer)
        policy = Policy(model, LORA, seed=0, device=device)
        policy.bind(policy.initial_adapter(), 0)
        shape = model.latent_shape(Geometry(config.height, config.width, config.frames))
        size = case.micro_batch
        word = "recomputed" if checkpointing else "kept"
        units: dict[str, tuple[float, Callable[[], object]]] = {
            f"train {n} timestep{'s' * (n > 1)}, activations {word}": (
                traced.train_fixed + n * traced.train_timestep,
                partial(train_pass, policy, config, n * size, shape),
            )
            for n in ((1,) if quick else (1, 3))
        }
        if checkpointing and not quick:
            units["rollout step"] = traced.rollout, partial(rollout_pass, policy, config, size, shape)
            latents = torch.zeros((size, *shape), device=device)
            held = adapter_copies(load_config("tiny-smoke", ["algorithm.updates_per_iteration=1"]), device) - 1
            wide = Policy(blank_model(config, device, case.transformer), WIDE, seed=0, device=device)
            adapter = sum(parameter.nbytes for parameter in wide.trainable().values())
            units[f"optimiser step, LoRA rank {WIDE.rank}"] = held * adapter, partial(update_pass, wide)
            units["decode"] = traced.decode, partial(model.decode, latents)
        rows += [_row(name, unit, predicted, work, device) for unit, (predicted, work) in units.items()]
    return rows


def update_pass(policy: Policy) -> object:
    """A trainer's state and one optimiser step on it; the bound adapter is in the model already."""
    weights = policy.initial_adapter()
    state = OptimizerState.initial(weights)
    sums: Accumulator[int] = Accumulator(weights)
    sums.add(0, policy.trainable())
    return adamw_step(weights, sums.gradient(), state, OptimizerConfig(), 1e-3), weights, state, sums


def _row(family: str, unit: str, predicted: float, work: Callable[[], object], device: str) -> Row:
    resident = 0.0 if device == "cuda" else resident_bytes(work)
    return Row(family, unit, predicted, peak_bytes(work, device), resident)


def table(rows: Sequence[Row]) -> str:
    """What people read."""
    cells = [
        [
            row.family,
            row.unit,
            *(f"{b / 1e6:,.0f}" for b in (row.predicted, row.measured, row.resident)),
            f"{row.off:+.1%}" if row.measured >= LEAST_BYTES else f"({row.off:+.1%})",
        ]
        for row in rows
    ]
    return aligned(["family", "unit", "predicted, MB", "allocator, MB", "resident, MB", "off"], cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every case in its own process, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure")
    parser.add_argument("--quick", action="store_true", help="one family, one unit")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--case", choices=list(cases()), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        torch.set_num_threads(1)
        print(json.dumps([asdict(row) for row in measure(options.case, options.device, quick=options.quick)]))
        return
    rows = []
    for name in ["wan"] if options.quick else cases():
        command = [sys.executable, __file__, "--case", name, "--device", options.device]
        # What is freed goes back to the system at once, so that resident memory can be read.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONSAFEPATH": "1"}
        done = subprocess.run(
            [*command, *(["--quick"] if options.quick else [])], env=environment, stdout=subprocess.PIPE, check=True
        )
        rows += [Row(**row) for row in json.loads(done.stdout.splitlines()[-1])]
        print(f"{name}: done", file=sys.stderr)
    print(table(rows))
    counted = [abs(row.off) for row in rows if row.measured >= LEAST_BYTES]
    if counted:
        print(f"\n{len(counted)} units above {LEAST_BYTES / 1e6:.0f} MB, at most {max(counted):.1%} off")
    if options.json:
        options.json.write_text(json.dumps([{**asdict(row), "off": row.off} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
