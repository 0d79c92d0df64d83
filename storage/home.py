"""Where DigenRL keeps its state on this machine.

``<home>/<run>/`` belongs to one run, ``<home>/.services/`` to the Prefect and MLflow servers that all runs share.
"""

from __future__ import annotations

import os
from pathlib import Path

from digenrl.config.errors import ConfigError

#: What Linux and macOS take for one name, and for a path (1,024 on macOS) with room for the files below it.
LONGEST_PART_BYTES = 255
LONGEST_BYTES = 700


def home() -> Path:
    """``DIGENRL_HOME`` as an absolute path, by default ``./runs``; the directory need not exist yet.

    Raises:
        ConfigError: no directory can have that path.
    """
    given = os.environ.get("DIGENRL_HOME") or "runs"
    try:
        path = Path(given).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"DIGENRL_HOME={given} is no possible directory: {error}") from None
    longest = max(len(os.fsencode(part)) for part in path.parts)
    if longest > LONGEST_PART_BYTES or len(os.fsencode(path)) > LONGEST_BYTES:
        raise ConfigError(
            f"DIGENRL_HOME={given[:40]}… is too long: expected at most {LONGEST_BYTES} bytes, and {LONGEST_PART_BYTES} "
            f"between two slashes"
        )
    return path
