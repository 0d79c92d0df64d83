"""The training run as a Prefect flow.

The flow opens the cluster and lets the engine work; what is shown, tracked and saved hangs on the engine as listeners.
It ends as Completed, as Cancelled (from the UI, SIGINT or SIGTERM: with a checkpoint; or by the guard: with its last
good one), or as Failed with a sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from uuid import UUID

from prefect import flow, get_client
from prefect.exceptions import ObjectNotFound
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed, State
from prefect.utilities.urls import url_for

from digenrl.guard.watch import Verdict
from flows.flowlog import flow_log
from flows.history import History
from flows.session import Result, Session
from flows.stopping import Stop, stopping
from storage.home import home
from storage.runs import RunDirectory
from workers.cluster import keep_no_more, open_cluster
from workers.engine import Engine
from workers.listener import Listener

logger = logging.getLogger(__name__)

#: How often the flow looks whether its servers answer.
SERVERS_POLL_S = 0.1


@dataclass
class Watch:
    """A process that runs the flow and watches it. The flow's own parameters must be JSON.

    Attributes:
        listeners: hear what the engine says.
        phase: hears what goes on before and after the iterations.
        notice: takes a line that stays: where the pages are, that a stop was heard.
        resumed: hears the history of the attempts before this one.
        judged: hears what the guard thinks of each evaluation.
        pending: services that the run needs and that do not answer yet.
        prefect_degraded_s: seconds that Prefect has been without an answer so far.
        result: what the flow left, set at its end.
        failure: what ended it; Prefect may fail at handing that on.
    """

    listeners: tuple[Listener, ...] = ()
    phase: Callable[[str], None] = field(default=lambda text: None)
    notice: Callable[[str], None] = field(default=lambda text: None)
    resumed: Callable[[History], None] = field(default=lambda history: None)
    judged: Callable[[Verdict], None] = field(default=lambda verdict: None)
    pending: Callable[[], list[str]] = field(default=list)
    prefect_degraded_s: Callable[[], float] = field(default=lambda: 0.0)
    result: Result | None = None
    failure: Exception | None = None


WATCH: ContextVar[Watch | None] = ContextVar("digenrl_watch", default=None)


@flow(name="train", flow_run_name="{run_name}", persist_result=False, validate_parameters=False, retries=0)
async def training(run_name: str, resume: bool = False) -> State[None]:
    """Train one run whose directory exists.

    Args:
        run_name: the run's directory below DIGENRL_HOME; it holds config.yaml.
        resume: continue from the newest whole checkpoint; from the start if there is none.
    """
    watch = WATCH.get() or Watch()
    page = url_for("flow-run", UUID(flow_run.id))  # flow_run.ui_url is an address that the pages only redirect
    session = Session(
        RunDirectory.open(home(), run_name),
        resume=resume,
        flow_run_id=str(flow_run.id),
        prefect_page=page,
        watchers=watch.listeners,
        judged=watch.judged,
        prefect_degraded_s=watch.prefect_degraded_s,
    )
    watch.resumed(session.history)
    if page is not None:
        watch.notice(f"Prefect  {page}")
    await _bury(session.previous_flow_run_id)
    session.write_summary()
    status, flow_run_id = "failed", UUID(session.flow_run_id)
    with flow_log(flow_run_id):
        async with stopping(flow_run_id) as stop:
            stop.then(lambda: watch.notice(_acknowledgement(session)))
            try:
                status = await _train(session, watch, stop)
            except Exception as error:
                watch.failure = error
                raise
            finally:
                _say(watch, "finishing")
                watch.result = await session.close(status)
    iterations = watch.result.summary["iterations"]
    if status == "completed":
        return Completed(message=f"{iterations} iterations")
    if session.guard_stop is not None:
        return Cancelled(name="Stopped by guard", message=session.guard_stop.reason)
    return Cancelled(message=f"stopped after {iterations} iterations; continue with: digenrl resume {run_name}")


async def _train(session: Session, watch: Watch, stop: Stop) -> str:
    """Open everything side by side, run the engine; completed, cancelled or guarded."""
    _say(watch, "starting workers")
    settled = asyncio.Event()
    tracking = asyncio.create_task(_open_tracking(session, watch, stop, settled))
    try:
        async with contextlib.AsyncExitStack() as opened:
            client = await stop.unless(opened.enter_async_context(open_cluster(session.config.cluster)))
            if client is not None:
                stop.then(lambda: keep_no_more(client))
                await stop.unless(session.settle(client))
                settled.set()
                await stop.unless(tracking)
            if client is None or stop.requested:
                return "cancelled"
            engine: Engine = session.engine(client)
            stop.then(engine.stop)
            finished = await engine.run()
            if session.guard_stop is not None:
                return "guarded"
            return "completed" if finished else "cancelled"
    finally:
        tracking.cancel()


async def _open_tracking(session: Session, watch: Watch, stop: Stop, settled: asyncio.Event) -> None:
    """Open the MLflow run once its server answers and its parameters are settled, unless the run is to stop before."""
    while watch.pending() and not stop.requested:
        await asyncio.sleep(SERVERS_POLL_S)
    await settled.wait()
    if not stop.requested:
        await session.open_tracker()
        if session.mlflow_page is not None:
            watch.notice(f"MLflow   {session.mlflow_page}")


def _acknowledgement(session: Session) -> str:
    """What happens now that a stop was asked for."""
    if not session.is_training:
        return "stopping: nothing was trained yet (Ctrl-C again to end at once)"
    return "stopping: running units are finished, then a checkpoint is saved (Ctrl-C again to give up on that)"


async def _bury(flow_run_id: str | None) -> None:
    """Mark the flow run of an attempt that was killed as Crashed; nobody else could."""
    if flow_run_id is None or flow_run_id == str(flow_run.id):
        return
    async with get_client() as client:
        try:
            left = await client.read_flow_run(UUID(flow_run_id))
            if left.state is None or not left.state.is_final():
                await client.set_flow_run_state(
                    left.id, Crashed(message="its process ended; resumed since"), force=True
                )
        except (ObjectNotFound, OSError) as error:  # it was recorded by another server
            logger.info("the flow run before this one, %s, was not looked up: %s", flow_run_id, error)


def _say(watch: Watch, phase: str) -> None:
    logger.info("%s", phase)
    watch.phase(phase)
