"""Deliver records to a service from one background thread, without ever blocking or failing the caller.

Records wait in a bounded queue and leave in order. While the service is unreachable delivery is retried with backoff;
one line says when an outage starts and one when it ends. A record that the service refuses, or that keeps failing
while the service answers, is dropped, so that it does not hold up the ones behind it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from storage.outages import Outage

log = logging.getLogger(__name__)

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 10.0
POISON_FAILURES = 3


@dataclass(frozen=True)
class _Record:
    kind: str
    send: Callable[[], object]
    size_bytes: int


class Outbox:
    """A queue with one thread behind it.

    Args:
        service: Name for messages, with its address: ``MLflow at http://...``.
        is_refusal: Whether an error raised by ``send`` would be raised again by every further attempt.
        answers: Whether the service answers now; asked, in the thread, about a record that fails repeatedly.
        max_records: Bound on the queue; a record put into a full one is dropped and counted.
        max_bytes: Bound on the sum of the records' sizes.
    """

    def __init__(
        self,
        service: str,
        *,
        is_refusal: Callable[[Exception], bool],
        answers: Callable[[], bool],
        max_records: int = 10_000,
        max_bytes: int = 256 * 2**20,
    ) -> None:
        self._service = service
        self._is_refusal = is_refusal
        self._answers = answers
        self._max_records = max_records
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._records: deque[_Record] = deque()
        self._size_bytes = 0
        self._closing = False
        self._abandoned = False
        self._overflowed = 0
        self._refused: Counter[str] = Counter()
        self._unreachable = Outage()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    @property
    def degraded_seconds(self) -> float:
        """Time the service has been unreachable so far, including the present outage."""
        return self._unreachable.seconds

    @property
    def dropped(self) -> int:
        """Records lost so far: refused by the service, or put into a full queue."""
        return self._overflowed + self._refused.total()

    def put(self, kind: str, send: Callable[[], object], size_bytes: int = 0) -> None:
        """Queue a record. ``send`` runs in the background, possibly several times, and must bear a repetition."""
        with self._changed:
            if self._closing:
                raise RuntimeError(f"the outbox of {self._service} is closed")
            if len(self._records) >= self._max_records or self._size_bytes + size_bytes > self._max_bytes:
                self._overflowed += 1
                return
            self._records.append(_Record(kind, send, size_bytes))
            self._size_bytes += size_bytes
            self._changed.notify_all()

    def close(self, timeout_s: float) -> int:
        """Deliver what is queued, for at most ``timeout_s``; the number of records lost over the outbox's life."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._records, timeout_s)
            late = len(self._records)
            self._abandoned = True
            self._changed.notify_all()
        # A thread that is inside a request cannot be stopped; as a daemon it does not keep the process alive.
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if late or self.dropped:
            log.warning(
                "%s: %d records were not delivered in %.0f s, %d found the queue full, %d were refused",
                *(self._service, late, timeout_s, self._overflowed, self._refused.total()),
            )
        return late + self.dropped

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._records or self._closing)
                if self._abandoned or not self._records:
                    return
                record = self._records[0]
            self._deliver(record)
            with self._changed:
                if self._abandoned:
                    return
                self._records.popleft()
                self._size_bytes -= record.size_bytes
                self._changed.notify_all()

    def _deliver(self, record: _Record) -> None:
        failures, delay_s = 0, FIRST_DELAY_S
        while True:
            try:
                record.send()
            except Exception as error:
                # Whatever it is, logging must not end the run: it is refused, or tried again.
                failures += 1
                if self._is_refusal(error):
                    self._refuse(record, error)
                    return  # it may not even have reached the service: this says nothing about an outage
                if failures >= POISON_FAILURES and self._answers():
                    self._refuse(record, error)
                    break
                self._outage(error)
                with self._changed:
                    if self._changed.wait_for(lambda: self._abandoned, delay_s):
                        return
                delay_s = min(2 * delay_s, MAX_DELAY_S)
            else:
                break
        self._recovered()

    def _refuse(self, record: _Record, error: Exception) -> None:
        self._refused[record.kind] += 1
        if self._refused[record.kind] == 1:
            log.warning("%s refused %s (said once): %s", self._service, record.kind, _first_line(error))

    def _outage(self, error: Exception) -> None:
        if self._unreachable.begin():
            log.warning(
                "%s is unreachable; up to %d records are kept and tried again: %s",
                *(self._service, self._max_records, _first_line(error)),
            )

    def _recovered(self) -> None:
        if (outage_s := self._unreachable.end()) is not None:
            log.warning(
                "%s answers again after %.1f s; %d records follow, %d found the queue full",
                *(self._service, outage_s, len(self._records) - 1, self._overflowed),
            )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
