"""What a person sees and what the run's log keeps.

    run_log(path)         within it, everything that is logged goes to the file, tracebacks included
    redirect_libraries()  once they are imported: loggers of libraries lose handlers of their own

The terminal shows the program's own lines, and of what is logged only the warnings of our packages, one line each.
Everything else - Prefect, Dask, MLflow, Python's warnings - is in `<run>/log.txt` for whoever looks for a cause.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Packages whose warnings are worded for people.
OURS = ("flows", "tasks", "workers", "storage", "digenrl")

#: Libraries that give their loggers handlers to the terminal.
_WITH_HANDLERS = ("distributed", "prefect", "prefect._internal", "mlflow", "alembic")


class _Terminal(logging.Handler):
    """Warnings of our packages as `note: …` on stderr as it is at that moment: a live display redirects it."""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        if record.name.partition(".")[0] in OURS:
            print(f"note: {record.getMessage()}", file=sys.stderr, flush=True)


class RunLogFile(logging.FileHandler):
    """The run's log. That it cannot be written is said once, and the run goes on."""

    # Its name matters: Prefect takes no notice of a handler whose class is private.

    _failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """See logging.Handler: called within the handling of the exception."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True
            print(f"note: cannot write {self.baseFilename}: {error.strerror}", file=sys.stderr, flush=True)


@contextmanager
def run_log(path: Path) -> Iterator[None]:
    """Send logging to `path`, which is appended to. Enter it before Prefect is imported.

    Prefect configures the root logger when it is imported, unless that has a handler with a formatter by then.
    """
    file = RunLogFile(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    terminal = _Terminal(logging.WARNING)
    root = logging.getLogger()
    for handler in (file, terminal):
        root.addHandler(handler)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for handler in (file, terminal):
            root.removeHandler(handler)
        with suppress(OSError):
            file.close()
        # Prefect has more to say while the interpreter exits; Python would print it where there is no handler.
        logging.lastResort = None


def redirect_libraries() -> None:
    """Let the loggers of libraries that are imported by now hand on to the root logger alone."""
    for name in _WITH_HANDLERS:
        library = logging.getLogger(name)
        library.handlers.clear()
        library.propagate = True
    logging.getLogger("distributed").setLevel(logging.WARNING)
    # Otherwise each task run writes a line when it ends, between which the run's own are lost.
    logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)
