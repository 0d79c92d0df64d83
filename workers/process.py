"""The replica of this process, by the run's epoch."""

from __future__ import annotations

import time
from typing import Any

import torch
from distributed.protocol import to_serialize
from distributed.utils import offload

from workers import tensors as tensors  # registers how they travel, in every process that may send or receive them
from workers.held import HeldRef, Parcel
from workers.receipts import Readiness, RunSetup
from workers.replica import Replica

_REPLICAS: dict[str, Replica] = {}


def build(setup: RunSetup, incarnation: str) -> Readiness:
    """Make this process's replica for a run; the replica of any earlier run is freed."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    if setup.epoch not in _REPLICAS:
        _REPLICAS.clear()
        _REPLICAS[setup.epoch] = Replica(setup, incarnation)
    kind = torch.cuda.get_device_name() if setup.config.cluster.device == "cuda" else "cpu"
    return Readiness(incarnation, kind, frozenset({"rollout", "train", "score"}), time.perf_counter() - began)


def current(epoch: str) -> Replica:
    """The replica of a run.

    Raises:
        LookupError: this process serves another run, or none.
    """
    try:
        return _REPLICAS[epoch]
    except KeyError:
        raise LookupError(
            f"this worker has no replica of run {epoch}; it serves {sorted(_REPLICAS) or 'no run'}"
        ) from None


def discard(epoch: str) -> None:
    """Free the replica of a run."""
    _REPLICAS.pop(epoch, None)


async def fetch_handler(epoch: str, ref: HeldRef) -> dict[str, Any]:
    """Answer another worker's fetch."""
    replica = _REPLICAS.get(epoch)
    if replica is None or not replica.holds(ref):
        return {"missing": True}
    return {"parcel": to_serialize(await offload(parcel_of, replica, ref))}


def parcel_of(replica: Replica, ref: HeldRef) -> Parcel:
    """What a replica holds, ready to travel."""
    return Parcel.of(*replica.load(ref))
