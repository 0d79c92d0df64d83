"""Which exit code an error gives, and how it reads."""

from __future__ import annotations

from digenrl.config.errors import ConfigError


class ExpectedError(RuntimeError):
    """A failure whose message is a sentence for the person."""


def exit_code(error: BaseException) -> int:
    """2 for what the person typed or configured, 1 for everything else."""
    return 2 if isinstance(error, ConfigError) else 1


def sentence(error: BaseException) -> str:
    """The message; for an error that is not worded for people, its type and where to look."""
    text = str(error) or type(error).__name__
    if isinstance(error, ConfigError | ExpectedError | RuntimeError | OSError):
        return text
    return f"{type(error).__name__}: {text} (run again with --debug for the traceback)"
