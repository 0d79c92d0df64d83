"""A timeline as files.

chrome_trace   JSON in the Trace Event Format, one track per lane
gantt_png      PNG, readable for 2 to 64 workers
"""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from digenrl.scheduling.bubbles import Bubble
from digenrl.scheduling.trace import TracedUnit
from digenrl.scheduling.units import Lane
from flows.gantt.layout import ACTIVITY_WORDS, COLOURS, PALE, Chart, activities_in, bars_of, natural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT = "#22252b", "#8a8f98"
_MICROSECONDS = 1e6


def chrome_trace(
    spans: Sequence[TracedUnit], names: Mapping[str, str], *, bubbles: Sequence[Bubble] = ()
) -> dict[str, Any]:
    """The timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

    Every worker is a process, its lanes are threads, units and bubbles are complete events.

    Args:
        spans: what ran.
        names: worker -> name to show; workers not named are shown as they are.
        bubbles: idle intervals, shown on the same tracks in category "bubble".
    """
    workers = sorted({s.worker for s in spans} | {b.worker for b in bubbles}, key=lambda w: natural(names.get(w, w)))
    process = {worker: number for number, worker in enumerate(workers, 1)}
    thread: dict[Lane, int] = {"device": 1, "cpu": 2}
    lanes = {(process[s.worker], s.lane) for s in spans} | {(process[b.worker], b.lane) for b in bubbles}
    tracks = sorted(lanes, key=lambda track: (track[0], thread[track[1]]))
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": process[worker], "args": {"name": names.get(worker, worker)}}
        for worker in workers
    ]
    events += [
        {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
        for number in process.values()
    ]
    events += [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": thread[lane], "args": {"name": lane}}
        for pid, lane in tracks
    ]
    for span in spans:
        args = {"unit": span.unit.label, "version": span.version, "theta": span.theta, "role": span.activity}
        events.append(_complete(span, span.unit.label, span.activity, process, thread, args))
    for bubble in bubbles:
        args = {"cause": bubble.cause}
        events.append(_complete(bubble, f"waits for {bubble.cause}", "bubble", process, thread, args))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def gantt_png(drawn: Chart, title: str = "") -> bytes:
    """The timeline as a picture; `title` stands above it, on the left."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    height = 0.36 if len(drawn.rows) <= 12 else 0.24 if len(drawn.rows) <= 32 else 0.17
    engine = ConstrainedLayoutEngine(h_pad=0.09, w_pad=0.09)
    figure = Figure(figsize=(14, 1.75 + height * len(drawn.rows)), dpi=110, layout=engine)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw_rows(axes, drawn, pixels=1250)
    _draw_boundaries(axes, drawn)
    _draw_frame(axes, drawn, title, small=height < 0.2)
    handles, columns = _in_rows(_legend(drawn))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", facecolor="white")
    return buffer.getvalue()


def _draw_rows(axes: Axes, drawn: Chart, pixels: int) -> None:
    resolution = drawn.seconds / pixels
    for place, row in enumerate(drawn.rows):
        # Rectangles of one colour are one artist: thousands of single ones would take minutes.
        idle: dict[str, list[tuple[float, float]]] = defaultdict(list)
        busy: dict[tuple[str, float], list[tuple[float, float]]] = defaultdict(list)
        for bubble in row.bubbles:
            idle[PALE[bubble.cause]].append((bubble.start_s, bubble.seconds))
        for bar in bars_of(row, 4 * resolution):
            width = bar.end_s - bar.start_s
            # A hairline between units, unless it would eat them.
            edge = 0.6 if width > 5 * resolution else 0.0
            busy[bar.colour, edge].append((bar.start_s, max(width, resolution)))
            if bar.label and len(drawn.rows) <= 32 and width > (7 * len(bar.label) + 6) * resolution:
                middle = (max(bar.start_s, drawn.start_s) + min(bar.end_s, drawn.end_s)) / 2
                axes.text(middle, place, bar.label, ha="center", va="center_baseline", fontsize=7, color=bar.ink)
        for colour, extents in idle.items():
            axes.broken_barh(extents, (place - 0.5, 1.0), facecolors=colour, linewidth=0)
        for (colour, edge), extents in busy.items():
            axes.broken_barh(extents, (place - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=edge)


def _draw_boundaries(axes: Axes, drawn: Chart) -> None:
    for at, version in drawn.boundaries:
        axes.axvline(at, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)), zorder=3)
        axes.annotate(
            f"v{version}",
            (at, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=_INK,
        )


def _draw_frame(axes: Axes, drawn: Chart, title: str, *, small: bool) -> None:
    count = len(drawn.rows)
    axes.set_xlim(drawn.start_s, drawn.end_s)
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_yticks(range(count), [row.label for row in drawn.rows], fontsize=6.5 if small else 8.5, color=_INK)
    axes.tick_params(axis="both", length=0, colors=_INK)
    axes.tick_params(axis="x", labelsize=8.5)
    axes.set_xlabel("seconds", fontsize=9, color=_INK)
    for side in axes.spines.values():
        side.set_visible(False)
    shares = axes.secondary_yaxis("right")
    labels = [f"{row.busy:.0%}" for row in drawn.rows]
    shares.set_yticks(range(count), labels, fontsize=6.5 if small else 8, color=_FAINT)
    shares.tick_params(length=0, pad=5)
    shares.spines["right"].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, color=_INK, pad=18)
    axes.set_title(f"devices busy {drawn.busy:.1%}", loc="right", fontsize=9.5, color=_FAINT, pad=18)


def _legend(drawn: Chart) -> list[Any]:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[name][0], label=ACTIVITY_WORDS[name]) for name in activities_in(drawn.rows)]
    handles += [
        Patch(facecolor=PALE[cause], edgecolor="#c4c4c4", linewidth=0.5, label=f"waits for {cause} {share:.1%}")
        for cause, share in drawn.idle.items()
    ]
    return handles


def _in_rows(handles: list[Any], most: int = 7) -> tuple[list[Any], int]:
    """The handles in the order that matplotlib, which fills columns, turns into rows; and the number of columns."""
    rows = math.ceil(len(handles) / most)
    columns = math.ceil(len(handles) / rows)
    return [handle for column in range(columns) for handle in handles[column::columns]], columns


def _complete(
    span: TracedUnit | Bubble,
    name: str,
    category: str,
    process: Mapping[str, int],
    thread: Mapping[Lane, int],
    args: dict[str, Any],
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process[span.worker],
        "tid": thread[span.lane],
        "ts": round(span.start_s * _MICROSECONDS, 3),
        "dur": round(span.seconds * _MICROSECONDS, 3),
        "args": args,
    }
