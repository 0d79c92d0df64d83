"""What a replica holds that can travel: references to it, and its form on the wire.

A thing travels as a description, which is pickled, and named tensors, which are not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from digenrl.policy import Adapter
from digenrl.scheduling.messages import Ref
from digenrl.trajectory import Trajectory

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, order=True)
class TrainerStateRef:
    """Adapter and optimiser state of `theta`: what a lead trainer continues from."""

    theta: int


HeldRef = Ref | TrainerStateRef


@dataclass(frozen=True)
class FinishedRollout:
    """A complete rollout: what training and scoring need."""

    trajectory: Trajectory
    images: NDArray[np.uint8]


def pack_rollout(done: FinishedRollout) -> tuple[Any, Tensors]:
    """A rollout as (description, tensors)."""
    values = {f.name: getattr(done.trajectory, f.name) for f in fields(Trajectory)}
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    rest = {name: value for name, value in values.items() if name not in tensors}
    return rest, {**tensors, "images": torch.from_numpy(done.images)}


def unpack_rollout(meta: Any, tensors: Tensors) -> FinishedRollout:
    """Inverse of pack_rollout."""
    images = tensors.pop("images").numpy()
    return FinishedRollout(Trajectory(**meta, **tensors), images)


def join_state(adapter: Adapter, optimizer: Tensors) -> Tensors:
    """Adapter and optimiser tensors under one roof."""
    return {
        **{f"adapter/{name}": tensor for name, tensor in adapter.items()},
        **{f"optimizer/{name}": tensor for name, tensor in optimizer.items()},
    }


def split_state(tensors: Tensors) -> tuple[Adapter, Tensors]:
    """Inverse of join_state."""
    adapter = {n.removeprefix("adapter/"): t for n, t in tensors.items() if n.startswith("adapter/")}
    optimizer = {n.removeprefix("optimizer/"): t for n, t in tensors.items() if n.startswith("optimizer/")}
    return adapter, optimizer
