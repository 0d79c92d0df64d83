"""The timeline as a trace, a picture and a page."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from cost_models import model
from PIL import Image

from digenrl.identity import MicroBatchId
from digenrl.scheduling import Colocated, Disaggregated
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.predict import Prediction, predict
from digenrl.scheduling.trace import TracedUnit
from digenrl.scheduling.units import RolloutUnit, UpdateUnit
from flows.gantt.layout import bars_of, chart, natural
from flows.gantt.page import gantt_html
from flows.gantt.picture import chrome_trace, gantt_png


@pytest.fixture(scope="module")
def run() -> Prediction:
    return predict(model(updates=2), [Pool("fast", 2), Pool("slow", 2)], Disaggregated(2), iterations=4)


NAMES = {"fast-0": "trainer 1 <a>", "fast-1": "trainer 2", "slow-0": "roller 1", "slow-1": "roller 2"}


def test_the_trace_has_one_track_per_lane_and_one_event_per_unit(run: Prediction):
    trace = json.loads(json.dumps(chrome_trace(run.spans, NAMES, bubbles=run.bubbles)))
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    events = trace["traceEvents"]
    units = [e for e in events if e["ph"] == "X" and e["cat"] != "bubble"]
    assert len(units) == len(run.spans)
    tracks = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == tracks
    named = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert named == set(NAMES.values())
    assert all(e["args"].keys() == {"unit", "version", "theta", "role"} for e in units)
    assert {e["args"]["role"] for e in units} == {"rollout", "score", "train", "update"}


def test_events_of_a_track_do_not_overlap(run: Prediction):
    events = [e for e in chrome_trace(run.spans, {}, bubbles=run.bubbles)["traceEvents"] if e["ph"] == "X"]
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for stretches in by_track.values():
        stretches.sort()
        assert all(end <= start + 0.01 for (_, end), (start, _) in pairwise(stretches))


def test_the_chart_names_versions_and_shares(run: Prediction):
    shown = chart(run.spans, NAMES, bubbles=run.bubbles)
    assert [row.label for row in shown.rows] == ["roller 1", "roller 2", "trainer 1 <a>", "trainer 2"]
    assert [version for _, version in shown.boundaries] == [1, 2, 3, 4]
    assert shown.busy + sum(shown.idle.values()) == pytest.approx(1.0, abs=0.005)
    for row in shown.rows:
        idle = sum(b.seconds for b in row.bubbles if b.start_s >= shown.start_s and b.end_s <= shown.end_s)
        assert row.busy == pytest.approx(1 - idle / shown.seconds, abs=0.03)


def test_a_window_of_iterations(run: Prediction):
    one = chart(run.spans, NAMES, bubbles=run.bubbles, iterations=(1, 1))
    assert [version for _, version in one.boundaries] == [2]
    assert one.seconds == pytest.approx(run.iteration_s, rel=0.02)
    with pytest.raises(ValueError, match="there is no unit to show in iterations 7 to 9"):
        chart(run.spans, NAMES, iterations=(7, 9))


def test_units_too_narrow_to_see_are_merged_and_cover_the_same_time():
    micro_batch = MicroBatchId("train", 0, 0)
    spans = [TracedUnit("w", "device", RolloutUnit(micro_batch, t, t + 1), t, t + 0.99, 0, 0) for t in range(50)]
    spans.append(TracedUnit("w", "device", UpdateUnit(1), 50.0, 50.5, 0, 0))
    row = chart(spans, {}).rows[0]
    assert len(bars_of(row, 0.5)) == 51
    merged = bars_of(row, 2.0)
    assert [(bar.start_s, bar.end_s, bar.activity) for bar in merged] == [(0, 49.99, "rollout"), (50, 50.5, "update")]
    assert merged[0].detail.startswith("50 units")


def test_numbers_in_names_are_sorted_as_numbers():
    names = ["w10", "w2", "rate-0.6-1", "rate-0.35-2", "rate-0.35-10"]
    assert sorted(names, key=natural) == ["rate-0.35-2", "rate-0.35-10", "rate-0.6-1", "w2", "w10"]


def test_the_picture_grows_with_the_fleet(run: Prediction):
    few = Image.open(io.BytesIO(gantt_png(chart(run.spans, NAMES, bubbles=run.bubbles, iterations=(1, 2)), "few")))
    fleet = predict(model(), [Pool("fast", 40)], Colocated(), iterations=3)
    many = Image.open(io.BytesIO(gantt_png(chart(fleet.spans, {}, bubbles=fleet.bubbles))))
    assert few.width == many.width
    assert few.height < many.height < 2000
    # White ground, rollout blue, train orange and the bubbles' pale colours are all there.
    colours = {colour for _, colour in few.convert("RGB").getcolors(maxcolors=1 << 20)}
    assert {(255, 255, 255), (0x3B, 0x6E, 0xA5), (0xE0, 0x7B, 0x1F), (0xDB, 0xE7, 0xF4)} <= colours


def test_the_page_is_self_contained_and_well_formed(run: Prediction):
    page = gantt_html(chart(run.spans, NAMES, bubbles=run.bubbles), "a < b & c")
    assert not re.search(r"https?:|src=|href=|url\(|@import|<script", page)
    body = page[page.index("<body>") : page.index("</html>")]
    root = ElementTree.fromstring(body)
    assert root.findtext("h1") == "a < b & c"
    rectangles = [r for r in root.iter("rect") if r.get("class") == "unit"]
    assert len(rectangles) >= 4
    assert all(r.findtext("title") for r in rectangles)
    assert "trainer 1 <a>" in [t.text for t in root.iter("text")]


def test_cpu_lanes_on_request(run: Prediction):
    shown = chart(run.spans, NAMES, bubbles=run.bubbles, lanes=("device", "cpu"))
    assert "trainer 2 cpu" in [row.label for row in shown.rows]
    assert shown.busy == pytest.approx(chart(run.spans, NAMES, bubbles=run.bubbles).busy, abs=0.02)
