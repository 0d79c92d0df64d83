"""Scheduling techniques that exclude each other: every such pair is refused with a sentence that says why.

All other pairs occur in the rows of scheduling/test_combinations.py.
"""

from __future__ import annotations

import pytest

from combinations import REFUSED, Setting, overrides
from digenrl.config.load import load_config, warnings_of
from refusals import ACROSS, PAGE, paged, refusal


def named(pair: frozenset[Setting]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(pair))


@pytest.mark.parametrize("pair", REFUSED, ids=named)
def test_refused_with_its_sentence(pair: frozenset[Setting]) -> None:
    sentence = refusal(*overrides(*pair))
    assert REFUSED[pair] in sentence
    assert " use " in sentence or "leave it out" in sentence, "it says what to do instead"


@pytest.mark.parametrize(("changes", "sentence"), ACROSS, ids=[" ".join(changes) for changes, _ in ACROSS])
def test_refused_across_sections(changes: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*changes)


def test_the_page_names_every_refused_pair_with_its_sentence() -> None:
    page = PAGE.read_text()
    assert page == paged(page), "run: PYTHONPATH=. python tests/refusals.py"


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
