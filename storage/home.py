"""Where DigenRL keeps its state on this machine.

``<home>/<run>/`` belongs to one run, ``<home>/.services/`` to the Prefect and MLflow servers that all runs share.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``DIGENRL_HOME`` as an absolute path, by default ``./runs``; the directory need not exist yet."""
    return Path(os.environ.get("DIGENRL_HOME") or "runs").expanduser().resolve()
