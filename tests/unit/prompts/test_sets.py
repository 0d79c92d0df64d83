"""Train and held-out, several sources, and how little of a long file is in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from digenrl.config import DataConfig, PromptSource
from digenrl.prompts import PromptError, PromptSet, load_data, load_held_out, load_prompts
from digenrl.prompts.records import derived_id, key_of


def numbered(path: Path, numbers: range | list[int], letter: str = "n") -> str:
    path.write_text("".join(f'{{"id": "{letter}{i}", "text": "number {i}"}}\n' for i in numbers))
    return str(path)


def uids(prompts: object) -> list[str]:
    assert isinstance(prompts, PromptSet)
    return [record.uid for record in prompts]


@settings(deadline=None, max_examples=25)
@given(share=st.sampled_from([0.1, 0.3, 0.5]), more=st.lists(st.integers(200, 400), unique=True, max_size=20))
def test_prompts_stay_on_their_side_when_lines_are_added(
    share: float, more: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("split")
    before = load_data(DataConfig(prompts=numbered(folder / "before.jsonl", range(200)), held_out_share=share))
    after = load_data(DataConfig(prompts=numbered(folder / "after.jsonl", [*more, *range(200)]), held_out_share=share))
    old = {f"n{i}" for i in range(200)}
    assert set(uids(before.train)) == set(uids(after.train)) & old
    assert set(uids(before.held_out)) == set(uids(after.held_out)) & old
    assert set(uids(before.train)) | set(uids(before.held_out)) == old
    assert abs(len(before.held_out) - 200 * share) < 30
    assert all(key_of(uid) < share * 2**64 for uid in uids(before.held_out))


def test_a_larger_share_holds_out_the_same_first_and_then_more(tmp_path: Path) -> None:
    path = numbered(tmp_path / "set.jsonl", range(100))
    few, many = (uids(load_held_out(DataConfig(prompts=path, held_out_share=share))) for share in (0.1, 0.4))
    assert many[: len(few)] == few and len(many) > len(few)


def test_equal_texts_without_ids_are_on_the_same_side(tmp_path: Path) -> None:
    path = tmp_path / "set.txt"
    path.write_text("".join(f"text {i % 40}\n" for i in range(120)))
    data = load_data(DataConfig(prompts=str(path), held_out_share=0.3))
    assert not {p.text for p in data.train} & {p.text for p in data.held_out}
    assert len(set(uids(data.train))) == len(data.train) and len(data.train) + len(data.held_out) == 120
    assert any(uid.endswith("-3") for uid in uids(data.train))


def test_a_share_that_leaves_a_side_empty_is_refused(tmp_path: Path) -> None:
    path = numbered(tmp_path / "set.jsonl", range(3))
    with pytest.raises(PromptError, match="held_out_share=1e-09 holds out none of its 3 prompts; use a larger share"):
        load_data(DataConfig(prompts=path, held_out_share=1e-9))
    with pytest.raises(PromptError, match=r"held_out_share=0\.999999 leaves none of its 3 prompts to train on"):
        load_data(DataConfig(prompts=path, held_out_share=0.999999))


def test_held_out_sources_take_turns_by_weight(tmp_path: Path) -> None:
    sources = [
        PromptSource(path=numbered(tmp_path / f"{letter}.jsonl", range(6), letter), weight=weight)
        for letter, weight in (("a", 2.0), ("b", 1.0))
    ]
    held_out = load_held_out(DataConfig(prompts="package:numbers-train", held_out=tuple(sources)))
    assert "".join(uid[0] for uid in uids(held_out)) == "abaabaababbb"
    assert [uid for uid in uids(held_out) if uid[0] == "b"] == [f"b{i}" for i in range(6)]
    assert held_out.place(1).endswith("b.jsonl, line 1")


def test_shared_prompts_are_found_wherever_they_are(tmp_path: Path) -> None:
    train = load_prompts(numbered(tmp_path / "train.jsonl", range(50)))
    held_out = load_prompts(numbered(tmp_path / "held_out.jsonl", [60, 7, 61]))
    assert [(train[i].uid, held_out[j].uid) for i, j in train.shared_with(held_out)] == [("n7", "n7")]
    lines = tmp_path / "lines.txt"
    lines.write_text("a cat\na dog\n")
    other = tmp_path / "other.txt"
    other.write_text("a bird\na dog\n")
    assert load_prompts(str(lines)).shared_with(load_prompts(str(other))) == [(1, 1)]
    assert load_prompts(str(lines))[1].uid == derived_id("a dog")


def test_the_fingerprint_tells_any_change(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    first = load_prompts(numbered(path, range(5))).fingerprint
    assert load_prompts(numbered(tmp_path / "copy.jsonl", range(5))).fingerprint == first
    assert load_prompts(numbered(path, range(6))).fingerprint != first
    path.write_text(path.read_text().replace("number 3", "number three"))
    assert load_prompts(str(path)).fingerprint != first


def test_a_long_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """40 000 prompts of 2 kB: 80 MB on disk. An index of them takes one."""
    path = tmp_path / "long.jsonl"
    with path.open("w") as file:
        for i in range(40_000):
            file.write(f'{{"id": "n{i}", "text": "{i} {"x" * 2000}"}}\n')
    program = (
        "import resource, sys; from digenrl.prompts import load_prompts, prompts_of_iteration\n"
        "load_prompts('package:numbers-train')\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024\n"
        "before = peak(); prompts = load_prompts(sys.argv[1])\n"
        "taken = [p for i in range(20) for p in prompts_of_iteration(prompts, 0, i, 64)]\n"
        "assert len({p.uid for p in taken}) == 1280 and len(prompts) == 40_000\n"
        "print(peak() - before)"
    )
    found = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(found.stdout) < 20, "MiB more at the peak, 1280 prompts of 2 kB and an index of 40 000"
