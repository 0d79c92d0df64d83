"""Does a cluster that somebody else started fit this process?

Compared are scheduler and workers with this process: Python minor version and the versions of the packages that
exchange pickled objects or numbers. What is missing is named within seconds instead of failing later in a unit.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from distributed import Client

from workers.presence import Environment, environment_here

#: Importing torch and this package for the first time takes a busy worker seconds.
ANSWER_S = 30.0


class ClusterError(RuntimeError):
    """The cluster cannot run this; the message says what is missing and what to do."""


async def check_cluster(client: Client, lanes: int) -> None:
    """Compare this environment with the scheduler's and every worker's.

    Args:
        client: asynchronous client of the cluster.
        lanes: threads a worker should have.

    Raises:
        ClusterError: no workers, or a process without DigenRL, or with another Python, torch, dask or DigenRL.
    """
    address = client.scheduler.address
    workers = list(await client.nthreads())
    if not workers:
        raise ClusterError(
            f"cluster.address={address}: the Dask scheduler there has no workers; start one with "
            f"'dask worker {address} --nthreads {lanes}' in an environment that has digenrl"
        )
    here = environment_here()
    _compare(f"the Dask scheduler at {address}", await _ask(client.run_on_scheduler(environment_here)), here)
    found = await _ask(client.run(environment_here, on_error="return"))
    answers = found if isinstance(found, dict) else dict.fromkeys(workers, found)
    for worker, answer in sorted(answers.items()):
        _compare(f"the worker at {worker}", answer, here)


async def _ask(question: Any) -> Any:
    """The answer, or the exception that came instead."""
    try:
        return await asyncio.wait_for(question, ANSWER_S)
    except TimeoutError:
        return TimeoutError(f"no answer within {ANSWER_S:.0f} s")
    except Exception as error:
        return error


def _compare(who: str, found: Environment | BaseException, here: Environment) -> None:
    if isinstance(found, BaseException):
        # Dask wraps what goes wrong while a question is unpickled.
        if missing := re.search(r"No module named '?([\w.]+)", str(found)):
            raise ClusterError(
                f"{who} has no module {missing[1]}: start it in an environment that has digenrl "
                f"{here.versions['digenrl']}"
            )
        raise ClusterError(f"{who} cannot run DigenRL: {type(found).__name__}: {found}")
    if found.python != here.python:
        raise ClusterError(f"{who} runs Python {found.python}, this process {here.python}: use the same minor version")
    for package, version in here.versions.items():
        if found.versions[package] != version:
            raise ClusterError(
                f"{who} has {package} {found.versions[package]}, this process has {version}: "
                f"install {package}=={version} there"
            )
