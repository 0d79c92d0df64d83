"""What units take on the workers of a cluster, measured before a run.

    profiles = await measure(client, setup, prompts, everything=False)

A worker loads the run's model for it and keeps it: the replica that `calls.prepare` builds afterwards takes it over.
"""

from __future__ import annotations

from distributed import Client, Worker
from distributed.utils import offload

from digenrl.profile import Profile
from digenrl.rewards.base import PromptRecord
from workers import process
from workers.presence import incarnation_of
from workers.receipts import RunSetup


async def measure(
    client: Client, setup: RunSetup, prompts: tuple[PromptRecord, ...], *, everything: bool
) -> list[Profile]:
    """One profile per worker, by address; a worker that cannot be measured has none.

    Args:
        client: asynchronous client of the cluster.
        setup: the run as far as it is settled. The run itself must have the same epoch, model and adapter.
        prompts: of its first micro-batch.
        everything: see `digenrl.profile.measure`.
    """
    found = await client.run(_measure, setup, prompts, everything, on_error="ignore")
    return [found[address] for address in sorted(found)]


async def _measure(
    setup: RunSetup, prompts: tuple[PromptRecord, ...], everything: bool, dask_worker: Worker
) -> Profile:
    # Loading takes a while: the worker's event loop must go on.
    return await offload(process.profile, setup, incarnation_of(dask_worker), prompts, everything)
