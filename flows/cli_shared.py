"""What the commands share: arguments, and how their errors are worded."""

from __future__ import annotations

import os
import select
import signal
import sys
from typing import Annotated

import typer

Overrides = Annotated[
    list[str] | None, typer.Argument(help="Changes to the preset, e.g. iterations=20 optimizer.learning_rate=3e-4.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Run = Annotated[
    str,
    typer.Argument(help="Name of a run below DIGENRL_HOME (default ./runs), or its checkpoints: s3://BUCKET/…/RUN."),
]


def guarded(work: object, debug: bool) -> None:
    """Run a command; word its errors for a person.

    Raises:
        typer.Exit: 2 for a configuration error, 1 for any other failure, 130 after Ctrl-C, 141 (as after SIGPIPE) if
            the output goes to a program that has ended, such as `head`.
    """
    from flows.errors import exit_code, sentence

    try:
        work()  # type: ignore[operator]
    except typer.Exit:
        raise
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
            raise typer.Exit(128 + signal.SIGPIPE) from None
        if debug:
            import traceback

            traceback.print_exc()
        typer.echo(f"digenrl: {sentence(error)}", err=True)
        raise typer.Exit(exit_code(error)) from None


def _nobody_reads() -> bool:
    """Whether the output is a pipe without a reader."""
    try:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        return any(event & select.POLLERR for _, event in output.poll(0))
    except (OSError, ValueError):  # no file at all
        return False
