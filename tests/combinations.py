"""Combinations of scheduling techniques: every two settings occur together in a row, or exclude each other.

VALUES     the settings and what they are set to
ROWS       a pairwise-covering table
REAL       the rows that run on real workers as well
REFUSED    pairs of settings that exclude each other, with the sentence that says why
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

Setting = tuple[str, str]

VALUES: dict[str, tuple[str, ...]] = {
    "layout": ("colocated", "genrl", "disaggregated", "digenrl"),
    "gap": ("true", "false"),
    "timestep_batch": ("1", "2", "auto"),
    "trainer_assist": ("off", "greedy", "search", "auto"),
    "stale_fraction": ("0", "0.25", "0.5"),
    "advantage": ("group", "streaming", "auto"),
    "steps_per_unit": ("1", "3", "auto"),
    "observe.detail": ("unit", "microbatch", "iteration", "auto"),
}

#: 4 groups of 4 samples, 2 updates: half of the groups are those of the first update.
BASE = (
    "cluster.workers=3",
    "schedule.micro_batch=2",
    "schedule.timestep_batch=auto",
    "algorithm.num_steps=6",
    "iterations=2",
)

ROWS: tuple[tuple[str, ...], ...] = (
    ("colocated", "true", "auto", "off", "0", "auto", "auto", "unit"),
    ("colocated", "true", "1", "auto", "0", "streaming", "1", "iteration"),
    ("colocated", "false", "2", "off", "0", "group", "3", "auto"),
    ("colocated", "false", "2", "off", "0", "auto", "3", "microbatch"),
    ("genrl", "true", "auto", "auto", "0", "group", "1", "auto"),
    ("genrl", "false", "auto", "auto", "0", "group", "auto", "microbatch"),
    ("genrl", "false", "auto", "auto", "0", "auto", "3", "unit"),
    ("genrl", "false", "1", "off", "0", "streaming", "auto", "iteration"),
    ("disaggregated", "true", "1", "greedy", "0", "streaming", "3", "microbatch"),
    ("disaggregated", "true", "2", "search", "0", "streaming", "auto", "auto"),
    ("disaggregated", "true", "2", "greedy", "0.25", "streaming", "auto", "unit"),
    ("disaggregated", "true", "2", "search", "0.25", "auto", "auto", "iteration"),
    ("disaggregated", "true", "auto", "off", "0.5", "auto", "auto", "iteration"),
    ("disaggregated", "false", "1", "off", "0.25", "auto", "1", "microbatch"),
    ("disaggregated", "false", "1", "auto", "0.25", "group", "3", "auto"),
    ("digenrl", "true", "1", "off", "0.5", "auto", "3", "auto"),
    ("digenrl", "true", "1", "search", "0.5", "group", "1", "unit"),
    ("digenrl", "true", "2", "greedy", "0.5", "auto", "1", "auto"),
    ("digenrl", "true", "auto", "greedy", "0.25", "group", "3", "iteration"),
    ("digenrl", "true", "auto", "search", "0", "streaming", "3", "microbatch"),
    ("digenrl", "false", "2", "auto", "0.5", "group", "auto", "microbatch"),
)

#: Every value of every setting is among them.
REAL = tuple(ROWS[i] for i in (0, 7, 14, 17, 18, 19))

_HELPS_NOBODY = "means nothing with layout=colocated, where every worker rolls out"
_NOBODY_GENERATES = "gains nothing with layout=colocated, where nobody generates while the others train"
_WHOLE_GROUP = "cannot be combined with gap=false: a trainer that helps would be bound to a whole group"
_NOTHING_FRESH = (
    "schedule.advantage=streaming has nothing to act on: schedule.stale_fraction=0.5 makes all 2 groups of the first "
    "update stale, and only fresh ones can be streamed"
)

REFUSED: dict[frozenset[Setting], str] = {
    **{
        frozenset({("layout", layout), ("trainer_assist", assist)}): f"trainer_assist={assist} {_HELPS_NOBODY}"
        for layout, assist in product(("colocated", "genrl"), ("greedy", "search"))
    },
    **{
        frozenset({("layout", layout), ("stale_fraction", share)}): f"stale_fraction={share} {_NOBODY_GENERATES}"
        for layout, share in product(("colocated", "genrl"), ("0.25", "0.5"))
    },
    **{
        frozenset({("gap", "false"), ("trainer_assist", assist)}): f"trainer_assist={assist} {_WHOLE_GROUP}"
        for assist in ("greedy", "search")
    },
    frozenset({("layout", "genrl"), ("timestep_batch", "2")}): (
        "layout=genrl stands for layout=colocated with timestep_batch=1, but timestep_batch=2 is set"
    ),
    frozenset({("stale_fraction", "0.5"), ("advantage", "streaming")}): _NOTHING_FRESH,
}


def settings(row: tuple[str, ...]) -> tuple[Setting, ...]:
    """A row with the names of its settings."""
    return tuple(zip(VALUES, row, strict=True))


def overrides(*chosen: Setting) -> list[str]:
    """Settings as they are typed, on top of BASE."""
    return [*BASE, *(f"schedule.{name}={value}" for name, value in chosen)]


def pairs() -> Iterator[frozenset[Setting]]:
    """Every two values of two settings."""
    for (one, values), (two, others) in combinations(VALUES.items(), 2):
        for value, other in product(values, others):
            yield frozenset({(one, value), (two, other)})
