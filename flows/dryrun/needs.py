"""What a run needs of real hardware, as far as that follows from its sizes.

needs_of(config) -> Needs | None     None: its checkpoint is not among those whose sizes are known
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from digenrl.config import RunConfig
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.workloads import Workload
from flows.plan.costs import GAP_S
from flows.plan.memory import GIB, USABLE, need_of
from flows.plan.published import workload_of
from flows.plan.schedules import Planner, schedule_of
from flows.plan.subject import subject_from

#: Memory of a GPU in GB (10⁹ bytes) -> some that have it.
GPUS = {24: "RTX 4090, L4", 48: "L40S, RTX A6000", 80: "A100, H100", 141: "H200", 180: "B200"}
#: GPUs for which the time of an iteration is predicted.
FLEET = 8
#: Bytes of a parameter of the text encoders and the VAE, which mostly are the former.
_HALF = 2


@dataclass(frozen=True)
class Needs:
    """Of one worker, and of an iteration.

    Attributes:
        rollout_bytes: to roll out a micro-batch.
        train_bytes: to train one timestep of a micro-batch at a time.
        beside_bytes: text encoders and VAE, for as long as they are on the device.
        download_bytes: of the checkpoint, at two bytes a parameter.
        device: name of the GPU that time is predicted for.
        iteration_s: predicted for FLEET of them, rewards left out; None: the run does not fit its memory.
        trainers: how many of them train.
    """

    rollout_bytes: float
    train_bytes: float
    beside_bytes: float
    download_bytes: float
    device: str
    iteration_s: float | None
    trainers: int


def needs_of(config: RunConfig) -> Needs | None:
    """Estimate it."""
    workload = workload_of(config)
    if workload is None:
        return None
    beside = _HALF * workload.checkpoint.other_parameters
    download = _HALF * (workload.model.parameters + workload.checkpoint.other_parameters)
    roomy = replace(workload, device=replace(workload.device, memory_bytes=1e15))
    need = need_of(subject_from("", config, roomy))
    assert need is not None, "sizes of a workload are known"
    iteration_s, trainers = _predicted(config, workload)
    device = workload.device.name
    return Needs(need.rollout, need.train(1), beside, download, device, iteration_s, trainers)


def _predicted(config: RunConfig, workload: Workload) -> tuple[float | None, int]:
    """Seconds of an iteration, and trainers, at the split that is best if nobody ever waits."""
    try:
        subject = subject_from("", config, workload)
    except ValueError:  # of memory
        return None, 0
    model = workload.cost_model(subject.shape, GAP_S)
    planner = Planner(model, (Pool(model.kinds[0], FLEET),), config.algorithm.closing_scope)
    planned = planner.staffed(schedule_of(subject))
    return planned.prediction.iteration_s, len(planned.trainers)


def smallest_gpu(needed: float) -> str:
    """The smallest common GPU with so much memory to plan with."""
    for size, names in GPUS.items():
        if needed <= USABLE * size * 1e9:
            return f"{size} GB ({names})"
    return f"more than {max(GPUS)} GB"


def gib(size: float) -> str:
    """Bytes for people."""
    return f"{size / GIB:.0f} GiB" if size >= 9.95 * GIB else f"{size / GIB:.1f} GiB"
