"""`digenrl train PRESET --dry-run`: one small iteration as a run would do it, in a home that does not stay.

The iteration runs as any run does: its own Prefect and MLflow servers, worker processes, checkpoint and LoRA. All of it
is in a temporary directory, so that nothing is left which a run's name or `resume` could find.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from digenrl.config import RunConfig
from digenrl.preflight import check, check_prompts
from flows.commands.train import execute
from flows.dryrun.needs import memory_of, pace_of
from flows.dryrun.report import passed, show
from flows.dryrun.shrink import shrink
from flows.dryrun.witness import Witness
from flows.errors import ExpectedError
from flows.plan.tables import console
from flows.services.state import ServicesDirectory
from storage.runs import RunDirectory

#: How long the servers may take to end, beyond what a run waits for.
ENDED_S, POLL_S = 20.0, 0.1


def run(preset: str, overrides: Sequence[str], config: RunConfig) -> None:
    """Run it and say what it showed.

    Raises:
        ConfigError: prompts, rewards or settings are wrong.
        ExpectedError: the iteration failed, or showed too little; names the log, which then stays.
    """
    began = time.monotonic()
    small = shrink(config)
    check_prompts(config)
    check(small)
    home = Path(tempfile.mkdtemp(prefix="digenrl-dry-run-"))
    os.environ["DIGENRL_HOME"] = str(home)
    directory, witness = RunDirectory.create(home, preset, small), Witness()
    try:
        execute(directory, small, resume=False, prefect=None, watchers=(witness,), passing=True)
        gates = passed(witness)
    except (KeyboardInterrupt, typer.Exit):
        _remove(home)
        raise
    except Exception as error:
        raise ExpectedError(f"the dry run failed: {error}; its log is {directory.log_path}") from error
    _remove(home)
    assert witness.report is not None, "its gates were looked at"
    needs = (memory_of(config), pace_of(config))
    seconds = (witness.report.seconds, time.monotonic() - began)
    name = Path(preset).name.removesuffix(".yaml").removesuffix(".yml")
    command = shlex.join(["digenrl", "train", preset, *overrides])
    show(console(), name, config, small, gates, *needs, seconds, command)


def _remove(home: Path) -> None:
    """Once its servers have ended: they would write into what is being removed."""
    deadline = time.monotonic() + ENDED_S
    while ServicesDirectory(home).read_state().is_supervised and time.monotonic() < deadline:
        time.sleep(POLL_S)
    shutil.rmtree(home, ignore_errors=True)
