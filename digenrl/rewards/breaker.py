"""A circuit breaker: an address that keeps failing is left alone for a while.

closed: everything goes through. After `break_after` failures in a row it opens: nothing goes through for `rest_s`.
Then one call may try; it closes the breaker or opens it again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field


@dataclass
class CircuitBreaker:
    """State of one address. Time is an argument; calls may come from any thread.

    Attributes:
        break_after: failures in a row that open it.
        rest_s: how long it stays open.
    """

    break_after: int
    rest_s: float
    _failures: int = 0
    _opened: float | None = None
    _trying: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def wait_s(self, now: float) -> float:
        """How long nothing goes through; 0 if the caller may call, and then it must say how that ended."""
        with self._lock:
            if self._opened is None:
                return 0.0
            left = self._opened + self.rest_s - now
            if left > 0:
                return left
            if self._trying:
                return self.rest_s
            self._trying = True
            return 0.0

    def succeeded(self) -> None:
        """A call was answered."""
        with self._lock:
            self._failures, self._opened, self._trying = 0, None, False

    def failed(self, now: float) -> None:
        """A call failed in a way that tells of the address, not of the request."""
        with self._lock:
            self._failures += 1
            if self._trying or self._failures >= self.break_after:
                self._opened, self._trying = now, False
