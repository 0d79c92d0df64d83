"""MixGRPO: what its section says becomes a window that moves, and a schedule."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

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
    found = MixGrpo(MixGrpoConfig(sigma_shift=shift)).sigmas(0, 0)
    if shift is None:
        assert found is None
    else:
        assert found is not None and torch.equal(found, shifted_sigmas(10, shift))


def test_flash_takes_fewer_steps_the_earlier_its_window_lies() -> None:
    """Published for FLUX: 25 steps, shift 3, four of them trained, two fifths of what follows."""
    rules = MixGrpo(
        MixGrpoConfig(
            num_steps=25,
            sigma_shift=3.0,
            tail_solver="dpm_solver",
            tail_ratio=0.4,
            window=SlidingWindowConfig(iterations=1),
        )
    )
    whole = shifted_sigmas(25, 3.0)
    for iteration in range(20):
        last = iteration + 3
        table, total = rules.sigmas(0, iteration), rules.total_steps(0, iteration)
        assert table is not None and len(table) == total + 1
        assert total == last + max(2, int(0.4 * (25 - last)))
        assert torch.equal(table[: last + 2], whole[: last + 2]), "what is trained is drawn from the same noise levels"
        assert rules.steps(0, iteration).multistep_from == last + 1
    assert MixGrpo(MixGrpoConfig()).total_steps(0, 0) == 10


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sigma_shift": 3.0}, "tail_ratio=0.4 leaves steps out, for which Euler steps are not exact enough"),
        ({"tail_solver": "dpm_solver"}, "tail_ratio=0.4 needs to know how the schedule is shifted; set sigma_shift"),
    ],
)
def test_leaving_steps_out_needs_the_solver_and_the_shift(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        MixGrpoConfig.model_validate({"name": "mix_grpo", "tail_ratio": 0.4, **settings})
