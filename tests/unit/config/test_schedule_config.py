"""Scheduling techniques that exclude each other: every such pair is refused with a sentence that says why.

All other pairs occur in the rows of scheduling/test_combinations.py.
"""

from __future__ import annotations

import pytest

from combinations import REFUSED, Setting, overrides
from digenrl.config.load import ConfigError, load_config, warnings_of


def refusal(*changes: str) -> str:
    """What is said to a configuration that is not accepted."""
    with pytest.raises(ConfigError) as caught:
        load_config("tiny-smoke", changes)
    return str(caught.value)


def named(pair: frozenset[Setting]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(pair))


@pytest.mark.parametrize("pair", REFUSED, ids=named)
def test_refused_with_its_sentence(pair: frozenset[Setting]) -> None:
    sentence = refusal(*overrides(*pair))
    assert REFUSED[pair] in sentence
    assert " use " in sentence or "leave it out" in sentence, "it says what to do instead"


#: Pairs of a scheduling setting and one of another kind.
ACROSS = [
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
]


@pytest.mark.parametrize(("changes", "sentence"), ACROSS, ids=[" ".join(changes) for changes, _ in ACROSS])
def test_refused_across_sections(changes: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*changes)


#: Accepted, but of no use.
IDLE = [
    (
        ("schedule.steps_per_unit=3", "schedule.observe.detail=unit"),
        "schedule.steps_per_unit=3 has no effect: schedule.observe.detail=unit cuts every trajectory into single steps",
    ),
    (
        ("schedule.stale_fraction=0.5", "iterations=1"),
        "schedule.stale_fraction=0.5 has no effect: with iterations=1 there is no iteration before whose weights could "
        "be used",
    ),
]


@pytest.mark.parametrize(("changes", "sentence"), IDLE, ids=[" ".join(changes) for changes, _ in IDLE])
def test_without_effect_is_a_note(changes: tuple[str, ...], sentence: str) -> None:
    assert warnings_of(load_config("tiny-smoke", changes)) == [sentence]
    for change in changes:
        assert sentence not in warnings_of(load_config("tiny-smoke", [change]))
