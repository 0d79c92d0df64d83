"""One Prefect task per kind of unit.

A task run here computes nothing: it is open while the unit is, and ends as the unit ends. Prefect's caching and result
storage are off, since both would hash or pickle what passes by.
"""

from __future__ import annotations

import asyncio

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.states import Cancelled, State

from workers.receipts import Receipt

KINDS = ("rollout", "score", "train", "update", "evaluate", "micro-batch", "iteration", "checkpoint")


async def _watch(label: str, outcome: asyncio.Future[Receipt | None]) -> State[None] | None:
    """Open until the unit ends; raises what the unit raised, so that a failed unit shows as Failed."""
    await asyncio.wait([outcome])
    if outcome.cancelled():
        return Cancelled(message="withdrawn")
    outcome.result()
    return None


def _observer(kind: str) -> Task[..., State[None] | None]:
    return task(
        name=kind,
        task_run_name="{label}",
        description=f"Observes {kind} units; Dask workers compute them.",
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=0,
        log_prints=False,
    )(_watch)


OBSERVERS: dict[str, Task[..., State[None] | None]] = {kind: _observer(kind) for kind in KINDS}
