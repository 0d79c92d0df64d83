"""The timeline of a run: noted while it goes, explained iteration by iteration, written when it ends.

    Timeline    a listener; `hearing` lets it hear what the scheduler is told
    Written     what it leaves: timeline.json for Perfetto, timeline.png, shares of the devices' time

On the engine's loop, things are only noted. Why devices stood still is found out in a thread, one iteration late: what
a bubble waited for is known when it has ended. Of a long run the last MAX_UNITS units are kept, which is what the trace
shows; the picture shows the last SHOWN iterations. Every attempt at a run writes its timeline over that of the last.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from digenrl.config import RunConfig
from digenrl.scheduling import messages as m
from digenrl.scheduling.bubbles import CAUSES, Cause
from digenrl.scheduling.shape import RunShape
from flows.explained import Explained, Notes, Window, explain
from workers.engine import Machine
from workers.listener import Dispatched, IterationReport, Listener
from workers.meter import Span
from workers.receipts import Receipt

logger = logging.getLogger(__name__)

#: Units the trace holds at most, the last ones: about 10 MB of JSON.
MAX_UNITS = 20_000
#: Iterations in the picture, the last ones.
SHOWN = 3
#: Iterations that may wait to be explained. If more do, the run is faster than the explanation.
MAX_PENDING = 4

#: Hears of an iteration: its number, and cause -> share of the devices' time.
Found = Callable[[int, Mapping[Cause, float]], None]


@dataclass(frozen=True)
class Written:
    """What an attempt leaves.

    Attributes:
        trace: Chrome trace, None if no unit ended.
        picture: Gantt chart, None if no unit ended.
        shares: cause -> share of the device time of the attempt's iterations; empty before the first one closed.
    """

    trace: Path | None = None
    picture: Path | None = None
    shares: Mapping[Cause, float] | None = None


class Timeline(Listener):
    """Notes units and what explains the time between them.

    Args:
        config: of the run.
        shape: of the run.
        found: hears of every iteration, one iteration late.
    """

    def __init__(self, config: RunConfig, shape: RunShape, found: Found) -> None:
        self._shape = shape
        at_once = config.schedule.layout != "colocated"
        self._explain = functools.partial(
            explain, shape=shape, std_scope=config.algorithm.closing_scope, at_once=at_once
        )
        self._found = found
        self._records: deque[Span] = deque(maxlen=MAX_UNITS)
        self._news: deque[tuple[float, m.Event]] = deque(maxlen=2 * MAX_UNITS)
        self._members: list[tuple[float, m.Event]] = []
        self._names: dict[str, str] = {}
        self._opened: float | None = None
        self._closed: deque[Window] = deque(maxlen=2)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="timeline")
        self._pending: set[asyncio.Future[tuple[dict[Cause, float], float]]] = set()
        self._idle_s: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
        self._device_s = 0.0

    # --- noting ---

    def hearing(self, machine: Machine) -> Machine:
        """The same machine; what it is told is noted here."""
        return _Overheard(machine, self._hear)

    def _hear(self, event: m.Event) -> None:
        match event:
            case m.WorkerJoined() | m.WorkerDraining() | m.WorkerLost():
                self._members.append((time.time(), event))
            case m.VersionInstalled() | m.Transferred() | m.Committed():
                self._news.append((time.time(), event))

    def dispatched(self, event: Dispatched) -> None:
        """See Listener."""
        if self._opened is None:
            self._opened = time.time()
        if event.run.worker not in self._names:
            # A worker that was started anew has the name of the one it replaces.
            earlier = sum(name.partition(" (")[0] == event.worker_name for name in self._names.values())
            self._names[event.run.worker] = event.worker_name + (f" ({earlier + 1})" if earlier else "")
        event.outcome.add_done_callback(functools.partial(self._ended, event.run))

    def _ended(self, run: m.Run, outcome: asyncio.Future[Receipt]) -> None:
        if not outcome.cancelled() and outcome.exception() is None:
            receipt = outcome.result()
            self._records.append(Span(run.unit, run.worker, run.theta, receipt.started_at, receipt.seconds))

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        now = time.time()
        self._explain_last()
        self._closed.append(Window(report.iteration, now if self._opened is None else self._opened, now))
        self._opened = now

    # --- explaining ---

    def _explain_last(self) -> None:
        """Explain the iteration that closed last. What it waited for may have been made in the one before it."""
        if not self._closed:
            return
        window, notes = self._closed[-1], self._since(self._closed[0].start)
        if len(self._pending) >= MAX_PENDING or not notes.records:
            logger.info("the bubbles of iteration %d are left out", window.iteration)
            return
        task = asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._explain(notes).idle(window))
        self._pending.add(task)
        task.add_done_callback(functools.partial(self._explained, window.iteration))

    def _explained(self, iteration: int, task: asyncio.Future[tuple[dict[Cause, float], float]]) -> None:
        self._pending.discard(task)
        if task.cancelled() or task.exception() is not None:
            logger.warning("the bubbles of iteration %d are not explained: %r", iteration, task)
            return
        idle, device_s = task.result()
        self._device_s += device_s
        for cause, seconds in idle.items():
            self._idle_s[cause] += seconds
        self._found(iteration, {cause: seconds / device_s if device_s else 0.0 for cause, seconds in idle.items()})

    def _since(self, start: float) -> Notes:
        """A copy of what is noted from a time on, and of who came and went at any time."""
        records = [record for record in self._records if record.started_at + record.seconds >= start]
        return Notes(records, self._members + [entry for entry in self._news if entry[0] >= start])

    # --- writing ---

    async def finish(self, trace: Path, picture: Path, title: str) -> Written:
        """Explain what is left and write the files. A failure is logged; it must not cost the run its other results.

        Args:
            trace: where the Chrome trace goes.
            picture: where the PNG goes.
            title: of the picture.
        """
        self._explain_last()
        while self._pending:
            await asyncio.wait(self._pending)
            await asyncio.sleep(0)  # their callbacks count the results
        shares = {cause: s / self._device_s for cause, s in self._idle_s.items()} if self._device_s else None
        written = Written(shares=shares)
        if self._records:
            work = functools.partial(self._write, self._since(-math.inf), trace, picture, title)
            try:
                await asyncio.get_running_loop().run_in_executor(self._thread, work)
                written = Written(trace, picture, shares)
            except Exception:
                logger.exception("the timeline was not written")
        self._thread.shutdown(wait=False)
        return written

    def _write(self, notes: Notes, trace: Path, picture: Path, title: str) -> None:
        explained: Explained = self._explain(notes)
        shown = None
        if self._closed:
            last = self._closed[-1].iteration
            shown = (max(last - SHOWN + 1, self._shape.start_iteration), last)
        explained.write(trace, picture, self._names, title, shown)


class _Overheard:
    """A machine, and somebody who hears what it is told."""

    def __init__(self, machine: Machine, hear: Callable[[m.Event], None]) -> None:
        self._machine = machine
        self._hear = hear

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """See Machine."""
        self._hear(event)
        return self._machine.handle(event, now)

    def waiting_for(self) -> str:
        """See Machine."""
        return self._machine.waiting_for()
