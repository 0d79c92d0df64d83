"""Checks that come before anything else is imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

#: Top-level packages of this project. Their names are ordinary enough to be shadowed by a user's own file.
PACKAGES = ("flows", "tasks", "workers", "storage", "digenrl")


def check_shadowing() -> str | None:
    """A sentence naming a file or package that hides one of ours, None if all is well."""
    ours = Path(__file__).resolve().parent.parent
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin is not None else None
        if origin is None or origin.parent.parent != ours:
            found = origin or "nothing"
            return (
                f"the package '{package}' of DigenRL ({ours / package}) is hidden by {found}: "
                f"rename that file or take its directory off PYTHONPATH"
            )
    return None
