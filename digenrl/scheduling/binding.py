"""What keeps a schedule from being faster, in one word and one sentence.

    binding(prediction, trainers) -> Binding

The rule: a role that is busy throughout binds, by its rate. Else it is what trainers wait for, as rollout workers wait
for them; but if that is samples, neither binds the other, and it is the barrier between iterations. Without roles it is
what most of the devices' idle time waits for.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from digenrl.scheduling.bubbles import Cause, by_cause
from digenrl.scheduling.predict import Prediction

Constraint = Literal[
    "rollout rate",
    "train rate",
    "device time",
    "samples",
    "updates barrier",
    "std scope",
    "reward",
    "orchestration",
    "draining",
]

#: Busy for more than this share of the time is busy throughout.
_THROUGHOUT = 0.95

_OF_CAUSE: dict[Cause, Constraint] = {
    "samples": "samples",
    "weights": "updates barrier",
    "reward": "reward",
    "std scope": "std scope",
    "orchestration": "orchestration",
    "draining": "draining",
    "end": "samples",
}

_WHY: dict[Constraint, str] = {
    "samples": "devices wait for samples that others still generate",
    "updates barrier": "at the ends of an iteration, rollout waits for new weights and training for new samples",
    "reward": "devices wait for rewards",
    "std scope": "devices wait until all samples are scored over which the standard deviation is taken",
    "orchestration": "devices wait between units, for dispatch, role switches and copies",
    "draining": "devices wait for workers that leave",
}


@dataclass(frozen=True)
class Binding:
    """What binds, and the same as the rest of a sentence."""

    constraint: Constraint
    why: str


@dataclass(frozen=True)
class Load:
    """How some workers spend the window: share busy, and idle by cause."""

    busy: float
    idle: dict[Cause, float]

    @property
    def cause(self) -> Cause:
        """What they wait for most."""
        return max(self.idle, key=lambda name: self.idle[name])

    @property
    def waits(self) -> str:
        """The same in words."""
        share = self.idle[self.cause]
        return f"wait for {self.cause} {share:.0%} of it" if share >= 0.005 else "wait for nothing"


def load_of(prediction: Prediction, workers: Collection[str]) -> Load:
    """How these workers spend the window."""
    begin, end = prediction.window
    total = (end - begin) * max(len(workers), 1)
    idle = by_cause([b for b in prediction.bubbles if b.lane == "device" and b.worker in workers], prediction.window)
    shares = {cause: seconds / total for cause, seconds in idle.items()}
    return Load(1 - math.fsum(shares.values()), shares)


def binding(prediction: Prediction, trainers: Collection[str]) -> Binding:
    """The constraint that binds.

    Args:
        prediction: of the schedule.
        trainers: workers whose role is to train; none: there are no roles.
    """
    rolling = prediction.kinds.keys() - set(trainers)
    if not rolling or not trainers:
        return _of_all(prediction)
    train, roll = load_of(prediction, trainers), load_of(prediction, rolling)
    if min(train.busy, roll.busy) > _THROUGHOUT:
        return _of_all(prediction)
    if roll.busy > _THROUGHOUT:
        return Binding("rollout rate", f"rollout workers are busy {roll.busy:.0%} of the time, trainers {train.waits}")
    if train.busy > _THROUGHOUT:
        return Binding("train rate", f"trainers are busy {train.busy:.0%} of the time, rollout workers {roll.waits}")
    constraint = _OF_CAUSE[train.cause]
    if constraint == "samples" and roll.cause == "weights":
        constraint = "updates barrier"
    roles = f"trainers are busy {train.busy:.0%} and {train.waits}, rollout workers {roll.busy:.0%} and {roll.waits}"
    return Binding(constraint, f"{_WHY[constraint]}: {roles}")


def _of_all(prediction: Prediction) -> Binding:
    every = load_of(prediction, prediction.kinds)
    if every.busy > _THROUGHOUT:
        share = f"all devices are busy {every.busy:.0%} of the time"
        return Binding("device time", f"{share}: only more, faster or less work per device helps")
    constraint = _OF_CAUSE[every.cause]
    return Binding(constraint, f"{_WHY[constraint]} ({every.idle[every.cause]:.0%} of all device time)")
