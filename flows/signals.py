"""What asks a process to end, from its terminal and from outside. Imported before Prefect."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path
from types import FrameType

#: Ctrl-C, `kill` and `timeout`, a terminal that is closed.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def survives(number: signal.Signals) -> bool:
    """Whether the process was started to go on without its terminal (nohup)."""
    return number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGHUP do what Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_of_terminal()
        signal.default_int_handler(number, frame)

    for number in SIGNALS:
        if number is not signal.SIGINT and not survives(number):
            signal.signal(number, interrupt)


def let_go_of_terminal() -> None:
    """Print to nowhere if the terminal is gone: writing to it would fail, and with it the end in good order."""
    with Path(os.devnull).open("w") as nowhere:
        for stream in (1, 2):
            if stat.S_ISCHR(os.fstat(stream).st_mode) and not os.isatty(stream):
                os.dup2(nowhere.fileno(), stream)
