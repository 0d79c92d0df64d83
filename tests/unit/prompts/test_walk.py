"""The walk through a set: epochs, and the turns of several sources."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.config import PromptSource
from digenrl.prompts import PromptSet, load_prompts, prompts_of_iteration, taken_before
from digenrl.rewards.base import PromptRecord


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


def weighted(folder: Path, *sources: tuple[int, float]) -> PromptSet:
    """Sources of so many prompts with these weights; the first one's ids begin with a."""
    given = []
    for letter, (size, weight) in zip("abc", sources, strict=False):
        path = folder / f"{letter}{size}.jsonl"
        path.write_text("".join(f'{{"id": "{letter}{i}", "text": "{i}"}}\n' for i in range(size)))
        given.append(PromptSource(path=str(path), weight=weight))
    return load_prompts(given)


@settings(deadline=None, max_examples=40)
@given(
    sources=st.lists(
        st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.25, 1.0, 3.0, 7.0])), min_size=2, max_size=3
    ),
    groups=st.integers(1, 9),
    first=st.integers(0, 300),
)
def test_sources_keep_their_shares_and_each_its_epochs(
    sources: list[tuple[int, float]], groups: int, first: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prompts = weighted(tmp_path_factory.mktemp("sources"), *sources)
    total = sum(weight for _, weight in sources)
    for iteration in range(first, first + 6):
        taken = prompts_of_iteration(prompts, 0, iteration, groups)
        before, after = (taken_before(prompts, i, groups) for i in (iteration, iteration + 1))
        assert sum(before) == iteration * groups
        counts = Counter(record.uid[0] for record in taken)
        assert [counts[letter] for letter, _ in zip("abc", sources, strict=False)] == [
            now - then for then, now in zip(before, after, strict=True)
        ]
        for count, (_, weight) in zip(after, sources, strict=True):
            assert abs(count - (iteration + 1) * groups * weight / total) <= len(sources)
        for letter, (size, _) in zip("abc", sources, strict=False):
            drawn = Counter(record.uid for record in taken if record.uid[0] == letter)
            assert all(number <= -(-drawn.total() // size) for number in drawn.values()), "none twice without need"


def test_every_source_is_walked_through_in_epochs(tmp_path: Path) -> None:
    prompts = weighted(tmp_path, (5, 1.0), (7, 2.0))
    counts = {letter: Counter({f"{letter}{i}": 0 for i in range(size)}) for letter, size in (("a", 5), ("b", 7))}
    for iteration in range(70):
        for record in prompts_of_iteration(prompts, 3, iteration, 3):
            counts[record.uid[0]][record.uid] += 1
        assert all(max(count.values()) - min(count.values()) <= 1 for count in counts.values())
    assert [count.total() for count in counts.values()] == [70, 140]


def test_the_order_within_an_iteration_mixes_sources_and_depends_on_the_seed(tmp_path: Path) -> None:
    prompts = weighted(tmp_path, (50, 1.0), (50, 1.0))
    first = {seed: [p.uid[0] for p in prompts_of_iteration(prompts, seed, 0, 8)] for seed in (0, 1, 2)}
    assert all(sorted(letters) == list("aaaabbbb") for letters in first.values())
    assert len({"".join(letters) for letters in first.values()}) > 1
    assert prompts_of_iteration(prompts, 0, 4, 8) == prompts_of_iteration(prompts, 0, 4, 8)


def test_one_source_alone_is_walked_as_a_plain_sequence(tmp_path: Path) -> None:
    prompts = weighted(tmp_path, (20, 3.0))
    plain = tuple(prompts)
    assert all(prompts_of_iteration(prompts, 0, i, 6) == prompts_of_iteration(plain, 0, i, 6) for i in range(9))


def test_the_walk_of_a_seed_never_changes() -> None:
    """Runs and their checkpoints rest on it."""
    assert uids(10, 0, 0, 4) == ["3", "1", "7", "2"]
    assert uids(10, 0, 2, 4) == ["6", "8", "9", "4"], "the end of an epoch and the start of the next"
