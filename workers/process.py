"""The replicas of this process: one per Dask worker in it, for one run at a time.

A process is usually one worker. Emulated devices (workers/emulated.py) are many workers in one process.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import torch
from distributed.protocol import to_serialize
from distributed.utils import offload

from digenrl import runspec
from digenrl.algorithms.streaming import Closings
from digenrl.memory import capabilities, need_of
from digenrl.policy import Policy
from digenrl.profile import Profile, measure
from digenrl.rewards.base import PromptRecord
from digenrl.scheduling.messages import Capability
from digenrl.scheduling.units import TrainUnit
from workers import tensors as tensors  # registers how they travel, in every process that may send or receive them
from workers.held import HeldRef, Parcel, Tensors
from workers.receipts import Assignment, Drops, Readiness, Receipt, RunSetup
from workers.replica import Replica, device_kind, load_policy


class Hosted(Protocol):
    """What a worker needs of its replica; `workers.replica.Replica` says what each method does."""

    setup: RunSetup

    @property
    def kind(self) -> str:
        """Type of the device."""

    def run(self, assignment: Assignment) -> Receipt:
        """Run a unit."""

    def initialise(self) -> str:
        """Make theta 0."""

    def holds(self, ref: HeldRef) -> bool:
        """Whether `load` would succeed."""

    def load(self, ref: HeldRef) -> tuple[Any, Tensors]:
        """Something, to be sent elsewhere."""

    def store(self, ref: HeldRef, meta: Any, tensors: Tensors, expected_hash: str) -> None:
        """Keep what arrived."""

    def merge(
        self, theta: int, state: Any, tensors: Tensors, expected: frozenset[TrainUnit], closings: Closings
    ) -> None:
        """Add another worker's accumulator to this one's."""

    def drop(self, drops: Drops) -> None:
        """Forget things."""


_REPLICAS: dict[str, Hosted] = {}

#: Incarnation -> epoch and policy: loaded for a profile, and taken over by the replica that is built next.
_LOADED: dict[str, tuple[str, Policy]] = {}


def profile(setup: RunSetup, incarnation: str, prompts: tuple[PromptRecord, ...], everything: bool) -> Profile:
    """Time the units of a run that is about to begin; see `digenrl.profile.measure`."""
    torch.set_num_threads(1)
    _REPLICAS.pop(incarnation, None)
    policy = load_policy(setup.config)
    _LOADED[incarnation] = setup.epoch, policy
    run_shape = runspec.shape(setup.config, setup.held_out, setup.start_iteration)
    return measure(device_kind(setup.config), policy, setup.config, run_shape, prompts, everything=everything)


def build(setup: RunSetup, incarnation: str) -> Readiness:
    """Make a worker's replica for a run; its replica of any earlier run is freed."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    if find(incarnation, setup.epoch) is None:
        _REPLICAS.pop(incarnation, None)
        epoch, policy = _LOADED.pop(incarnation, ("", None))
        if setup.replica is not None:
            _REPLICAS[incarnation] = setup.replica(setup, incarnation)
        else:
            _REPLICAS[incarnation] = Replica(setup, incarnation, policy if epoch == setup.epoch else None)
    kind = _REPLICAS[incarnation].kind
    return Readiness(incarnation, kind, _able(setup), time.perf_counter() - began)


def _able(setup: RunSetup) -> frozenset[Capability]:
    """What the device's memory allows. That of a CPU is shared with whatever else runs there, so nothing is refused."""
    if setup.replica is not None or setup.config.cluster.device == "cpu":
        return capabilities(None, 1, None)
    shape = runspec.shape(setup.config, setup.held_out, setup.start_iteration)
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return capabilities(need_of(setup.config), shape.timestep_batch, memory)


def find(incarnation: str, epoch: str) -> Hosted | None:
    """A worker's replica of a run, if it has one."""
    replica = _REPLICAS.get(incarnation)
    return replica if replica is not None and replica.setup.epoch == epoch else None


def current(incarnation: str, epoch: str) -> Hosted:
    """A worker's replica of a run.

    Raises:
        LookupError: the worker serves another run, or none.
    """
    replica = find(incarnation, epoch)
    if replica is None:
        other = _REPLICAS.get(incarnation)
        serves = "no run" if other is None else other.setup.epoch
        raise LookupError(f"this worker has no replica of run {epoch}; it serves {serves}")
    return replica


def discard(incarnation: str, epoch: str) -> None:
    """Free a worker's replica of a run."""
    if find(incarnation, epoch) is not None:
        del _REPLICAS[incarnation]


def fetch_handler(incarnation: str) -> Callable[..., Awaitable[dict[str, Any]]]:
    """What answers other workers' fetches from the worker `incarnation`."""

    async def fetch(epoch: str, ref: HeldRef) -> dict[str, Any]:
        replica = find(incarnation, epoch)
        if replica is None or not replica.holds(ref):
            return {"missing": True}
        return {"parcel": to_serialize(await offload(parcel_of, replica, ref))}

    return fetch


def parcel_of(replica: Hosted, ref: HeldRef) -> Parcel:
    """What a replica holds, ready to travel."""
    return Parcel.of(*replica.load(ref))
