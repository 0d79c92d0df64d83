"""Prompt sets, the errors a person reads, and the walk through a set."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.prompts import PromptError, load_prompts, parse_jsonl, parse_text, prompts_of_iteration
from digenrl.rewards.base import PromptRecord


def test_shipped_sets_hold_the_numbers_and_share_none() -> None:
    train, held_out = load_prompts("package:numbers-train"), load_prompts("package:numbers-held-out")
    assert (len(train), len(held_out)) == (800, 200)
    assert {p.text for p in train + held_out} == {f"{n:03d}" for n in range(1000)}
    assert all(p == PromptRecord(f"n{p.text}", p.text, {"target": p.text}) for p in train + held_out)


def test_jsonl_keeps_order_ids_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"id": "b", "text": "zwölf", "target": "12"}\n\n{"text": " a cat "}\r\n', encoding="utf-8-sig")
    assert load_prompts(str(path)) == (
        PromptRecord("b", "zwölf", {"target": "12"}),
        PromptRecord("line3", " a cat ", {}),
    )


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_bytes(b"a cat\r\n\n  a cat\na dog")
    assert load_prompts(str(path)) == (
        PromptRecord("line1", "a cat"),
        PromptRecord("line3", "a cat"),
        PromptRecord("line4", "a dog"),
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b"{oops}", r"line 2: not JSON \(.*column 2\); expected an object such as"),
        (b'["042"]', r'line 2: \["042"\] is not a JSON object; expected'),
        (b'{"id": "b", "prompt": "042"}', r"line 2: has no 'text'; expected an object such as"),
        (b'{"id": "b", "text": "  "}', r"line 2: 'text' is blank; expected some text"),
        (b'{"id": "", "text": "042"}', r"line 2: 'id' is blank"),
        (b'{"id": "a", "text": "042"}', r"line 2: the id 'a' was already used in line 1; expected every id once"),
        (b'{"id": 7, "text": "042"}', r"line 2: 'id' is 7; expected a string, such as \"7\""),
        (b'{"id": "b", "text": "042", "target": 42}', r"line 2: 'target' is 42; expected a string, such as \"42\""),
        (b'{"id": "b", "text": "042", "bold": true}', r"line 2: 'bold' is true; expected a string$"),
        (b'{"id": "b", "text": null}', r"line 2: 'text' is null; expected a string$"),
        (rb'{"id": "b", "text": "04\ud800"}', r"line 2: 'text' holds the lone surrogate U\+D800 as its character 3"),
        (rb'{"id": "b", "text": "042", "\udfff": "x"}', r"line 2: '\\udfff' holds the lone surrogate U\+DFFF as its"),
        (b'{"id": "b", "text": "042", "more": ' + b"[" * 100_000, r"line 2: nested too deeply; expected an object"),
        ('{"id": "b", "text": "zwölf"}'.encode("latin-1"), r"line 2: byte 24 of the line \(0xf6\) is not UTF-8"),
    ],
)
def test_a_wrong_line_is_named_with_what_is_wrong_and_expected(line: bytes, sentence: str) -> None:
    with pytest.raises(PromptError, match=r"^set\.jsonl, " + sentence):
        parse_jsonl(b'{"id": "a", "text": "041"}\n' + line + b"\n", "set.jsonl")


def test_an_id_that_looks_like_a_default_one_is_still_unique() -> None:
    with pytest.raises(PromptError, match="line 2: the id 'line2' was already used in line 1"):
        parse_jsonl(b'{"id": "line2", "text": "a"}\n{"text": "b"}', "set.jsonl")


@pytest.mark.parametrize("parse", [parse_jsonl, parse_text])
def test_an_empty_set_is_refused(parse: type(parse_jsonl)) -> None:
    with pytest.raises(PromptError, match="set: holds no prompts; expected at least one line"):
        parse(b"\n \n", "set")


def test_a_missing_file_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    with pytest.raises(PromptError, match=r"promts\.jsonl is not a file; did you mean .*/prompts\.jsonl\?"):
        load_prompts(str(tmp_path / "promts.jsonl"))
    with pytest.raises(PromptError, match=r"nowhere/promts\.txt is not a file$"):
        load_prompts(str(tmp_path / "nowhere" / "promts.txt"))


def test_an_unknown_package_set_is_answered_with_the_nearest() -> None:
    with pytest.raises(PromptError, match=r"package:number-train: .*did you mean numbers-train\?"):
        load_prompts("package:number-train")
    with pytest.raises(PromptError, match="numbers-held-out, numbers-train"):
        load_prompts("package:xyz")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"set\.csv: expected a \.jsonl file, a \.txt file or package:NAME"):
        load_prompts(str(tmp_path / "set.csv"))


def records(count: int) -> list[PromptRecord]:
    return [PromptRecord(str(i), str(i)) for i in range(count)]


def uids(count: int, seed: int, iteration: int, groups: int) -> list[str]:
    return [p.uid for p in prompts_of_iteration(records(count), seed, iteration, groups)]


@settings(deadline=None)
@given(size=st.integers(1, 30), groups=st.integers(1, 30), seed=st.integers(0, 5), first=st.integers(0, 40))
def test_every_epoch_is_a_permutation_and_no_iteration_repeats_without_need(
    size: int, groups: int, seed: int, first: int
) -> None:
    iterations = range(first, first + 2 + 2 * size // groups)
    taken = [uids(size, seed, iteration, groups) for iteration in iterations]
    for uids_of_one in taken:
        counts = Counter({str(i): 0 for i in range(size)})
        counts.update(uids_of_one)
        assert len(uids_of_one) == groups and max(counts.values()) - min(counts.values()) <= 1
    walk = [uid for uids_of_one in taken for uid in uids_of_one]
    skipped = -first * groups % size
    epochs = [walk[i : i + size] for i in range(skipped, len(walk) - size + 1, size)]
    assert epochs and all(len(set(epoch)) == size for epoch in epochs)


def test_the_walk_depends_on_seed_and_iteration_alone() -> None:
    assert uids(100, 3, 7, 8) == uids(100, 3, 7, 8)
    assert uids(100, 3, 7, 8) != uids(100, 4, 7, 8)
    assert uids(100, 3, 0, 8) != uids(100, 3, 1, 8)
    assert uids(8, 3, 0, 8) != uids(8, 3, 1, 8), "each epoch has its own permutation"


@pytest.mark.parametrize(("size", "iteration", "groups"), [(0, 0, 1), (5, 0, 0), (5, -1, 1)])
def test_impossible_requests_are_refused(size: int, iteration: int, groups: int) -> None:
    with pytest.raises(ValueError, match="expected iteration >= 0"):
        uids(size, 0, iteration, groups)
