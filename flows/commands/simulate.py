"""`digenrl simulate`: a schedule on the virtual clock, on any fleet of up to 4,096 workers."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from digenrl.config.errors import ConfigError
from digenrl.scheduling.predict import Prediction
from flows.errors import ExpectedError
from flows.gantt.picture import chrome_trace
from flows.plan.chart import worker_names
from flows.plan.fleet import MOST_WORKERS, read_fleet
from flows.plan.place import place_of
from flows.plan.schedules import Planned, Planner, schedule_of
from flows.plan.subject import Subject, subject_of
from flows.plan.tables import console, figures, grid, intro, phases_table, schedule_words, split_words
from storage.atomic import write_atomically


def run(
    name: str,
    overrides: Sequence[str],
    *,
    workers: int | None,
    fleet: Path | None,
    trainers: int | None,
    iterations: int,
    profile: Path | None,
    timeline: Path | None,
) -> None:
    """Simulate and print.

    Args:
        name: preset, configuration file or workload.
        overrides: changes to it.
        workers: how many, of the kind whose costs are known; None: as configured.
        fleet: file of workers instead.
        trainers: how many train; None: as many as would be best if nobody ever waited.
        iterations: to simulate; the figures leave out the first and the last.
        profile: file of costs; None: an earlier run's, or derived ones.
        timeline: Chrome trace to write.

    Raises:
        ConfigError: something given is wrong, or costs are not known.
        ExpectedError: the schedule does not come to its end on this fleet.
    """
    if workers is not None and fleet is not None:
        raise ConfigError(f"--workers {workers} and --fleet {fleet}: give one of the two")
    if timeline is not None and not timeline.absolute().parent.is_dir():
        raise ConfigError(f"--timeline {timeline}: there is no directory {timeline.parent}")
    extra = [f"cluster.workers={workers}"] if workers is not None else []
    subject = subject_of(name, [*overrides, *extra])
    if subject.config.cluster.workers > MOST_WORKERS:
        raise ConfigError(f"cluster.workers={subject.config.cluster.workers}: expected at most {MOST_WORKERS}")
    place = place_of(subject, read_fleet(fleet) if fleet is not None else None, profile)
    subject = place.subject
    total = sum(pool.count for pool in place.pools)
    if trainers is not None and trainers >= total:
        raise ConfigError(f"--trainers {trainers} leaves no rollout worker of {total}; expected fewer")
    out = console()
    for line in (*intro(subject, place.source, place.pools), *(f"note: {note}" for note in place.notes)):
        out.print(line)

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    began = time.perf_counter()
    with Progress(*columns, console=out, transient=True) as progress:
        task = progress.add_task("simulating", total=units_of(subject, iterations))
        planner = Planner(
            place.model,
            place.pools,
            subject.config.algorithm.closing_scope,
            iterations,
            watch=lambda ended: progress.update(task, completed=ended),
        )
        planned = _simulate(planner, subject, trainers)
    seconds = time.perf_counter() - began
    _show(out, planned, planner, place.notes, seconds)
    if timeline is not None:
        data = chrome_trace(planned.prediction.spans, worker_names(planned), bubbles=planned.prediction.bubbles)
        write_atomically(timeline, json.dumps(data, separators=(",", ":")).encode())
        out.print(f"timeline: {timeline}, opens in https://ui.perfetto.dev", soft_wrap=True)


def units_of(subject: Subject, iterations: int) -> int:
    """Units of so many iterations."""
    shape = subject.shape
    batches = shape.micro_batches(shape.start_iteration)
    each = sum(len(shape.rollout_units(batch)) + 1 + len(shape.train_units(batch)) for batch in batches)
    return iterations * (each + shape.updates)


def _simulate(planner: Planner, subject: Subject, trainers: int | None) -> Planned:
    schedule = schedule_of(subject)
    try:
        return planner.staffed(schedule) if trainers is None else planner.first(schedule, trainers)
    except ValueError as error:
        raise ExpectedError(str(error)) from None


def _show(out: Console, planned: Planned, planner: Planner, notes: Sequence[str], seconds: float) -> None:
    found, roles = planned.prediction, schedule_words(planned.schedule)
    if planned.split:
        roles += f"; {split_words(planned.split, planner.pools)}"
    out.print(f"schedule: {roles}\n")
    out.print(phases_table(found))
    out.print()
    speed = ("simulated", _speed(found, planner.iterations, seconds))
    out.print(grid([*figures(planned, planner.bound_s(), notes), speed]))


def _speed(found: Prediction, iterations: int, seconds: float) -> str:
    units, virtual = len(found.spans), max(span.end_s for span in found.spans)
    return (
        f"{iterations} iterations, {units:,} units, {virtual:.4g} s of virtual time in {seconds:.1f} s: "
        f"{units / seconds:,.0f} units/s"
    )
