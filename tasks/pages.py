"""A page of its own in Prefect for each detailed iteration: a subflow whose task runs are the iteration's units.

In the page of the training run a detailed iteration is one node; opening it shows the DAG of its units and no other.
An async subflow costs some 0.2 s of waiting, off the engine's path, which is why other iterations have none.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar
from uuid import UUID

from prefect import flow
from prefect.context import FlowRunContext

T = TypeVar("T")


class Page:
    """A subflow that stays open until `close`. Make it inside the training flow.

    Args:
        label: name of the subflow run, e.g. `iteration 10`.

    Attributes:
        flow_run_id: of the subflow run, None until Prefect has made it.
    """

    def __init__(self, label: str) -> None:
        loop = asyncio.get_running_loop()
        self._context: asyncio.Future[contextvars.Context] = loop.create_future()
        self._closed: asyncio.Future[None] = loop.create_future()
        self._on_it: set[asyncio.Task[Any]] = set()
        self.flow_run_id: UUID | None = None
        self._flow = asyncio.create_task(self._run(label))

    async def put(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine within the subflow: task runs it makes are on this page."""
        await asyncio.wait([self._context, self._flow], return_when=asyncio.FIRST_COMPLETED)
        if not self._context.done():
            # Prefect did not make the subflow run; its exception says why.
            work.close()
            self._flow.result()
            raise RuntimeError("the subflow ended before its page was there")
        task = asyncio.create_task(work, context=self._context.result().copy())
        self._on_it.add(task)
        return await task

    async def close(self) -> None:
        """Wait for everything on the page, then end the subflow."""
        if self._on_it:
            await asyncio.wait(self._on_it)
        self._closed.set_result(None)
        await self._flow

    async def _run(self, label: str) -> None:
        @flow(name="iteration", flow_run_name=label, persist_result=False, validate_parameters=False, log_prints=False)
        async def iteration() -> None:
            """The units of one RL iteration, as Dask workers compute them."""
            context = FlowRunContext.get()
            if context is not None and context.flow_run is not None:
                self.flow_run_id = context.flow_run.id
            self._context.set_result(contextvars.copy_context())
            await asyncio.wait([self._closed])

        await iteration()
