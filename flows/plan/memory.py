"""What a worker's memory must hold, for a plan, and what fits.

    need_of(subject) -> Need | None      None: the checkpoint is not on this machine, so its size is not known

Of a checkpoint that is here the units are traced (digenrl.memory). Of a workload only numbers are known: its
activations follow the formula of digenrl.scheduling.roofline, per token and hidden element 34 bytes in one block and 2
more for each block, for two bytes a number.
"""

from __future__ import annotations

from digenrl import memory
from digenrl.memory import USABLE, Need
from digenrl.scheduling.roofline import Derivation
from flows.plan.subject import Subject

__all__ = ["GIB", "USABLE", "Need", "need_of"]

GIB = 2**30

_BLOCK_BYTES = 34


def need_of(subject: Subject) -> Need | None:
    """The estimate for one worker."""
    if subject.workload is not None:
        return _of_workload(subject, subject.workload.derivation())
    return memory.need_of(subject.config)


def _of_workload(subject: Subject, derived: Derivation) -> Need:
    workload = subject.workload
    assert workload is not None
    model, training, run = workload.model, workload.training, workload.run
    shards = training.shards if training.method == "full" else 1
    width = (workload.geometry.tokens + (0 if model.cross_blocks else model.text_tokens)) * model.hidden
    weights = 2 * model.parameters / shards
    return Need(
        base=weights,
        states=derived["states"] - weights,
        trajectories=0,
        rollout=_BLOCK_BYTES * width * run.micro_batch * run.guidance_passes,
        fixed=0,
        timestep=derived["activations"] * run.micro_batch,
        has=workload.device.memory_bytes,
    )
