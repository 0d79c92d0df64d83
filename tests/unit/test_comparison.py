"""Scores of two sets of weights, side by side."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from digenrl.config import RewardConfig
from digenrl.data.numbers import CLEAN, render
from digenrl.identity import EVAL_ITERATION, MicroBatchId, SampleId
from digenrl.rewards.base import PromptRecord
from digenrl.rewards.mix import RewardMix
from digenrl.trajectory import Trajectory
from flows.comparison import EXACT_MATCH, MIXED, Scores, compare, score

TARGETS = ("042", "178", "830")


def trajectory(indices: range, finite: tuple[bool, ...]) -> Trajectory:
    nothing = torch.empty(0, len(indices), 1)
    return Trajectory(
        micro_batch=MicroBatchId("eval", 0, 0),
        samples=tuple(SampleId(0, EVAL_ITERATION, i, 0) for i in indices),
        version=0,
        sigmas=torch.tensor([1.0, 0.0]),
        steps=(),
        latents=nothing,
        next_latents=nothing,
        log_probs=torch.empty(0, len(indices)),
        finite=torch.tensor(finite),
        clean=torch.empty(0, 1),
    )


@pytest.fixture(scope="module")
def reward() -> RewardMix:
    return RewardMix.of([RewardConfig(name="ocr", weight=2.0), RewardConfig(name="jpeg_incompressibility", weight=0.5)])


def batch(drawn: tuple[str, ...], first: int, reward: RewardMix, finite: tuple[bool, ...]) -> Scores:
    """Pictures of the numbers `drawn`, scored against the targets from `first` on."""
    images = render(drawn, [CLEAN] * len(drawn))[:, None]
    indices = range(first, first + len(drawn))
    records = [PromptRecord(f"n{i}", TARGETS[i], {"target": TARGETS[i]}) for i in indices]
    return score(reward, trajectory(indices, finite), images, records)


def test_rewards_alone_mixed_and_exact(reward: RewardMix) -> None:
    found = batch(("042", "170"), 0, reward, (True, True)) | batch(("830",), 2, reward, (True,))
    assert found.values["ocr"] == pytest.approx({0: 1.0, 1: 2 / 3, 2: 1.0})
    assert found.values[EXACT_MATCH] == {0: 1.0, 1: 0.0, 2: 1.0}
    assert found.failed == {}
    jpeg = found.values["jpeg_incompressibility"]
    assert found.values[MIXED] == pytest.approx({i: 2 * found.values["ocr"][i] + 0.5 * jpeg[i] for i in range(3)})


def test_an_image_that_is_not_finite_has_no_value_and_no_share(reward: RewardMix) -> None:
    found = batch(("042", "178"), 0, reward, (False, True)) | batch(("830",), 2, reward, (False,))
    assert found.failed == {0: "non-finite image", 2: "non-finite image"}
    assert all(values.keys() == {1} for values in found.values.values())


def test_rows_are_paired_by_prompt(reward: RewardMix) -> None:
    before = batch(("040", "170", "830"), 0, reward, (True, True, False))
    after = batch(("042", "178", "830"), 0, reward, (True, True, True))
    rows = {row.name: row for row in compare(before, after)}
    assert list(rows) == ["jpeg_incompressibility", "ocr", MIXED, EXACT_MATCH]
    ocr = rows["ocr"]
    assert (ocr.before, ocr.after, ocr.rise, ocr.pairs) == pytest.approx((2 / 3, 1.0, 1 / 3, 2))
    assert ocr.interval == pytest.approx((1 / 3, 1 / 3))
    assert rows[EXACT_MATCH].rise == 1.0
    assert all(math.isfinite(value) for row in rows.values() for value in row.to_json()["rise_ci95"])


def test_the_mix_of_one_reward_is_not_shown_twice() -> None:
    drawn = ("042", "170", "830")
    for weight, names in ((1.0, ["ocr", EXACT_MATCH]), (2.0, ["ocr", MIXED, EXACT_MATCH])):
        found = batch(drawn, 0, RewardMix.of([RewardConfig(name="ocr", weight=weight)]), (True, True, True))
        assert [row.name for row in compare(found, found)] == names


def test_nothing_in_common_gives_no_rows(reward: RewardMix) -> None:
    one = batch(("042",), 0, reward, (True,))
    assert compare(one, batch(("178",), 1, reward, (True,))) == []
    assert compare(one, Scores()) == []
    assert np.isfinite([row.rise for row in compare(one, one)]).all()
