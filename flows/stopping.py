"""How a run is asked to end early: SIGINT, SIGTERM, or a cancellation in Prefect.

async with stopping(flow_run_id) as stop:
    stop.then(engine.stop)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from uuid import UUID

from prefect import get_client

logger = logging.getLogger(__name__)

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

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` when the end is asked for; at once if it has been already."""
        self._actions.append(action)
        if self.requested:
            action()


@contextlib.asynccontextmanager
async def stopping(flow_run_id: UUID) -> AsyncIterator[Stop]:
    """Within it, the first signal and a cancellation in Prefect request the stop; a second signal acts as usual.

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
    """Within it, the first SIGINT or SIGTERM requests the stop and puts the handlers back."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def received(number: signal.Signals) -> None:
        restore()
        stop.request(number.name)

    for number in before:
        loop.add_signal_handler(number, received, number)
    try:
        yield
    finally:
        restore()


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
