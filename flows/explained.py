"""What a run's notes say: when which unit ran, why devices stood still between, and the files that show it.

explain(notes, ...)    notes of a stretch of a run -> Explained
Explained.idle         seconds of a window by cause
Explained.write        timeline.json for Perfetto, timeline.png
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from digenrl.scheduling.bubbles import Bubble, Cause, Facts, bubbles, by_cause
from digenrl.scheduling.messages import Event
from digenrl.scheduling.scopes import StdScope
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.trace import TracedUnit, from_records
from flows.gantt.layout import chart
from flows.gantt.picture import chrome_trace, gantt_png
from storage.atomic import write_atomically
from workers.meter import Span


class Window(NamedTuple):
    """The time of an iteration, from the end of the one before it; Unix seconds."""

    iteration: int
    start: float
    end: float


@dataclass(frozen=True)
class Notes:
    """A stretch of a run: at least one unit, in any order, and (Unix time, event) of what explains the bubbles."""

    records: Sequence[Span]
    news: Sequence[tuple[float, Event]]


@dataclass(frozen=True)
class Explained:
    """Spans and bubbles on a clock that is 0 at Unix time `origin`."""

    spans: Sequence[TracedUnit]
    bubbles: Sequence[Bubble]
    facts: Facts
    origin: float

    def idle(self, window: Window) -> tuple[dict[Cause, float], float]:
        """Seconds the devices stood still in a window by cause, and all the seconds they had in it."""
        # Nothing is known of the time before the first unit and after the last one.
        start, end = max(window.start - self.origin, 0.0), window.end - self.origin
        end = end if self.facts.until_s is None else min(end, self.facts.until_s)
        idle = by_cause([bubble for bubble in self.bubbles if bubble.lane == "device"], (start, end))
        left = self.facts.left
        stays = [min(left.get(worker, end), end) - max(joined, start) for worker, joined in self.facts.joined.items()]
        return idle, math.fsum(max(stay, 0.0) for stay in stays)

    def write(
        self, trace: Path, picture: Path, names: Mapping[str, str], title: str, shown: tuple[int, int] | None
    ) -> None:
        """Write the files.

        Args:
            trace: in the Trace Event Format.
            picture: PNG.
            names: worker -> name to show.
            title: of the picture.
            shown: first and last iteration of the picture; None: everything.
        """
        data = chrome_trace(self.spans, names, bubbles=self.bubbles)
        write_atomically(trace, json.dumps(data, separators=(",", ":")).encode())
        if shown is not None:
            first, last = shown
            title += f", iteration {first}" if first == last else f", iterations {first} to {last}"
        drawn = chart(self.spans, names, bubbles=self.bubbles, iterations=shown)
        write_atomically(picture, gantt_png(drawn, title))


def explain(notes: Notes, shape: RunShape, std_scope: StdScope, *, at_once: bool) -> Explained:
    """Find the cause of every bubble.

    Args:
        notes: what is known.
        shape: of the run.
        std_scope: over which samples the standard deviation is taken.
        at_once: training begins with the first complete group; False: when the whole iteration is generated.
    """
    origin = min(record.started_at for record in notes.records)
    log = sorted(((at - origin, event) for at, event in notes.news), key=lambda entry: entry[0])
    spans = from_records(shape, notes.records)
    facts = replace(Facts.from_log(shape, std_scope, log, gap=at_once), until_s=max(span.end_s for span in spans))
    return Explained(spans, bubbles(spans, facts), facts, origin)
