"""A timeline for people.

layout    rows, bars and bubbles of a chart
picture   the chart as PNG, and the trace for Perfetto and chrome://tracing
page      the chart as one self-contained HTML page
"""
