"""What a run measures of itself: seconds of its units, and the time its scheduler takes.

CostBook      the cost model in profile.json; a resumed run starts from it
Clocked       a scheduler whose own time is taken
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path

from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.shape import RunShape
from storage.atomic import write_atomically
from workers.listener import IterationReport, Listener

logger = logging.getLogger(__name__)


class CostBook(Listener):
    """Writes a cost model as often as checkpoints are saved.

    Args:
        path: of profile.json.
        model: goes on learning while it is written down.
        every: iterations between two writes; 0: only at the end.
    """

    def __init__(self, path: Path, model: CostModel, every: int) -> None:
        self._path = path
        self._every = every
        self.model = model

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        if self._every and (report.iteration + 1) % self._every == 0:
            asyncio.get_running_loop().run_in_executor(None, self._write, self._content())

    def write(self) -> None:
        """Write what is known now."""
        self._write(self._content())

    def _content(self) -> bytes:
        # The workers of this attempt mean nothing to whoever reads this.
        return json.dumps({**self.model.to_json(), "workers": {}}, indent=1).encode()

    def _write(self, content: bytes) -> None:
        try:
            write_atomically(self._path, content)
        except OSError as error:
            logger.warning("%s was not written: %s", self._path, error)


def known_costs(path: Path, shape: RunShape) -> CostModel | None:
    """The model that an earlier attempt left; None if there is none that can be used."""
    try:
        return CostModel.from_json(shape, json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not used: %s", path, error)
        return None


class Clocked(Listener):
    """A scheduler, and how long it takes to decide.

    Only whole decisions are timed, in CPU seconds of this thread, as the scheduler knows no clock. So the time of those
    in which a trainer was asked whether to help (trainer_assist=search) is more than the search itself took.

    Args:
        scheduler: decides.
        found: hears of every iteration, if there is searching: its number, and the share of its time that took.
    """

    def __init__(self, scheduler: Scheduler, found: Callable[[int, float], None]) -> None:
        self._scheduler = scheduler
        self._found = found
        self._search_s = self._run_s = self._reported_s = 0.0

    @property
    def search_share(self) -> float:
        """Share of the time of the iterations so far that searching took."""
        return self._reported_s / self._run_s if self._run_s else 0.0

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """See workers.engine.Machine."""
        searches, began = self._scheduler.searches, time.thread_time()
        commands = self._scheduler.handle(event, now)
        if self._scheduler.searches > searches:
            self._search_s += time.thread_time() - began
        return commands

    def waiting_for(self) -> str:
        """See workers.engine.Machine."""
        return self._scheduler.waiting_for()

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        if self._scheduler.searches:
            self._found(report.iteration, self._search_s / report.seconds)
        self._run_s += report.seconds
        self._reported_s += self._search_s
        self._search_s = 0.0
