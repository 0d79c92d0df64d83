"""`digenrl plan`: how a run would go on a fleet, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from digenrl.config.errors import ConfigError
from digenrl.scheduling.scopes import StdScope
from flows.errors import ExpectedError
from flows.plan.chart import write_chart
from flows.plan.fleet import read_fleet
from flows.plan.place import Place, place_of
from flows.plan.schedules import Planned, Planner, schedule_of, schedules
from flows.plan.subject import subject_of
from flows.plan.tables import (
    comparison,
    console,
    figures,
    grid,
    intro,
    phases_table,
    schedule_words,
    scopes_words,
    sizing,
    split_words,
    workers_table,
)

#: Role splits that are tried on the virtual clock for the plan itself, and for each row of a comparison.
SPLITS, SPLITS_OF_ROW = 12, 6

_SCOPES: tuple[StdScope, ...] = ("group", "update", "iteration")


def run(
    name: str,
    overrides: Sequence[str],
    *,
    fleet: Path | None,
    profile: Path | None,
    compare: bool,
    gantt: Path,
    target: float | None = None,
    budget: float | None = None,
) -> None:
    """Predict, print, draw.

    Args:
        name: preset, configuration file or workload.
        overrides: changes to it.
        fleet: file of workers; None: as configured.
        profile: file of costs; None: an earlier run's, or derived ones.
        compare: print a row per layout and technique.
        gantt: directory for the chart.
        target: samples/s for which the cheapest part of the fleet is wanted.
        budget: what the fastest part of the fleet may cost an hour.

    Raises:
        ConfigError: something given is wrong, or costs are not known.
        ExpectedError: no schedule comes to its end on this fleet.
    """
    subject = subject_of(name, overrides)
    members = read_fleet(fleet) if fleet is not None else None
    if not gantt.is_dir():
        raise ConfigError(f"--gantt {gantt}: expected a directory that exists")
    place = place_of(subject, members, profile)
    unpriced = [pool.kind for pool in place.pools if pool.price_per_hour is None]
    if budget is not None and unpriced:
        raise ConfigError(
            f"--budget-per-hour {budget:g} needs the price of every worker: write price_per_hour of "
            f"{', '.join(unpriced)} into the file given with --fleet"
        )
    planner = Planner(place.model, place.pools, subject.config.algorithm.closing_scope)
    out = console()
    try:
        _plan(place, planner, out, trainers=None if members is not None else subject.trainers, gantt=gantt)
        if target is not None or budget is not None:
            _size(place, planner, out, target, budget)
        if compare:
            _compare(place, planner, out)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ExpectedError(str(error)) from None


def _plan(place: Place, planner: Planner, out: Console, *, trainers: int | None, gantt: Path) -> None:
    subject, schedule = place.subject, schedule_of(place.subject)
    with out.status("trying role splits on the virtual clock"):
        best = planner.best(schedule, SPLITS)
        planned = best if trainers is None else planner.first(schedule, trainers)
        bound_s = planner.bound_s()
        scopes = {scope: planner.with_scope(planned, scope) for scope in _SCOPES}
    for line in (*intro(subject, place.source, place.pools), *(f"note: {note}" for note in place.notes)):
        out.print(line)
    out.print(f"schedule: {schedule_words(schedule)}\n")
    out.print(workers_table(place.pools, planned.split, place.need, subject.shape.timestep_batch))
    out.print()
    out.print(phases_table(planned.prediction))
    out.print()
    *rows, binds = figures(planned, bound_s, place.notes)
    if not schedule.colocated:
        rows.append(("best role split", _best(best, planned, place)))
    rows.append(("std scope", scopes_words(scopes, subject.config.algorithm.closing_scope)))
    stem = f"plan-{subject.name}"
    paths = write_chart(planned, gantt, stem, f"{subject.name}: {schedule_words(schedule)}")
    out.print(grid([*rows, binds, *(("Gantt", str(path)) for path in paths)]))


def _best(best: Planned, planned: Planned, place: Place) -> str:
    words = split_words(best.split, place.pools)
    if best.split == planned.split:
        return f"{words}, as planned here"
    gain = best.prediction.samples_per_s / planned.prediction.samples_per_s - 1
    if gain < 0.005:
        return f"{split_words(planned.split, place.pools)}, as planned here"
    return f"{words}: {best.prediction.iteration_s:.4g} s, {gain:+.1%} samples/s"


def _size(place: Place, planner: Planner, out: Console, target: float | None, budget: float | None) -> None:
    with out.status("choosing workers"):
        found = planner.sized(schedule_of(place.subject), SPLITS, target_samples_per_s=target, budget_per_hour=budget)
    out.print()
    out.print(grid(sizing(found, target, budget)))


def _compare(place: Place, planner: Planner, out: Console) -> None:
    rows, left_out = [], []
    for schedule in schedules(place.subject):
        with out.status(f"trying {schedule.name}"):
            try:
                rows.append(planner.best(schedule, SPLITS_OF_ROW))
            except ValueError as error:  # such as a fleet that is too small for two roles
                left_out.append(f"not possible here: {schedule.name}: {error}")
    priced = all(pool.price_per_hour is not None for pool in place.pools)
    out.print()
    out.print(comparison(rows, planner.bound_s(), schedule_of(place.subject), priced=priced))
    for line in ("each at its best role split; ◀ is the configured schedule; the work bound is on policy", *left_out):
        out.print(line, style="dim")
