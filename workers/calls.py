"""What the engine asks of a worker. Every function is sent by reference and must stay importable on workers.

    prepare, execute                            Dask tasks, in a slot of the worker
    control(...)                                on the worker's event loop, beside its slots, one of:
    initialise, install, pull, merge, export

Data moves peer to peer: the engine names a source, the target fetches from it and checks a hash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from distributed import Worker, get_worker
from distributed.comm import CommClosedError
from distributed.protocol import to_serialize
from distributed.utils import offload

from digenrl.algorithms.streaming import Closings
from digenrl.scheduling.messages import AccumulatorRef
from digenrl.scheduling.units import TrainUnit
from workers import process
from workers.held import HeldRef, Parcel
from workers.presence import incarnation_of
from workers.receipts import Assignment, Drops, Readiness, Receipt, RunSetup


class WrongWorkerError(RuntimeError):
    """A unit reached a process or a run it was not meant for."""


def prepare(setup: RunSetup) -> Readiness:
    """Build the replica of a run on this worker. Repeating it for the same epoch is free."""
    incarnation = incarnation_of(get_worker())
    return process.build(setup, incarnation)


def execute(assignment: Assignment) -> Receipt:
    """Run one unit."""
    incarnation = incarnation_of(get_worker())
    if incarnation != assignment.run.worker:
        raise WrongWorkerError(f"{assignment.run.unit.label} is for {assignment.run.worker}, this is {incarnation}")
    return process.current(incarnation, assignment.epoch).run(assignment)


async def control(
    epoch: str, drops: Drops, call: Callable[..., Awaitable[Any]], *arguments: Any, dask_worker: Worker
) -> Any:
    """Forget what is to be forgotten, then do `call(epoch, *arguments)` on this worker's event loop."""
    _replica(epoch, dask_worker).drop(drops)
    return await call(epoch, *arguments, dask_worker)


async def initialise(epoch: str, dask_worker: Worker) -> str:
    """Make theta 0 with a fresh optimiser from the run's seed; returns its content hash."""
    return await offload(_replica(epoch, dask_worker).initialise)


async def install(epoch: str, ref: HeldRef, parcel: Parcel, expected_hash: str, dask_worker: Worker) -> None:
    """Store what the driver sends along; refused if its hash differs from `expected_hash` (empty: unchecked)."""
    await offload(_replica(epoch, dask_worker).store, ref, parcel.meta, parcel.tensors(), expected_hash)


async def pull(epoch: str, ref: HeldRef, source: str, expected_hash: str, dask_worker: Worker) -> None:
    """Fetch `ref` from the worker at address `source` and store it.

    Raises:
        OSError: the source is gone or does not hold it; nothing is stored.
        ValueError: the hash differs; nothing is stored.
    """
    parcel = await _fetch(epoch, ref, source, dask_worker)
    await offload(_replica(epoch, dask_worker).store, ref, parcel.meta, parcel.tensors(), expected_hash)


async def merge(
    epoch: str,
    ref: AccumulatorRef,
    source: str,
    expected: frozenset[TrainUnit],
    closings: Closings,
    dask_worker: Worker,
) -> None:
    """Fetch an accumulator from `source`, fold its closed groups and add it to this worker's, whole or not at all.

    Raises:
        OSError: as `pull`.
        ValueError: it does not hold exactly `expected`.
    """
    parcel = await _fetch(epoch, ref, source, dask_worker)
    await offload(_replica(epoch, dask_worker).merge, ref.theta, parcel.meta, parcel.tensors(), expected, closings)


async def _fetch(epoch: str, ref: HeldRef, source: str, dask_worker: Worker) -> Parcel:
    try:
        reply = await dask_worker.rpc(source).digenrl_fetch(epoch=epoch, ref=to_serialize(ref))
    except CommClosedError as error:
        raise OSError(f"{source} closed the connection before {ref} had arrived") from error
    if reply.get("missing"):
        raise OSError(f"{source} does not hold {ref}")
    parcel: Parcel = reply["parcel"]
    return parcel


async def export(epoch: str, ref: HeldRef, dask_worker: Worker) -> Parcel:
    """Hand `ref` to the driver."""
    return await offload(process.parcel_of, _replica(epoch, dask_worker), ref)


def retire(epoch: str, dask_worker: Worker) -> None:
    """Free the replica of a run that ended."""
    process.discard(incarnation_of(dask_worker), epoch)


def _replica(epoch: str, worker: Worker) -> process.Hosted:
    return process.current(incarnation_of(worker), epoch)
