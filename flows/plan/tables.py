"""What `plan` and `simulate` print: tables of at most 100 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from digenrl.scheduling.allocate import Proposal
from digenrl.scheduling.binding import binding
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.bubbles import Cause
from digenrl.scheduling.predict import Prediction, joining
from digenrl.scheduling.units import RolloutUnit
from flows.gantt.layout import ACTIVITY_WORDS
from flows.plan.memory import GIB, Need
from flows.plan.schedules import Planned, Schedule
from flows.plan.subject import Subject
from flows.report import waits

#: Width where the output is not a terminal.
WIDTH = 100


def console() -> Console:
    """Where tables go."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=WIDTH)


def intro(subject: Subject, source: str, pools: Sequence[Pool]) -> list[str]:
    """What is planned, on which costs and which fleet."""
    shape, algorithm = subject.shape, subject.config.algorithm
    trained = len(shape.trained_steps(shape.start_iteration))
    return [
        f"{subject.name}: {shape.groups} groups of {shape.group_size} samples, {trained} of {shape.num_steps} steps "
        f"trained, {shape.updates} updates, std scope {algorithm.std_scope}",
        f"units: micro-batches of {shape.micro_batch}, timestep batches of {min(shape.timestep_batch, trained)}",
        f"costs: {source}",
        f"fleet: {', '.join(f'{pool.count} x {pool.kind}' for pool in pools)}",
    ]


def schedule_words(schedule: Schedule) -> str:
    """The schedule in one phrase."""
    if schedule.colocated:
        return "colocated"
    parts = ["GAP"] if schedule.gap else []
    parts += [("TAG with search" if schedule.search else "TAG")] if schedule.helps else []
    parts += [f"TCSS of {schedule.stale_groups} groups"] if schedule.stale_groups else []
    parts += ["streaming"] if schedule.streaming else []
    return " + ".join(["disaggregated", *parts])


def split_words(split: Mapping[str, int], pools: Sequence[Pool]) -> str:
    """Who trains."""
    total = sum(pool.count for pool in pools)
    named = ", ".join(f"{count} x {kind}" for kind, count in split.items() if count)
    return (
        f"{sum(split.values())} of {total} workers train ({named})"
        if len(pools) > 1
        else (f"{sum(split.values())} of {total} workers train")
    )


def workers_table(pools: Sequence[Pool], split: Mapping[str, int], need: Need | None, batch: int) -> Table:
    """Roles and memory by kind. Memory is of one worker, as estimated."""
    priced = any(pool.price_per_hour is not None for pool in pools)
    columns = ["workers", "count", "train", "roll out", "memory to train", "to roll out"]
    table = _table(*columns, *(["price an hour"] if priced else []))
    for pool in pools:
        training = split.get(pool.kind, 0)
        roles = (str(training), str(pool.count - training)) if split else ("all", "all")
        memory = (_gib(need.train(batch)), _gib(need.to_roll_out)) if need is not None else ("unknown", "unknown")
        price = "unknown" if pool.price_per_hour is None else f"{pool.price_per_hour:.2f}"
        table.add_row(pool.kind, str(pool.count), *roles, *memory, *([price] if priced else []))
    return table


def phases_table(prediction: Prediction) -> Table:
    """Where the devices' time goes in one iteration, seconds summed over all devices."""
    table = _table("one iteration", "device-seconds", "share")
    whole = prediction.iteration_s * len(prediction.kinds)
    for activity, seconds in prediction.activity_s.items():
        if activity != "score" and seconds:
            table.add_row(ACTIVITY_WORDS[activity], f"{seconds:.4g}", f"{seconds / whole:.1%}")
    for cause, seconds in sorted(prediction.bubble_s.items(), key=lambda entry: -entry[1]):
        if seconds >= 0.0005 * whole:
            table.add_row(Text(f"waits for {cause}", "dim"), f"{seconds:.4g}", f"{seconds / whole:.1%}")
    table.add_section()
    table.add_row("all devices", f"{whole:.4g}", f"{1:.1%}")
    if prediction.activity_s["score"]:
        table.add_row("score, beside them", f"{prediction.activity_s['score']:.4g}", "")
    return table


def figures(planned: Planned, bound_s: float, notes: Sequence[str] = ()) -> list[tuple[str, str]]:
    """The numbers of one schedule, last what binds.

    Args:
        planned: the schedule.
        bound_s: seconds of an iteration at the work bound.
        notes: what memory does not allow.
    """
    found = planned.prediction
    rows = [
        ("iteration", f"{found.iteration_s:.4g} s, {found.samples_per_s:.4g} samples/s"),
        ("devices busy", f"{found.utilisation:.1%}; {bound_s / found.iteration_s:.1%} of the work bound"),
    ]
    if planned.schedule.helps:
        helped, units = tag_units(planned)
        rows.append(("TAG", f"{helped:g} of {units:g} rollout units an iteration are run by trainers"))
    if found.cost_per_1000_samples is not None:
        rows.append(("cost", f"{found.cost_per_1000_samples:.4g} per 1,000 samples"))
    constraint = binding(found, planned.trainers)
    name = f"memory, and so {constraint.constraint}" if notes else constraint.constraint
    return [*rows, ("binds", f"{name}: {constraint.why}")]


def sizing(found: Proposal, target: float | None, budget: float | None) -> list[tuple[str, str]]:
    """Which workers of the fleet to take for a rate, or within a budget an hour."""
    wanted = [f"{target:g} samples/s"] if target is not None else []
    wanted += [f"{budget:g} an hour"] if budget is not None else []
    taken = [f"{n} x {offer.kind}" for n, offer in zip(found.plan.counts, found.offers, strict=True) if n]
    training = [f"{n} x {offer.kind}" for n, offer in zip(found.plan.trainers, found.offers, strict=True) if n]
    roles = f"of these {', '.join(training)} train" if training else "all do both"
    rows = [
        (f"for {' within '.join(wanted)}", f"{', '.join(taken)}; {roles}"),
        ("iteration", f"{found.prediction.iteration_s:.4g} s, {found.prediction.samples_per_s:.4g} samples/s"),
    ]
    if found.cost_per_hour is not None:
        per_sample = found.prediction.cost_per_1000_samples or 0.0
        rows.append(("cost", f"{found.cost_per_hour:.4g} an hour, {per_sample:.4g} per 1,000 samples"))
    if found.binding == "budget":
        return [*rows, ("binds", f"budget: {found.why}")]
    workers = [event.worker for event in joining(found.plan.pools(found.offers))]
    constraint = binding(found.prediction, frozenset(workers[: sum(found.plan.trainers)]))
    return [*rows, ("binds", f"{constraint.constraint}: {constraint.why}")]


def tag_units(planned: Planned) -> tuple[float, float]:
    """Rollout units per iteration: those that trainers run, and all."""
    found, (begin, end) = planned.prediction, planned.prediction.window
    rolled = [s.worker for s in found.spans if isinstance(s.unit, RolloutUnit) and begin <= s.start_s < end]
    iterations = (end - begin) / found.iteration_s
    helped = sum(worker in planned.trainers for worker in rolled)
    return round(helped / iterations, 1), round(len(rolled) / iterations, 1)


def scopes_words(scopes: Mapping[str, Prediction], chosen: str) -> str:
    """What each std scope costs."""
    base = scopes[chosen].iteration_s
    parts = [f"{chosen} {base:.4g} s"]
    for scope, prediction in scopes.items():
        if scope != chosen:
            parts.append(f"{scope} {prediction.iteration_s:.4g} s ({prediction.iteration_s / base - 1:+.1%})")
    return ", ".join(parts)


def comparison(rows: Sequence[Planned], bound_s: float, configured: Schedule, *, priced: bool) -> Table:
    """One row per schedule."""
    columns = ["schedule", "train", "s/iteration", "samples/s", "busy", "of bound", "waits for"]
    table = _table(*columns[:6], *(["cost/1,000"] if priced else []), columns[6])
    for row in rows:
        found, shares = row.prediction, shares_of(row.prediction)
        mark = " ◀" if same(row.schedule, configured) else ""
        cells = [
            Text(row.schedule.name + mark, "bold" if mark else ""),
            str(len(row.trainers)) if row.trainers else "all",
            f"{found.iteration_s:.4g}",
            f"{found.samples_per_s:.4g}",
            f"{found.utilisation:.0%}",
            f"{bound_s / found.iteration_s:.0%}",
        ]
        if priced:
            cells.append("" if found.cost_per_1000_samples is None else f"{found.cost_per_1000_samples:.4g}")
        table.add_row(*cells, Text(", ".join(waits(shares).split(", ")[: 1 if priced else 2]), "dim"))
    return table


def same(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules differ by name only."""
    return [v for k, v in vars(one).items() if k != "name"] == [v for k, v in vars(other).items() if k != "name"]


def shares_of(prediction: Prediction) -> dict[Cause, float]:
    """Cause -> share of the devices' time."""
    whole = prediction.iteration_s * len(prediction.kinds)
    return {cause: seconds / whole for cause, seconds in prediction.bubble_s.items()}


def grid(rows: Sequence[tuple[str, str]]) -> Table:
    """Names and what is said about them."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, column in enumerate(columns):
        left = place == 0 or column == "waits for"
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "waits for")
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.3g} MiB"
