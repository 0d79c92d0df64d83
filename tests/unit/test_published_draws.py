"""Draws of the reference training; and that no golden file lies about untested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from digenrl.published_draws import k_repeat_batches, shared_noise_seed

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden"


def _meta(name: str) -> dict:
    return dict(json.loads((GOLDEN / f"{name}.json").read_text()))


def test_prompts_are_drawn_as_published() -> None:
    case = _meta("k_repeat_sampler__world2")
    p = case["parameters"]
    drawn = k_repeat_batches(p["dataset_size"], p["batch_size"], p["k"], p["world"], p["seed"], p["epoch"])
    assert drawn == case["data"]
    assert drawn != k_repeat_batches(p["dataset_size"], p["batch_size"], p["k"], p["world"], p["seed"], p["epoch"] + 1)


def test_groups_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"2 ranks x 3 samples need 1.5 of 20 distinct prompts"):
        k_repeat_batches(20, 3, 4, 2, 0, 0)


def test_shared_noise_has_the_published_seed() -> None:
    case = _meta("prompt_seed__sha256")
    p = case["parameters"]
    assert [shared_noise_seed(prompt, p["base_seed"]) for prompt in p["prompts"]] == case["data"]


def test_every_golden_file_is_looked_at() -> None:
    """By its family (`golden("...")`), a pattern or its whole name, in some test."""
    sources = "\n".join(path.read_text() for path in TESTS.rglob("*.py"))
    stems = {path.stem for path in GOLDEN.iterdir() if path.suffix in (".json", ".npz")}
    unseen = {
        s for s in stems if f'"{s.partition("__")[0]}"' not in sources and f'"{s.partition("__")[0]}__' not in sources
    }
    assert len(stems) > 50 and not unseen
