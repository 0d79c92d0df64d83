"""How much CPU time one coroutine takes on a loop it shares with others."""

from __future__ import annotations

import time
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Metered(Generic[T]):
    """Awaits a coroutine and adds up the thread CPU time of its own steps.

    Attributes:
        seconds: CPU time so far, that of other coroutines between its steps excluded.
    """

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self._work = work
        self.seconds = 0.0

    def __await__(self) -> Generator[Any, Any, T]:
        step = self._work.__await__()
        resume: Any = None
        raised: BaseException | None = None
        while True:
            begun = time.thread_time()
            try:
                waits_for = step.throw(raised) if raised is not None else step.send(resume)
            except StopIteration as done:
                return done.value
            finally:
                self.seconds += time.thread_time() - begun
            raised = None
            try:
                resume = yield waits_for
            except BaseException as error:  # e.g. a cancellation: the inner coroutine decides
                raised = error
