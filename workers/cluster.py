"""Where work runs: a local cluster of spawned processes, or a Dask scheduler by address.

async with open_cluster(config) as client: ...
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import AsyncIterator

import dask
from distributed import Client, LocalCluster

from digenrl.config import ClusterConfig
from workers.presence import WorkerCard, card, local_versions

#: One compute thread per process: two workers with two OpenMP threads each on two cores are several times slower.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NUMEXPR_NUM_THREADS": "1"}

#: A worker's threads: one for the device lane, one for the cpu lane.
LANES = 2


class ClusterError(RuntimeError):
    """The cluster cannot run this; the message says what is missing and what to do."""


@contextlib.asynccontextmanager
async def open_cluster(config: ClusterConfig) -> AsyncIterator[Client]:
    """An asynchronous client of the configured cluster; what was started is stopped at the end.

    Raises:
        ClusterError: nothing answers at the address, or its workers do not match this environment.
    """
    settings = {
        "distributed.scheduler.worker-ttl": f"{config.worker_ttl_s}s",
        "distributed.worker.memory.target": False,
        "distributed.worker.memory.spill": False,
        "distributed.worker.memory.pause": False,
        "distributed.worker.memory.terminate": False,
        # Units may hold the GIL for a while (model loading); this only silences the log line about it.
        "distributed.admin.tick.limit": "30s",
    }
    with dask.config.set(settings):
        if config.address == "local":
            async with _local_cluster(config) as client:
                yield client
            return
        try:
            client = await Client(config.address, asynchronous=True, timeout="5s")
        except OSError as error:
            raise ClusterError(
                f"cluster.address={config.address}: no Dask scheduler answers there within 5 s ({error}); "
                "start one with 'dask scheduler', or use cluster.address=local"
            ) from error
        try:
            await check_workers(client)
            yield client
        finally:
            await client.close()


@contextlib.asynccontextmanager
async def _local_cluster(config: ClusterConfig) -> AsyncIterator[Client]:
    environment = {**THREADS, "PYTHONSAFEPATH": "1", "TOKENIZERS_PARALLELISM": "false"}
    previous = {name: os.environ.get(name) for name in environment}
    # Spawned processes read these before they import torch; the nanny's own `env` would come after.
    os.environ.update(environment)
    try:
        async with (
            LocalCluster(
                n_workers=config.workers,
                threads_per_worker=LANES,
                processes=True,
                host="127.0.0.1",
                dashboard_address=None,
                memory_limit=0,
                asynchronous=True,
                silence_logs=40,
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            yield client
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def check_workers(client: Client) -> None:
    """Compare this environment with every worker's.

    Raises:
        ClusterError: no workers, or one with another Python minor, torch, dask or digenrl version.
    """
    cards: dict[str, WorkerCard] = await client.run(card)
    if not cards:
        raise ClusterError(
            f"the Dask scheduler at {client.scheduler.address} has no workers; start one with "
            f"'dask worker {client.scheduler.address} --nthreads {LANES}' in an environment that has digenrl"
        )
    python, here = f"{sys.version_info.major}.{sys.version_info.minor}", local_versions()
    for found in cards.values():
        if found.python != python:
            raise ClusterError(f"{found.address} runs Python {found.python}, this process {python}: use the same minor")
        for package, version in here.items():
            if found.versions[package] != version:
                raise ClusterError(
                    f"{found.address} has {package} {found.versions[package]}, this process {version}: "
                    f"install {package}=={version} there"
                )
