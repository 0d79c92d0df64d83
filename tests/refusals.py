"""Refused pairs of scheduling settings, and the table of them in docs/scheduling.md.

PYTHONPATH=. python tests/refusals.py      writes the table anew; a test compares it
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.overhead_tables import Marks, replace_block
from combinations import REFUSED, overrides
from digenrl.config.load import ConfigError, load_config

PAGE = Path(__file__).parents[1] / "docs" / "scheduling.md"

MARKS = Marks("refusals", "tests/refusals.py")

#: Pairs of a scheduling setting and one of another kind.
ACROSS: list[tuple[tuple[str, str], str]] = [
    (
        ("schedule.advantage=streaming", "algorithm.std_scope=update"),
        "schedule.advantage=streaming cannot be combined with algorithm.std_scope=update: only a group's own standard "
        "deviation keeps advantages within adv_clip_max; use std_scope=group, or advantage=group",
    ),
    (
        ("schedule.advantage=streaming", "algorithm.std_scope=iteration"),
        "schedule.advantage=streaming cannot be combined with algorithm.std_scope=iteration",
    ),
    (
        ("schedule.advantage=streaming", "algorithm.samples_per_prompt=27"),
        "needs advantages that algorithm.adv_clip_max=5 never clips, but one sample of algorithm.samples_per_prompt=27 "
        "can be further from the mean; use at most 26 samples, a larger adv_clip_max, or advantage=group",
    ),
    (
        ("schedule.advantage=streaming", "algorithm.adv_clip_max=1.5"),
        "needs advantages that algorithm.adv_clip_max=1.5 never clips",
    ),
    (
        ("schedule.stale_fraction=0.25", "algorithm.prompts_per_iteration=2"),
        "schedule.stale_fraction=0.25 is less than one of algorithm.prompts_per_iteration=2 groups; use at least 0.5",
    ),
    (
        ("schedule.micro_batch=3", "algorithm.samples_per_prompt=4"),
        "schedule.micro_batch=3 must divide algorithm.samples_per_prompt=4",
    ),
    (
        ("schedule.steps_per_unit=7", "algorithm.num_steps=6"),
        "schedule.steps_per_unit=7 exceeds algorithm.num_steps=6; use at most that, or auto for the whole trajectory",
    ),
    (
        ("schedule.layout=disaggregated", "cluster.workers=1"),
        "cluster.trainers=1 leaves no rollout worker of cluster.workers=1; use fewer trainers or "
        "schedule.layout=colocated",
    ),
    (("schedule.layout=digenrl", "cluster.trainers=2"), "cluster.trainers=2 leaves no rollout worker"),
    (
        ("schedule.advantage=streaming", "algorithm.best_of_n=2"),
        "schedule.advantage=streaming cannot be combined with algorithm.best_of_n=2: which samples take part is known "
        "only when their group is complete",
    ),
    (
        ("schedule.advantage=streaming", "algorithm.reward_aggregation=advantages"),
        "schedule.advantage=streaming cannot be combined with algorithm.reward_aggregation=advantages: each reward has "
        "a mean and a standard deviation of its own",
    ),
]


def refusal(*changes: str) -> str:
    """What is said to a configuration that is not accepted."""
    try:
        load_config("tiny-smoke", changes)
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{' '.join(changes)} is accepted")


def paged(page: str) -> str:
    """The page with the table as it is today."""
    found: dict[str, list[str]] = {}
    for pair in REFUSED:
        changes = [f"schedule.{name}={value}" for name, value in sorted(pair)]
        found.setdefault(_sentence(*overrides(*pair)), []).append(_cell(changes))
    for changes, _ in ACROSS:
        found.setdefault(_sentence(*changes), []).append(_cell(changes))
    rows = [f"| {'<br>'.join(cells)} | {sentence} |" for sentence, cells in found.items()]
    return replace_block(page, "\n".join(["| settings | refused with |", "|---|---|", *rows]), MARKS)


def _sentence(*changes: str) -> str:
    return refusal(*changes).removeprefix("schedule: ").removesuffix(" (preset tiny-smoke with overrides)")


def _cell(changes: list[str] | tuple[str, ...]) -> str:
    return ", ".join(f"`{change}`" for change in changes)


if __name__ == "__main__":
    PAGE.write_text(paged(PAGE.read_text()))
