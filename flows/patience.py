"""How long to go on with something that fails, such as storage that cannot be reached.

while True:
    try:
        return attempt()
    except OSError:
        if not await patience.pause():
            raise
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time

#: Pauses before the next attempt, each up to half shorter by chance.
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 10.0


class Patience:
    """Pauses between attempts, longer from one to the next; without an end until one is set."""

    def __init__(self) -> None:
        self._pause_s = FIRST_PAUSE_S
        self._ends_at = math.inf
        self._hurry = asyncio.Event()

    def ends_after(self, seconds: float) -> None:
        """From now on there is an end to it. Who pauses wakes up, for an attempt at once."""
        self._ends_at = time.monotonic() + seconds
        self._hurry.set()

    async def pause(self) -> bool:
        """Wait before the next attempt. False at once if there must be none."""
        if time.monotonic() >= self._ends_at:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), self._pause_s * random.uniform(0.5, 1.0))
        self._hurry.clear()
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        return True

    def renew(self) -> None:
        """An attempt went well: the next pause is a short one."""
        self._pause_s = FIRST_PAUSE_S
