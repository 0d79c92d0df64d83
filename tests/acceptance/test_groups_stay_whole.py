"""A3. Symptom: groups were keyed by the prompt's text, or cut by the batch size, and advantages mixed prompts.

Rule: a group is P's position, never a text; it has all its samples, over as many micro-batches and workers as needed.
An evaluation counts every prompt once, also when the last unit is not full.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from digenrl.scheduling.units import RolloutUnit
from runs import Ground, assert_as_expected, small

PROMPTS = [("first", "042"), ("second", "117"), ("third", "042")]
SIZE = 6


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


def test_equal_texts_make_two_groups(ground: Ground, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"id": uid, "text": t, "target": t}) + "\n" for uid, t in PROMPTS))
    config = small(
        f"data.prompts={path}",
        "iterations=2",
        "schedule.layout=colocated",
        "schedule.micro_batch=2",
        f"algorithm.prompts_per_iteration={len(PROMPTS)}",
        f"algorithm.samples_per_prompt={SIZE}",
        "algorithm.updates_per_iteration=1",
        "evaluation.every=0",
    )
    outcome = ground.run(config)
    assert_as_expected(outcome, config)
    for report in outcome.reports:
        assert Counter(sample.group for sample in report.scores) == dict.fromkeys(range(len(PROMPTS)), SIZE)
        assert len(set(report.fingerprints.values())) == len(PROMPTS) * SIZE // 2
    rollers = {worker for unit, worker in outcome.units if isinstance(unit, RolloutUnit)}
    assert len(rollers) == 2


@pytest.mark.parametrize("micro_batch", [4, 25])
def test_an_evaluation_counts_each_prompt_once(ground: Ground, micro_batch: int) -> None:
    config = small(
        "iterations=1",
        "evaluation.prompts=23",
        f"evaluation.micro_batch={micro_batch}",
        "algorithm.prompts_per_iteration=1",
        "algorithm.updates_per_iteration=1",
        "evaluation.num_steps=2",
    )
    outcome = ground.run(config)
    assert_as_expected(outcome, config)
    for scores in outcome.evaluations.values():
        assert sorted(sample.group for sample in scores) == list(range(23))
