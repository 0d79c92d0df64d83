"""`digenrl train` and `digenrl resume`."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from digenrl.config import RunConfig
from digenrl.config_errors import ConfigError
from digenrl.configure import load_config, warnings_of
from digenrl.preflight import check
from flows.errors import ExpectedError
from flows.logs import redirect_libraries, run_log
from flows.services.handle import ServicesHandle, ensure, release
from storage.home import home
from storage.runs import RunDirectory
from workers import forkserver

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from flows.session import Result
    from flows.training import Watch

#: Longest wait for Prefect to record what the run emitted, before its server may stop.
DRAIN_S = 30.0
#: The same after Ctrl-C: whoever asked for the end is waiting for it.
CANCELLED_DRAIN_S = 4.0


def run(preset: str, overrides: Sequence[str], *, name: str | None, prefect_api: str | None) -> None:
    """Check, claim a run directory, train."""
    config = load_config(preset, overrides)
    api = prefect_address(prefect_api)
    notes = [*warnings_of(config), *check(config, home())]
    directory = RunDirectory.create(home(), preset, config, name)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    execute(directory, config, resume=False, api=api)


def resume(run_name: str, *, prefect_api: str | None) -> None:
    """Continue a run that ended early."""
    directory = RunDirectory.open(home(), run_name)
    config = directory.read_config()
    summary = directory.read_summary() or {}
    if summary.get("status") == "completed":
        raise ConfigError(
            f"the run {run_name!r} is complete ({summary['iterations']} iterations); nothing is left to resume"
        )
    if config.stale_groups > 0:
        raise ConfigError(
            f"schedule.stale_fraction={config.schedule.stale_fraction}: a run with stale groups cannot be resumed yet, "
            "since its checkpoints hold one version of the weights only; train again under another name"
        )
    check(config, home())
    execute(directory, config, resume=True, api=prefect_address(prefect_api))


def prefect_address(choice: str | None) -> str | None:
    """API URL of a Prefect server that is not ours, None for ours.

    Raises:
        ConfigError: it is no URL, or PREFECT_API_URL is not set.
    """
    if choice is None:
        return None
    if choice == "current":
        if not os.environ.get("PREFECT_API_URL"):
            raise ConfigError("--prefect-api current: PREFECT_API_URL is not set; set it or give the URL itself")
        return os.environ["PREFECT_API_URL"]
    if not choice.startswith(("http://", "https://")):
        raise ConfigError(
            f"--prefect-api {choice}: expected 'current' or the API's URL, such as http://127.0.0.1:4200/api"
        )
    return choice


def execute(directory: RunDirectory, config: RunConfig, *, resume: bool, api: str | None) -> None:
    """Run the flow in this process, with the servers it needs, and show it."""
    # SIGTERM before and after the flow is a Ctrl-C; the flow has its own handlers.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with directory.held(), run_log(directory.log_path):
        if config.cluster.address == "local":
            os.environ["DIGENRL_WORKER_LOG"] = str(directory.log_path)
            forkserver.start(forkserver.ENVIRONMENT)  # the workers' imports go on beside the servers' start and ours
        with services(directory.name, config, api) as handle:
            failure, result = _show(directory, config, resume, handle)
            if result is not None and handle is not None and "prefect" in handle.urls:
                _drain(handle, result)
        if failure is not None:
            logger.info("see %s", directory.log_path)
            raise failure
        if result is not None and result.summary["status"] == "cancelled":
            raise typer.Exit(130)


def _show(
    directory: RunDirectory, config: RunConfig, resume: bool, handle: ServicesHandle | None
) -> tuple[BaseException | None, Result | None]:
    """Run the flow behind a progress display; what it raised, and what it left."""
    # After the environment is set: Prefect reads it when it is imported.
    from flows.progress import Progress
    from flows.report import show_summary
    from flows.training import Watch

    redirect_libraries()
    logger.info("%s run %s in process %d", "resuming" if resume else "starting", directory.name, os.getpid())
    console = Console(soft_wrap=True)  # paths and addresses are there to be copied
    progress = Progress(directory.name, config.iterations, console)
    watch = Watch((progress,), progress.phase, handle.pending if handle is not None else list)
    with progress:
        if handle is not None and "prefect" in handle.urls:
            progress.phase("starting the Prefect server" if len(handle.urls) == 1 else "starting Prefect and MLflow")
            handle.wait(services=("prefect",))
        failure = asyncio.run(_flow(directory.name, resume, watch))
    if watch.result is not None and failure is None:
        show_summary(console, watch.result.summary, watch.result.pictures, watch.result.places)
    return failure, watch.result


async def _flow(run_name: str, resume: bool, watch: Watch) -> BaseException | None:
    from flows.training import WATCH, training

    WATCH.set(watch)
    state = await training(run_name=run_name, resume=resume, return_state=True)
    if state.is_failed() or state.is_crashed():
        error = await state.aresult(raise_on_failure=False)
        return error if isinstance(error, Exception) else ExpectedError(state.message or "the run failed")
    return None


@contextmanager
def services(run_name: str, config: RunConfig, api: str | None) -> Iterator[ServicesHandle | None]:
    """The servers a run needs, started if they do not run; the environment points to them on entry."""
    wanted = [] if api is not None else ["prefect"]
    if config.tracking.uri == "managed":
        wanted.append("mlflow")
    handle = ensure(tuple(wanted), owner=f"train {run_name}", home=home(), wait=False) if wanted else None
    os.environ["DIGENRL_HOME"] = str(home())
    if handle is not None:
        os.environ.update(handle.client_env())
    if api is not None:
        os.environ["PREFECT_API_URL"] = api
    try:
        yield handle
    finally:
        if handle is not None:
            logger.info("giving the servers back")
            others = release(handle)
            if others:
                typer.echo(f"the servers go on running for {', '.join(others)}", err=True)


def _drain(handle: ServicesHandle, result: Result) -> None:
    from flows.services.drain import drain_prefect

    emitted = result.task_runs
    limit_s = CANCELLED_DRAIN_S if result.summary["status"] == "cancelled" else DRAIN_S
    logger.info("waiting until Prefect has recorded %d task runs", emitted)
    recorded = drain_prefect(handle.prefect_api, result.flow_runs, emitted, limit_s)
    if recorded < emitted:
        typer.echo(f"note: Prefect recorded {recorded} of {emitted} task runs within {limit_s:.0f} s", err=True)
