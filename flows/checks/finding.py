"""One line of `digenrl doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: `note` is worth reading and stops nothing; `missing` is required.
Status = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """What was found.

    Attributes:
        status: ok, note or missing.
        name: of what was looked at.
        detail: what was found.
        remedy: what to do or type, empty if nothing.
    """

    status: Status
    name: str
    detail: str
    remedy: str = ""
