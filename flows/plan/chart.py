"""The Gantt chart of a plan, as a picture and a page.

write_chart(prediction, folder, stem, title) -> [PNG, HTML]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from flows.gantt.layout import chart, natural
from flows.gantt.page import gantt_html
from flows.gantt.picture import gantt_png
from flows.plan.schedules import Planned
from storage.atomic import write_atomically

#: Rows that can be told apart; of a larger fleet, so many workers are shown, evenly picked.
MOST_ROWS = 64
MOST_ITERATIONS = 2


def write_chart(planned: Planned, folder: Path, stem: str, title: str) -> list[Path]:
    """Write the iterations that the prediction's figures are of; returns the paths."""
    prediction, names = planned.prediction, worker_names(planned)
    shown = _picked(names)
    title = title if len(shown) == len(names) else f"{title} ({len(shown)} of {len(names)} workers)"
    spans = [span for span in prediction.spans if span.worker in shown]
    bubbles = [bubble for bubble in prediction.bubbles if bubble.worker in shown]
    counted = round((prediction.window[1] - prediction.window[0]) / prediction.iteration_s)
    first = min(span.version for span in prediction.spans) + 1
    iterations = (first, first + min(counted, MOST_ITERATIONS) - 1)
    png, html = folder / f"{stem}.png", folder / f"{stem}.html"
    drawn = chart(spans, names, bubbles=bubbles, iterations=iterations)
    write_atomically(png, gantt_png(drawn, title))
    write_atomically(html, gantt_html(drawn, title).encode())
    return [png, html]


def worker_names(planned: Planned) -> dict[str, str]:
    """Workers by role and kind, such as `trainer a100-3`; without roles as they are."""
    roles = {True: "trainer ", False: "rollout "} if planned.trainers else {False: ""}
    return {worker: roles[worker in planned.trainers] + worker for worker in planned.prediction.kinds}


def _picked(names: Mapping[str, str]) -> set[str]:
    ranked = sorted(names, key=lambda worker: natural(names[worker]))
    if len(ranked) <= MOST_ROWS:
        return set(ranked)
    return {ranked[place * len(ranked) // MOST_ROWS] for place in range(MOST_ROWS)}
