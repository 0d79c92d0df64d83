"""What a replica holds that can travel: references to it, and its form on the wire.

A thing is a description and named tensors. It travels as one Parcel: a LoRA has hundreds of small tensors, and sending
each on its own costs ten times as much as sending their bytes together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from digenrl.policy import Adapter
from digenrl.scheduling.messages import Ref
from digenrl.trajectory import Trajectory

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, order=True)
class TrainerStateRef:
    """Adapter, behaviour policy and optimiser state of `theta`: what a lead trainer continues from."""

    theta: int


HeldRef = Ref | TrainerStateRef


@dataclass(frozen=True)
class Parcel:
    """Something on its way between processes.

    Attributes:
        meta: its description.
        layout: name, dtype and shape of each tensor, in the order of their bytes.
        data: (bytes,) uint8, all tensors one after the other.
    """

    meta: Any
    layout: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, meta: Any, tensors: Tensors) -> Parcel:
        """Copy tensors from whatever device into one."""
        # Wide types first: then every tensor starts at a multiple of its own item size.
        items = sorted(tensors.items(), key=lambda item: -item[1].element_size())
        layout = tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in items)
        parts = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for _, tensor in items]
        return cls(meta, layout, torch.cat(parts).numpy() if parts else np.empty(0, np.uint8))

    def tensors(self) -> Tensors:
        """The tensors, on the CPU; they share the parcel's memory."""
        data = torch.from_numpy(self.data if self.data.flags.writeable else self.data.copy())
        found, start = {}, 0
        for name, dtype, shape in self.layout:
            end = start + math.prod(shape) * dtype.itemsize
            found[name] = data[start:end].view(dtype).reshape(shape)
            start = end
        return found


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


class State(NamedTuple):
    """Weights of one theta, apart from those they were made from. Empty: there are none.

    Attributes:
        adapter: what is trained.
        behaviour: what generates samples, where it is not the adapter.
        average: what is evaluated, where it is not the adapter and the optimiser's state does not come along.
        optimizer: its state, where it comes along.
    """

    adapter: Adapter
    behaviour: Adapter
    average: Adapter
    optimizer: Tensors


def join_state(
    adapter: Adapter,
    behaviour: Adapter | None = None,
    average: Adapter | None = None,
    optimizer: Tensors | None = None,
) -> Tensors:
    """Weights and what goes with them under one roof; see `State`."""
    parts = State(adapter, behaviour or {}, average or {}, optimizer or {})._asdict()
    return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def split_state(tensors: Tensors) -> State:
    """Inverse of join_state."""
    parts: dict[str, Tensors] = {part: {} for part in State._fields}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        if part in parts:
            parts[part][name] = tensor
    return State(**parts)
