"""The training run as a Prefect flow.

The flow opens the cluster and lets the engine work; what is shown, tracked and saved hangs on the engine as listeners.
It ends as Completed, as Cancelled (from the UI, SIGINT or SIGTERM: with a checkpoint), or as Failed with a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from prefect import flow, get_client
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, State

from flows.session import Result, Session
from storage.home import home
from storage.runs import RunDirectory
from workers.cluster import open_cluster
from workers.engine import Engine
from workers.listener import Listener

#: How often the flow asks Prefect whether it was cancelled.
CANCEL_POLL_S = 2.0


@dataclass
class Watch:
    """A process that runs the flow and watches it. The flow's own parameters must be JSON.

    Attributes:
        listeners: hear what the engine says.
        phase: hears what goes on before and after the iterations.
        result: what the flow left, set at its end.
    """

    listeners: tuple[Listener, ...] = ()
    phase: Callable[[str], None] = field(default=lambda text: None)
    result: Result | None = None


WATCH: ContextVar[Watch | None] = ContextVar("digenrl_watch", default=None)


@flow(name="train", flow_run_name="{run_name}", persist_result=False, validate_parameters=False, retries=0)
async def training(run_name: str, resume: bool = False) -> State[None]:
    """Train one run whose directory exists.

    Args:
        run_name: the run's directory below DIGENRL_HOME; it holds config.yaml.
        resume: continue from the newest whole checkpoint; from the start if there is none.
    """
    watch = WATCH.get() or Watch()
    session = Session(
        RunDirectory.open(home(), run_name),
        resume=resume,
        flow_run_id=str(flow_run.id),
        prefect_page=flow_run.ui_url,
        watchers=watch.listeners,
    )
    engine: Engine | None = None
    status = "failed"
    try:
        watch.phase("starting workers")
        async with open_cluster(session.config.cluster) as client:
            engine = session.engine(client)
            async with stopping(engine):
                status = "completed" if await engine.run() else "cancelled"
            watch.phase("finishing")
    finally:
        watch.result = await session.close(status, engine)
    iterations = watch.result.summary["iterations"]
    if status == "completed":
        return Completed(message=f"{iterations} iterations")
    return Cancelled(message=f"stopped after {iterations} iterations; continue with: digenrl resume {run_name}")


@contextlib.asynccontextmanager
async def stopping(engine: Engine) -> AsyncIterator[None]:
    """Within it, SIGINT, SIGTERM and a cancellation in Prefect stop the engine; a second signal acts as usual."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop() -> None:
        engine.stop()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    for number in before:
        loop.add_signal_handler(number, stop)
    polling = asyncio.create_task(_poll(engine))
    try:
        yield
    finally:
        polling.cancel()
        restore()


async def _poll(engine: Engine) -> None:
    """Stop the engine once the flow run is Cancelling; a server that does not answer is asked again."""
    async with get_client() as client:
        while True:
            await asyncio.sleep(CANCEL_POLL_S)
            with contextlib.suppress(Exception):
                run = await client.read_flow_run(flow_run.id)
                if run.state is not None and (run.state.is_cancelling() or run.state.is_cancelled()):
                    engine.stop()
                    return
