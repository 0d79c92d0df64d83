"""`digenrl train` and `digenrl resume`."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from digenrl.config.load import load_config, warnings_of
from digenrl.preflight import check
from digenrl.preflight_targets import PrefectApi, check_targets
from flows.adoption import adopted
from flows.errors import ExpectedError
from flows.logs import redirect_libraries, run_log
from flows.services.burial import bury
from flows.services.drain import drain_prefect, end_events
from flows.services.handle import ServicesHandle, ensure, release
from flows.services.lookout import Lookout, lookout
from flows.signals import interrupt_on_signals
from flows.stores import check_storage, stores_of
from storage.home import home
from storage.runs import RunDirectory
from workers import forkserver

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from flows.session import Result
    from flows.training import Watch
    from workers.listener import Listener

#: Longest wait for Prefect to record what the run emitted, before its server may stop.
DRAIN_S = 30.0
#: The same after Ctrl-C: whoever asked for the end is waiting for it.
CANCELLED_DRAIN_S = 4.0
#: Longest wait for Prefect to take the run's final state, and what it was told before.
FINAL_STATE_S = 15.0
EVENTS_S = 3.0
#: Exit code of a run that the guard stopped.
GUARDED = 3
#: How often the flow is looked at whether it is as far.
POLL_S = 0.2


def run(
    preset: str, overrides: Sequence[str], *, name: str | None, prefect_api: str | None, dry_run: bool = False
) -> None:
    """Check, claim a run directory, train; or see in a dry run how that would go.

    Raises:
        ConfigError: something is wrong with the configuration, or with the options.
    """
    config = load_config(preset, overrides)
    if dry_run:
        from flows.commands.dry_run import run as run_dry

        if unused := [option for option, given in (("--name", name), ("--prefect-api", prefect_api)) if given]:
            raise ConfigError(f"--dry-run leaves no run behind, so {unused[0]} means nothing; leave it out")
        return run_dry(preset, overrides, config)
    prefect = prefect_address(prefect_api)
    notes = [*warnings_of(config), *check(config, home())]
    check_targets(config, prefect)
    taken = check_storage(config) if config.checkpoint.credentials_block is None else []
    if name is not None and name in taken:
        _check_unused(RunDirectory(home() / name), config)
    directory = RunDirectory.create(home(), preset, config, name, taken=taken)
    for note in notes:
        typer.echo(f"note: {note}", err=True)
    execute(directory, config, resume=False, prefect=prefect)


def resume(run: str, *, prefect_api: str | None) -> None:
    """Continue a run that ended early, by its name or from where its checkpoints are."""
    directory = adopted(run) if "/" in run else RunDirectory.open(home(), run)
    config = directory.read_config()
    summary = directory.read_summary() or {}
    if summary.get("status") == "completed" and summary["iterations"] >= config.iterations:
        raise ConfigError(
            f"the run {directory.name!r} is complete ({summary['iterations']} iterations); nothing is left to resume"
        )
    prefect = prefect_address(prefect_api)
    check(config, home())
    if config.checkpoint.credentials_block is None:  # else Prefect is asked, once it runs
        check_storage(config)
        _check_resumable(directory, config)
    check_targets(config, prefect)
    execute(directory, config, resume=True, prefect=prefect)


def _check_unused(directory: RunDirectory, config: RunConfig) -> None:
    from flows.resuming import check_unused  # imports torch, which takes seconds

    check_unused(stores_of(directory, config))


def _check_resumable(directory: RunDirectory, config: RunConfig) -> None:
    from flows.resuming import check_resumable, restore  # imports torch, which takes seconds

    stores = stores_of(directory, config)
    restored = restore(stores, level=logging.INFO)  # the run itself says aloud what is damaged
    check_resumable(directory, config, stores, restored[2] if restored is not None else None)


def prefect_address(choice: str | None) -> PrefectApi | None:
    """A Prefect server that is not ours, None for ours.

    Raises:
        ConfigError: PREFECT_API_URL is not set.
    """
    if choice is None:
        return None
    if choice != "current":
        return PrefectApi(choice, f"--prefect-api {choice}")
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        raise ConfigError("--prefect-api current: PREFECT_API_URL is not set; set it or give the URL itself")
    return PrefectApi(url, f"PREFECT_API_URL={url}")


def execute(
    directory: RunDirectory,
    config: RunConfig,
    *,
    resume: bool,
    prefect: PrefectApi | None,
    watchers: Sequence[Listener] = (),
    passing: bool = False,
) -> None:
    """Run the flow in this process, with the servers it needs, and show it.

    Args:
        directory: of the run.
        config: of the run.
        resume: whether it goes on.
        prefect: a Prefect server that is not ours.
        watchers: hear what the engine says.
        passing: nothing of the run will be left, so nothing is said about what it leaves.
    """
    interrupt_on_signals()  # before and after the flow, which has its own handlers
    with directory.held(), run_log(directory.log_path):
        if config.cluster.address == "local":
            os.environ["DIGENRL_WORKER_LOG"] = str(directory.log_path)
            forkserver.start(forkserver.ENVIRONMENT)  # the workers' imports go on beside the servers' start and ours
        try:
            with services(directory.name, config, prefect.url if prefect is not None else None) as (handle, look):
                failure, result = _show(directory, config, resume, handle, look, watchers, passing)
                if result is not None and handle is not None and "prefect" in handle.urls and not passing:
                    _drain(handle, result)
                end_events(EVENTS_S)
        except KeyboardInterrupt:
            if not passing:
                typer.echo(f"interrupted; continue with: digenrl resume {directory.name}", err=True)
            raise
        if failure is not None:
            logger.info("see %s", directory.log_path)
            _mark_failed(directory)
            raise _named(failure, directory)
        if result is not None and result.summary["status"] == "cancelled":
            raise typer.Exit(130)
        if result is not None and result.summary["status"] == "guarded":
            raise typer.Exit(GUARDED)


def _mark_failed(directory: RunDirectory) -> None:
    """Let no run that failed be said to go on: its end may have failed as well."""
    with suppress(OSError):
        text = directory.summary_path.read_text()
        # In place, since a full disk has no room for another file.
        with directory.summary_path.open("r+") as file:
            file.write(text.replace('"status": "running"', '"status": "failed"', 1))
            file.truncate()


def _named(failure: BaseException, directory: RunDirectory) -> BaseException:
    """The failure; a full disk is named, which the system leaves to us."""
    if not isinstance(failure, OSError) or failure.errno not in (errno.ENOSPC, errno.EDQUOT):
        return failure
    path = failure.filename or directory.path
    return ExpectedError(
        f"cannot write {path}: {os.strerror(failure.errno).lower()}; "
        f"free some, then continue with: digenrl resume {directory.name}"
    )


def _show(
    directory: RunDirectory,
    config: RunConfig,
    resume: bool,
    handle: ServicesHandle | None,
    look: Lookout | None,
    watchers: Sequence[Listener],
    passing: bool,
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
    pending = handle.pending if handle is not None else list
    watch = Watch(
        (progress, *watchers), progress.phase, resumed=progress.resumed, judged=progress.judged, pending=pending
    )
    if not passing:
        watch.notice = progress.notice
    if look is not None:
        watch.prefect_degraded_s = lambda: look.degraded_s
    with progress:
        if handle is not None and "prefect" in handle.urls:
            progress.phase("starting the Prefect server" if len(handle.urls) == 1 else "starting Prefect and MLflow")
            handle.wait(services=("prefect",))
            bury(handle.prefect_api, home())
        failure = asyncio.run(_flow(directory.name, resume, watch))
    if watch.result is not None and failure is None and not passing:
        show_summary(console, watch.result.summary, watch.result.pictures, watch.result.places)
    return failure, watch.result


async def _flow(run_name: str, resume: bool, watch: Watch) -> BaseException | None:
    from flows.training import WATCH, training

    WATCH.set(watch)
    running = asyncio.ensure_future(training(run_name=run_name, resume=resume, return_state=True))
    while not running.done() and watch.result is None:
        await asyncio.wait([running], timeout=POLL_S)
    try:
        async with asyncio.timeout(FINAL_STATE_S):
            state = await running
    except Exception as error:
        if watch.result is None or watch.failure is not None:
            return watch.failure or error
        logger.warning("Prefect was lost, and its page of this run is incomplete (%s)", type(error).__name__)
        return None
    if state.is_failed() or state.is_crashed():
        error = await state.aresult(raise_on_failure=False)
        return error if isinstance(error, Exception) else ExpectedError(state.message or "the run failed")
    return None


@contextmanager
def services(
    run_name: str, config: RunConfig, api: str | None
) -> Iterator[tuple[ServicesHandle | None, Lookout | None]]:
    """The servers a run needs, started if they do not run, and who looks after them; the environment points to them."""
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
        with lookout(handle) if handle is not None and "prefect" in handle.urls else nullcontext() as look:
            yield handle, look
    finally:
        if handle is not None:
            logger.info("giving the servers back")
            others = release(handle)
            if others:
                typer.echo(f"the servers go on running for {', '.join(others)}", err=True)


def _drain(handle: ServicesHandle, result: Result) -> None:
    emitted = result.task_runs
    limit_s = CANCELLED_DRAIN_S if result.summary["status"] == "cancelled" else DRAIN_S
    logger.info("waiting until Prefect has recorded %d task runs", emitted)
    recorded = drain_prefect(handle.prefect_api, result.flow_runs, emitted, limit_s)
    if recorded < emitted:
        typer.echo(f"note: Prefect recorded {recorded} of {emitted} task runs within {limit_s:.0f} s", err=True)
