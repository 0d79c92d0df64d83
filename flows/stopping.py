"""How a run is asked to end early: SIGINT, SIGTERM, SIGHUP (its terminal was closed), or a cancellation in Prefect.

async with stopping(flow_run_id) as stop:
    client = await stop.unless(opening)     # None if the end was asked for meanwhile
    stop.then(engine.stop)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType
from typing import TypeVar
from uuid import UUID

from prefect import get_client

from flows.signals import SIGNALS, let_go_of_terminal, survives

logger = logging.getLogger(__name__)

#: `timeout` sends its signal twice, to the process and to its group: what comes so soon is no second request.
SAME_S = 1.0

T = TypeVar("T")

#: How often Prefect is asked whether the flow run was cancelled.
POLL_S = 2.0


class Stop:
    """Whether the run is to end early, and what is to be done about it."""

    def __init__(self) -> None:
        self.requested = False
        self._actions: list[Callable[[], None]] = []

    def request(self, cause: str) -> None:
        """Ask for the end; only the first time counts.

        Args:
            cause: for the log.
        """
        if self.requested:
            return
        logger.info("asked to stop by %s", cause)
        self.requested = True
        for action in self._actions:
            action()

    async def unless(self, work: Awaitable[T]) -> T | None:
        """The result of `work`; None if it was cancelled because the end was asked for before it was there."""
        task = asyncio.ensure_future(work)
        self.then(task.cancel)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        return None if task.cancelled() else task.result()

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when the end is asked for; at once if it has been already."""
        self._actions.append(action)
        if self.requested:
            action()


@contextlib.asynccontextmanager
async def stopping(flow_run_id: UUID) -> AsyncIterator[Stop]:
    """Within it, the first signal and a cancellation in Prefect request the stop; a later signal acts as usual.

    Enter it inside the flow: Prefect handles SIGTERM itself until then.
    """
    stop = Stop()
    polling = asyncio.create_task(_poll(flow_run_id, stop))
    try:
        with signals(stop):
            yield stop
    finally:
        polling.cancel()


@contextlib.contextmanager
def signals(stop: Stop) -> Iterator[None]:
    """Within it, the first of `SIGNALS` requests the stop; from `SAME_S` later on a signal does what it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS if not survives(number)}
    asked = math.inf

    def received(number: signal.Signals) -> None:
        nonlocal asked
        if asked < math.inf:
            return
        asked = time.monotonic()
        for other in before:
            signal.signal(other, again)
        if number is signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)  # kernel and shell both send it, at any distance
            let_go_of_terminal()
        stop.request(number.name)

    def again(number: int, _frame: FrameType | None) -> None:
        if time.monotonic() - asked > SAME_S:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)

    for number in before:
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


async def _poll(flow_run_id: UUID, stop: Stop) -> None:
    """Request the stop once the flow run is Cancelling; a server that does not answer is asked again."""
    async with get_client() as client:
        while not stop.requested:
            await asyncio.sleep(POLL_S)
            try:
                run = await client.read_flow_run(flow_run_id)
            except Exception as error:
                logger.info("Prefect does not say whether the run was cancelled: %s", error)
                continue
            if run.state is not None and (run.state.is_cancelling() or run.state.is_cancelled()):
                stop.request("a cancellation in Prefect")
