"""MixGRPO: what its section says becomes a window that moves, and a schedule."""

from __future__ import annotations

import pytest
import torch

from digenrl.algorithms.dance_grpo import shifted_sigmas
from digenrl.algorithms.mix_grpo import MixGrpo
from digenrl.config import MixGrpoConfig, SlidingWindowConfig


def _steps(count: int, **window: object) -> list[tuple[int, ...]]:
    rules = MixGrpo(MixGrpoConfig(num_steps=6, window=SlidingWindowConfig.model_validate(window)))
    found = [rules.steps(0, iteration) for iteration in range(count)]
    assert all(steps.stochastic == steps.trained for steps in found)
    assert {len(steps.trained) for steps in found} == {rules.num_trained}
    return [steps.trained for steps in found]


def test_the_window_slides_over_all_but_the_last_two_steps_and_returns() -> None:
    assert _steps(7, size=2, iterations=2) == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3), (0, 1)]


def test_every_setting_of_the_section_reaches_the_window() -> None:
    assert _steps(3, size=2, iterations=1, stride=2) == [(0, 1), (2, 3), (0, 1)]
    assert _steps(3, size=3, iterations=1, rewind=False) == [(0, 1, 2), (1, 2, 3), (1, 2, 3)]
    assert _steps(5, size=2, iterations=4, strategy="decay", least_iterations=1)[4] == (1, 2)
    faster = _steps(8, size=1, iterations=4, strategy="exp_decay", decay_after=0, decay_rate=5.0)
    assert faster == [(0,)] * 4 + [(1,), (2,), (3,), (0,)]
    assert len(set(_steps(40, size=2, strategy="random"))) == 3


def test_flash_takes_what_follows_the_window_by_the_solver() -> None:
    section = MixGrpoConfig(num_steps=6, window=SlidingWindowConfig(size=2, iterations=1), tail_solver="dpm_solver")
    assert [MixGrpo(section).steps(0, i).multistep_from for i in range(4)] == [2, 3, 4, 2]
    assert MixGrpo(MixGrpoConfig()).steps(0, 0).multistep_from is None


@pytest.mark.parametrize("shift", [None, 3.0])
def test_its_schedule_is_the_checkpoints_or_a_shifted_one(shift: float | None) -> None:
    found = MixGrpo(MixGrpoConfig(sigma_shift=shift)).sigmas()
    if shift is None:
        assert found is None
    else:
        assert found is not None and torch.equal(found, shifted_sigmas(10, shift))
