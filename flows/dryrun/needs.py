"""What a run needs of real hardware, as far as that follows from its sizes.

needs_of(config) -> Needs | None     None: its checkpoint is not among those whose sizes are known
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from digenrl.scheduling.bound import Pool
from flows.plan.costs import GAP_S
from flows.plan.memory import GIB, USABLE, need_of
from flows.plan.published import workload_of
from flows.plan.schedules import Planner, schedule_of
from flows.plan.subject import subject_from

#: Memory of a GPU in GB (10⁹ bytes) -> some that have it.
GPUS = {24: "RTX 4090, L4", 48: "L40S, RTX A6000", 80: "A100, H100", 141: "H200", 180: "B200"}
#: GPUs for which the time of an iteration is predicted.
FLEET = 8
_UNLIMITED = 1e15
#: Bytes of a parameter of the text encoders and the VAE, which mostly are the former.
_HALF = 2


@dataclass(frozen=True)
class Memory:
    """Bytes of one worker, and of the checkpoint.

    Attributes:
        rollout: to roll out a micro-batch.
        train: to train one timestep of a micro-batch at a time.
        beside: text encoders and VAE, for as long as they are on the device.
        download: of the checkpoint, at two bytes a parameter.
    """

    rollout: float
    train: float
    beside: float
    download: float

    @property
    def most(self) -> float:
        """Of a worker that does both."""
        return max(self.rollout, self.train) + self.beside


@dataclass(frozen=True)
class Pace:
    """How long an iteration takes.

    Attributes:
        device: name of the GPU, of which there are FLEET.
        iteration_s: predicted, rewards left out; None: a micro-batch does not fit its memory.
        trainers: how many of them train.
    """

    device: str
    iteration_s: float | None
    trainers: int = 0


def memory_of(config: RunConfig) -> Memory | None:
    """Estimate it; None if the checkpoint is not among those whose sizes are known."""
    workload = workload_of(config)
    if workload is None:
        return None
    roomy = replace(workload, device=replace(workload.device, memory_bytes=_UNLIMITED))
    need = need_of(subject_from("", config, roomy))
    assert need is not None, "sizes of a workload are known"
    other = workload.checkpoint.other_parameters
    return Memory(need.to_roll_out, need.train(1), _HALF * other, _HALF * (workload.model.parameters + other))


def pace_of(config: RunConfig) -> Pace | None:
    """Predict it, at the role split that is best if nobody ever waits; None as for `memory_of`."""
    workload = workload_of(config)
    if workload is None:
        return None
    try:
        subject = subject_from("", config, workload)
    except ConfigError:  # of memory
        return Pace(workload.device.name, None)
    model = workload.cost_model(subject.shape, GAP_S)
    planner = Planner(model, (Pool(model.kinds[0], FLEET),), config.algorithm.closing_scope)
    planned = planner.staffed(schedule_of(subject))
    return Pace(workload.device.name, planned.prediction.iteration_s, len(planned.trainers))


def smallest_gpu(needed: float) -> int | None:
    """GB of the smallest common GPU with so many bytes to plan with; None: there is none."""
    return next((size for size in GPUS if needed <= USABLE * size * 1e9), None)


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:.0f} GiB" if size >= 9.95 * GIB else f"{size / GIB:.1f} GiB"
