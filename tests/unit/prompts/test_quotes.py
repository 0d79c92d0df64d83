"""Targets from quotation marks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from digenrl.prompts.quotes import quoted_text

PAIRS = ['""', "“”", "„“", "«»", "»«", "「」", "””"]
WORDS = st.text("abcXYZ 019'é-", min_size=1).map(str.strip).filter(bool)


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('A sign that reads "OPEN"', "OPEN"),
        ("A sign that reads “OPEN late”", "OPEN late"),
        ("Ein Schild „Bäckerei“ und „Café“", "Bäckerei Café"),
        ('A "NO" above an "ENTRY" sign', "NO ENTRY"),
        ("a dog's tag that says 'Rex'", "Rex"),
        ("‘Don’t walk’ on a light", "Don’t walk"),
        ("a poster: 'it's late'.", "it's late"),
        ("the baker's \"Rolls 'n' Buns\"", "Rolls 'n' Buns"),
    ],
)
def test_quoted_parts_are_joined_in_order(prompt: str, target: str) -> None:
    assert quoted_text(prompt) == target


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("a cat", "nothing in the prompt stands in quotation marks; add a field 'target'"),
        ("a dog's bone and the cats' toys", "nothing in the prompt stands in quotation marks"),
        ('a 12" pizza', r'the mark " \(character 5\) has no partner'),
        ("“open", r"the mark “ \(character 1\) has no partner"),
        ('“open"', r"the mark “ \(character 1\) has no partner"),
        ('“say "hi"”', 'the mark " stands within other quotation marks'),
        ('a sign that reads ""', "nothing stands between the marks at character 19"),
    ],
)
def test_what_is_not_clear_is_refused(prompt: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        quoted_text(prompt)


@given(parts=st.lists(st.tuples(WORDS, st.sampled_from(PAIRS), WORDS), min_size=1, max_size=4))
def test_every_quoted_part_is_found_whatever_the_marks(parts: list[tuple[str, str, str]]) -> None:
    prompt = "".join(f"{before} {marks[0]}{inside}{marks[1]} " for before, marks, inside in parts)
    assert quoted_text(prompt) == " ".join(inside for _, _, inside in parts)
