"""A thread that looks after the servers while a run uses them.

with lookout(handle) as look: ...

A supervisor that was killed is replaced, on the same ports. Prefect's absence is said once when it begins and once when
it ends, and its seconds are counted; the run goes on meanwhile. For MLflow, `storage.outbox` does the same.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from flows.services.handle import ServicesHandle, revive
from flows.services.state import ServiceError
from storage.outages import Outage

logger = logging.getLogger(__name__)

POLL_S = 0.5


class Lookout:
    """What is known of Prefect's server."""

    def __init__(self, handle: ServicesHandle) -> None:
        self._handle = handle
        self._seen = False
        self._absence = Outage()

    @property
    def degraded_s(self) -> float:
        """Seconds that Prefect has been gone so far, after it once was there."""
        return self._absence.seconds

    def look(self) -> None:
        """Take note of how things stand, and say what has changed."""
        revive(self._handle)
        try:
            gone, why = "prefect" in self._handle.pending(), "and is started again"
        except ServiceError as error:
            gone, why = True, f"for good: {str(error).splitlines()[0]}"
        if not gone and (outage_s := self._absence.end()) is not None:
            logger.warning("Prefect answers again after %.0f s without it", outage_s)
        elif gone and self._seen and self._absence.begin():
            logger.warning("the Prefect server is gone %s; the run goes on, its page may lack some units", why)
        self._seen |= not gone


@contextlib.contextmanager
def lookout(handle: ServicesHandle) -> Iterator[Lookout]:
    """Within it, a thread looks after the servers of `handle`, which include Prefect's."""
    seen, leaving = Lookout(handle), threading.Event()

    def run() -> None:
        while not leaving.wait(POLL_S):
            try:
                seen.look()
            except Exception as error:  # such as a full disk; the run needs no servers
                logger.info("the servers could not be looked after: %s", error)

    thread = threading.Thread(target=run, name="lookout", daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        leaving.set()
        thread.join()
