"""How long a service has been unreachable, and whether that was said."""

from __future__ import annotations

import time


class Outage:
    """Of one service. Whoever uses the service says what happens; each method tells whether that is news."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._before_s = 0.0

    @property
    def seconds(self) -> float:
        """Time without the service so far, including the present outage."""
        return self._before_s + (time.monotonic() - self._since if self._since is not None else 0.0)

    def begin(self) -> bool:
        """The service does not answer. True if it did before."""
        if self._since is not None:
            return False
        self._since = time.monotonic()
        return True

    def end(self) -> float | None:
        """The service answers. The seconds it did not, None if it always did."""
        if self._since is None:
            return None
        outage_s = time.monotonic() - self._since
        self._before_s, self._since = self._before_s + outage_s, None
        return outage_s
