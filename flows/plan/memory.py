"""What a worker's memory must hold, as an estimate from sizes, and what fits.

    need_of(subject) -> Need | None      None: the checkpoint is not on this machine, so its size is not known

Weights and states are counted; activations follow the formula of digenrl.scheduling.roofline: per token and hidden
element 34 bytes in one block, and 2 more for each block if activations are recomputed (34 for each if not), for two
bytes a number.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from digenrl.models.checkpoint import CheckpointError, locate
from digenrl.models.registry import family_of
from digenrl.scheduling.roofline import Derivation
from flows.plan.subject import Subject

#: Share of the memory that may be planned with; the rest is fragmentation and workspace.
USABLE = 0.9
GIB = 2**30

#: Weight, gradient and two moments of a trained parameter in float32, and its float64 sum over units.
_TRAINED_BYTES = 4 * 4 + 8
_VERSION_BYTES = 4
_BLOCK_BYTES, _KEPT_BYTES = 34, 2


@dataclass(frozen=True)
class Need:
    """Bytes on one worker.

    Attributes:
        rollout: weights and one block's activations of a micro-batch.
        states: weights and what training keeps.
        timestep: activations of one trained timestep of a micro-batch.
        has: memory of a worker of the reference kind; None: not known.
    """

    rollout: float
    states: float
    timestep: float
    has: float | None

    def train(self, timestep_batch: int) -> float:
        """Training with so many timesteps in one unit."""
        return self.states + timestep_batch * self.timestep

    def most_timesteps(self, memory: float) -> int:
        """The largest timestep batch that fits into so much memory."""
        return max(0, int((USABLE * memory - self.states) // self.timestep))


def need_of(subject: Subject) -> Need | None:
    """The estimate for one worker."""
    if subject.workload is not None:
        return _of_workload(subject, subject.workload.derivation())
    try:
        place = Path(locate(subject.config.model.path))
    except CheckpointError:
        return None
    return _of_folder(subject, place) if place.is_dir() else None


def _of_workload(subject: Subject, derived: Derivation) -> Need:
    workload = subject.workload
    assert workload is not None
    model, training = workload.model, workload.training
    shards = training.shards if training.method == "full" else 1
    width = (workload.geometry.tokens + (0 if model.cross_blocks else model.text_tokens)) * model.hidden
    block = _BLOCK_BYTES * width * workload.run.micro_batch * workload.run.guidance_passes
    weights = 2 * model.parameters / shards
    timestep = derived["activations"] * workload.run.micro_batch
    return Need(weights + block, derived["states"], timestep, workload.device.memory_bytes)


def _of_folder(subject: Subject, folder: Path) -> Need | None:
    model, lora = subject.config.model, subject.config.adapter
    try:
        transformer = json.loads((folder / "transformer" / "config.json").read_bytes())
        vae = json.loads((folder / "vae" / "config.json").read_bytes())
        weights = {name: shape for path in folder.glob("*/*.safetensors") for name, shape in _headers(path)}
        hidden = transformer["num_attention_heads"] * transformer["attention_head_dim"]
        family = family_of(model.family)
        rule = family.sizes(vae, transformer)
    except (OSError, ValueError, KeyError):
        return None
    number = 4 if model.dtype == "float32" else 2
    own = {name: shape for name, shape in weights.items() if name.startswith("transformer/")}
    if lora is None:
        trained = sum(math.prod(shape) for shape in own.values())
    else:
        trained = sum(lora.rank * sum(shape) for name, shape in own.items() if _is_adapted(name, shape, lora.targets))
    frozen = number * sum(math.prod(shape) for shape in weights.values())
    tokens = rule.tokens(model.height, model.width, model.frames) + 77 + (model.max_sequence_length or 0)
    passes = 2 if model.guidance_scale > 1 and not family.distilled else 1
    width = tokens * hidden * passes * subject.config.micro_batch * number / 2
    blocks = transformer["num_layers"] + transformer.get("num_single_layers", 0)
    kept = _KEPT_BYTES * blocks + _BLOCK_BYTES if model.gradient_checkpointing else _BLOCK_BYTES * blocks
    # The weights of a version lie beside those in the model; a LoRA's are too small to count.
    version = _VERSION_BYTES * trained if lora is None else 0
    return Need(frozen + version + _BLOCK_BYTES * width, frozen + _TRAINED_BYTES * trained, kept * width, None)


def _headers(path: Path) -> list[tuple[str, Any]]:
    """(component/name, shape) of every tensor in a safetensors file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [(f"{path.parent.name}/{name}", entry["shape"]) for name, entry in header.items() if name != "__metadata__"]


def _is_adapted(name: str, shape: list[int], targets: tuple[str, ...] | None) -> bool:
    layer = name.removesuffix(".weight")
    return len(shape) == 2 and (targets is None or any(layer.endswith(f".{target}") for target in targets))
