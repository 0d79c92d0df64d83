"""Units: the smallest pieces of work the scheduler places on a worker.

Units are canonical. They are cut from the run's shape by identity, never by worker count, role, arrival or attempt,
so a unit that is done again elsewhere gives the same bits.

    RolloutUnit  denoising steps [first, last) of one micro-batch; the last one also decodes
    ScoreUnit    the rewards of one micro-batch
    TrainUnit    one gradient contribution: one micro-batch x one batch of trained timesteps
    UpdateUnit   one optimiser step, on the lead trainer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from digenrl.identity import MicroBatchId

Lane = Literal["device", "cpu"]


@dataclass(frozen=True, order=True, slots=True)
class RolloutUnit:
    """Denoising steps [first, last) of a micro-batch. Evaluation micro-batches are rolled out by it too."""

    micro_batch: MicroBatchId
    first: int
    last: int
    lane: ClassVar[Lane] = "device"

    @property
    def label(self) -> str:
        """Short name for people: `rollout i10 m3 t4` or `rollout i10 m3 t0-9`."""
        steps = f"t{self.first}" if self.last == self.first + 1 else f"t{self.first}-{self.last - 1}"
        return f"rollout {self.micro_batch.label} {steps}"


@dataclass(frozen=True, order=True, slots=True)
class ScoreUnit:
    """Rewards of a whole micro-batch. Runs beside the device."""

    micro_batch: MicroBatchId
    lane: ClassVar[Lane] = "cpu"

    @property
    def label(self) -> str:
        """Short name for people."""
        return f"score {self.micro_batch.label}"


@dataclass(frozen=True, order=True, slots=True)
class TrainUnit:
    """Gradient of one micro-batch at the trained timesteps `steps`, one batched forward and backward."""

    micro_batch: MicroBatchId
    steps: tuple[int, ...]
    lane: ClassVar[Lane] = "device"

    @property
    def label(self) -> str:
        """Short name for people: `train i10 m3 t2` or `train i10 m3 t2,3,4`."""
        return f"train {self.micro_batch.label} t{','.join(map(str, self.steps))}"


@dataclass(frozen=True, order=True, slots=True)
class UpdateUnit:
    """The optimiser step that makes `theta` from `theta - 1`."""

    theta: int
    lane: ClassVar[Lane] = "device"

    @property
    def label(self) -> str:
        """Short name for people."""
        return f"update theta {self.theta}"


Unit = RolloutUnit | ScoreUnit | TrainUnit | UpdateUnit
