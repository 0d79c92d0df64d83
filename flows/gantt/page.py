"""The timeline as one self-contained page: static SVG without scripts, styles or pictures from elsewhere.

Names of workers stay in place while the chart scrolls sideways; every unit and bubble tells what it is when pointed
at. Colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from digenrl.scheduling.bubbles import CAUSES, Bubble, Cause
from flows.gantt.layout import ACTIVITY_WORDS, COLOURS, DIM, PALE, Bar, Chart, activities_in, bars_of

_TOP, _BOTTOM = 22, 26

_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #22252b; --faint: #757b85; --line: #e3e5e9; PALE }
@media (prefers-color-scheme: dark) {
  :root { --ground: #17191d; --ink: #e7e9ec; --faint: #9aa0aa; --line: #33373e; DIM }
}
body { margin: 2rem; background: var(--ground); color: var(--ink); font: 14px/1.45 system-ui, sans-serif }
h1 { font-size: 1.25rem; font-weight: 600; margin: 0 0 .2rem }
p { margin: 0 0 1rem; color: var(--faint) }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; margin: 0 0 1rem; padding: 0; list-style: none }
.key span { display: inline-block; width: .9em; height: .9em; margin-right: .45em; border-radius: 2px;
  vertical-align: -.1em }
.chart { display: flex; border: 1px solid var(--line); border-radius: 6px }
.scroll { overflow-x: auto; flex: 1 }
svg { display: block }
text { fill: var(--ink); font: 12px system-ui, sans-serif }
.faint { fill: var(--faint) }
.in { font-size: 10.5px; text-anchor: middle; pointer-events: none }
.unit:hover, .idle:hover { filter: brightness(1.15) }
.grid { stroke: var(--line) }
.version { stroke: var(--ink); stroke-dasharray: 4 3 }
"""


#: Name of the style variable that holds the colour of a cause.
_VARIABLE = {cause: f"--{cause.replace(' ', '-')}" for cause in CAUSES}


def gantt_html(drawn: Chart, title: str = "Timeline", width: int = 1600) -> str:
    """The page.

    Args:
        drawn: what to show.
        title: heading of the page.
        width: of the chart in pixels; a wider one scrolls.
    """
    row = 26 if len(drawn.rows) <= 16 else 18
    summary = f"{len(drawn.rows)} lanes, {drawn.seconds:.4g} s, devices busy {drawn.busy:.1%}"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{_style()}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f"<p>{summary}. Lighter and darker shades are odd and even versions; dashed lines are new versions.</p>",
            _key(drawn),
            '<div class="chart">',
            _labels(drawn, row),
            f'<div class="scroll">{_drawing(drawn, row, width)}</div>',
            "</div></body></html>",
        ]
    )


def _style() -> str:
    def variables(colours: Mapping[Cause, str]) -> str:
        return "; ".join(f"{_VARIABLE[cause]}: {colour}" for cause, colour in colours.items())

    return _STYLE.replace("PALE", variables(PALE)).replace("DIM", variables(DIM))


def _key(drawn: Chart) -> str:
    entries = [(COLOURS[name][0], ACTIVITY_WORDS[name], "") for name in activities_in(drawn.rows)]
    entries += [
        (f"var({_VARIABLE[cause]})", f"waits for {cause} {share:.1%}", "idle") for cause, share in drawn.idle.items()
    ]
    items = [
        f'<li><span class="{kind}" style="background:{colour}"></span>{escape(text)}</li>'
        for colour, text, kind in entries
    ]
    return f'<ul class="key">{"".join(items)}</ul>'


def _labels(drawn: Chart, row: int) -> str:
    widest = max(len(r.label) for r in drawn.rows)
    width = 7.2 * widest + 62
    height = _TOP + row * len(drawn.rows) + _BOTTOM
    lines = [f'<svg width="{width:.0f}" height="{height}" role="img" aria-label="workers and how busy they were">']
    for place, lane in enumerate(drawn.rows):
        y = _TOP + row * place + row / 2 + 4
        lines.append(f'<text x="10" y="{y:.0f}">{escape(lane.label)}</text>')
        lines.append(f'<text class="faint" x="{width - 10:.0f}" y="{y:.0f}" text-anchor="end">{lane.busy:.0%}</text>')
    return "".join([*lines, "</svg>"])


def _drawing(drawn: Chart, row: int, width: int) -> str:
    height = _TOP + row * len(drawn.rows) + _BOTTOM
    scale = width / max(drawn.seconds, 1e-12)

    def x(at: float) -> float:
        return (min(max(at, drawn.start_s), drawn.end_s) - drawn.start_s) * scale

    parts = [f'<svg width="{width + 24}" height="{height}" role="img" aria-label="units over time">']
    bottom = height - _BOTTOM
    for at in ticks(drawn.start_s, drawn.end_s):
        parts.append(f'<line class="grid" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP}" y2="{bottom}"/>')
        parts.append(f'<text class="faint" x="{x(at):.1f}" y="{height - 8}" text-anchor="middle">{at:g} s</text>')
    for place, lane in enumerate(drawn.rows):
        top = _TOP + row * place
        for bubble in lane.bubbles:
            parts.append(_idle(bubble, x(bubble.start_s), x(bubble.end_s), top, row))
        for bar in bars_of(lane, 3 / scale):
            parts.append(_unit(bar, x(bar.start_s), x(bar.end_s), top, row))
    for at, version in drawn.boundaries:
        parts.append(f'<line class="version" x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{_TOP - 6}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(at):.1f}" y="{_TOP - 9}" text-anchor="middle">v{version}</text>')
    return "".join([*parts, "</svg>"])


def _idle(bubble: Bubble, left: float, right: float, top: float, row: int) -> str:
    text = f"{bubble.seconds:.3f} s of waiting for {bubble.cause}"
    return (
        f'<rect class="idle" x="{left:.1f}" y="{top}" width="{right - left:.1f}" height="{row}" '
        f'style="fill:var({_VARIABLE[bubble.cause]})"><title>{escape(text)}</title></rect>'
    )


def _unit(bar: Bar, left: float, right: float, top: float, row: int) -> str:
    width = max(right - left - 0.7, 0.7)
    parts = [
        f'<rect class="unit" x="{left:.1f}" y="{top + 3}" width="{width:.1f}" height="{row - 6}" rx="1.5" '
        f'fill="{bar.colour}"><title>{escape(bar.detail)}</title></rect>'
    ]
    if bar.label and width > 6.5 * len(bar.label) + 8:
        middle = (left + right) / 2
        place = f'x="{middle:.1f}" y="{top + row / 2 + 3.8:.1f}"'
        parts.append(f'<text class="in" {place} style="fill:{bar.ink}">{escape(bar.label)}</text>')
    return "".join(parts)


def ticks(start: float, end: float) -> list[float]:
    """About ten round times within [start, end]."""
    rough = max(end - start, 1e-9) / 10
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(i * step, 9) for i in range(math.ceil(start / step), math.floor(end / step) + 1)]
