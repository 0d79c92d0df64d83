"""Where work runs: a local cluster of worker processes, or a Dask scheduler by address.

async with open_cluster(config) as client: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator

import dask
from distributed import Client, LocalCluster

from digenrl.config import ClusterConfig
from workers import forkserver
from workers.checks import ClusterError, check_cluster
from workers.forkserver import ENVIRONMENT

logger = logging.getLogger(__name__)

#: A worker's threads: one for the device lane, one for the cpu lane.
LANES = 2

#: How long the worker processes of a local cluster may take to start, and to end.
START_S = 120.0
START_EACH_S = 3.0
CLOSE_S = 6.0

#: How long a Dask scheduler may take to answer.
CONNECT_S = 5.0


@contextlib.asynccontextmanager
async def open_cluster(config: ClusterConfig) -> AsyncIterator[Client]:
    """An asynchronous client of the configured cluster; what was started is stopped at the end.

    It may be cancelled while it opens, and then kills the workers that were starting.

    Raises:
        ClusterError: nothing answers at the address, or its processes do not match this environment.
    """
    settings = {
        "distributed.scheduler.worker-ttl": f"{config.worker_ttl_s}s",
        "distributed.worker.multiprocessing-method": forkserver.METHOD,
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        # So long after a loss a local cluster looks, once, and gives a worker up for good if it is not there: it may be
        # starting again after another loss. A nanny that cannot start its worker gives up by itself.
        "distributed.deploy.lost-worker-timeout": "7 days",
        # Units may hold the GIL for a while (model loading); this only silences the log line about it.
        "distributed.admin.tick.limit": "30s",
    }
    with dask.config.set(settings):
        opened = _local_cluster(config) if config.address == "local" else _remote_cluster(config.address)
        async with opened as client:
            yield client


@contextlib.asynccontextmanager
async def _local_cluster(config: ClusterConfig) -> AsyncIterator[Client]:
    forkserver.start(ENVIRONMENT)
    cluster = LocalCluster(
        n_workers=config.workers,
        threads_per_worker=LANES,
        processes=True,
        host="127.0.0.1",
        # Port 0: with no address at all, Dask takes 8787 and warns if it is taken.
        dashboard_address="127.0.0.1:0",
        scheduler_kwargs={"dashboard": False},
        memory_limit=0,
        # The server they are forked from may be older than a change of this process's environment.
        env={**os.environ, **ENVIRONMENT},
        preload=["workers.preload"],
        asynchronous=True,
        silence_logs=40,
    )
    starting = asyncio.ensure_future(cluster)
    try:
        await _wait_for_workers(starting, config.workers)
        client = await Client(cluster, asynchronous=True)
        try:
            yield client
        finally:
            await client.close()  # not `async with`: who leaves may be in another context than who entered
    finally:
        await _close(cluster, starting)


async def _wait_for_workers(starting: asyncio.Future[LocalCluster], workers: int) -> None:
    """Wait until the workers have started; a cancellation leaves `starting` to the caller."""
    limit_s = START_S + START_EACH_S * workers
    await asyncio.wait([starting], timeout=limit_s)
    if not starting.done():
        raise ClusterError(
            f"cluster.workers={workers}: not all of them had started within {limit_s:.0f} s; "
            "use fewer, or leave them more CPU and memory"
        )
    try:
        starting.result()
    except (RuntimeError, OSError) as error:
        raise ClusterError(f"cluster.workers={workers}: a worker could not be started: {error}") from error


async def _close(cluster: LocalCluster, starting: asyncio.Future[LocalCluster]) -> None:
    """End the workers in good order, or kill them where Dask would wait for what never comes."""
    if starting.done() and not starting.cancelled() and starting.exception() is None:
        closing = asyncio.ensure_future(cluster.close())
        await asyncio.wait([closing], timeout=CLOSE_S)
        if closing.done():
            return closing.result()
        closing.cancel()
    # Dask cannot close a cluster that is starting, and waits for ever for a worker whose process never came up.
    starting.cancel()
    logger.info("the worker processes are killed")
    cluster.shutdown_on_close = False  # Dask would try again when the interpreter exits
    forkserver.kill()


def keep_no_more(client: Client) -> None:
    """Start no worker again that is lost from now on: the run is about to end."""
    if isinstance(client.cluster, LocalCluster):
        for nanny in client.cluster.workers.values():
            nanny.close_gracefully()


@contextlib.asynccontextmanager
async def _remote_cluster(address: str) -> AsyncIterator[Client]:
    client = Client(address, asynchronous=True, timeout=CONNECT_S)
    try:
        async with asyncio.timeout(CONNECT_S + 1):  # something else may listen there and never answer
            await client
    except (OSError, ValueError, TimeoutError) as error:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.close(), 1)
        raise ClusterError(
            f"cluster.address={address}: no Dask scheduler answers there within {CONNECT_S:.0f} s ({error}); "
            "start one with 'dask scheduler', or use cluster.address=local"
        ) from error
    try:
        await check_cluster(client, LANES)
        yield client
    finally:
        await client.close()
