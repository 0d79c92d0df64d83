"""DanceGRPO: its schedule, which steps it draws and trains, and what is decoded."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from golden_cases import Case, golden

from digenrl.algorithms.dance_grpo import random_steps, shifted_sigmas
from digenrl.algorithms.registry import algorithm_of
from digenrl.algorithms.steps import euler_step
from digenrl.config import DanceGrpoConfig


@golden("dance_schedule")
def test_its_schedule_is_the_published_one(case: Case) -> None:
    sigmas = shifted_sigmas(case.parameters["num_steps"], case.parameters["shift"])
    torch.testing.assert_close(sigmas, case["out_sigmas"], rtol=2e-6, atol=0)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())


def test_the_checkpoints_schedule_unless_a_shift_is_set() -> None:
    assert algorithm_of(DanceGrpoConfig()).sigmas(0, 0) is None
    own = algorithm_of(DanceGrpoConfig(num_steps=8, sigma_shift=5.0)).sigmas(0, 0)
    assert own is not None and own.dtype == torch.float32 and len(own) == 9


def test_trained_steps_follow_from_seed_and_iteration_and_are_equally_likely() -> None:
    drawn = [random_steps(10, 5, 0, iteration) for iteration in range(3000)]
    assert drawn == [random_steps(10, 5, 0, iteration) for iteration in range(3000)]
    assert all(steps == tuple(sorted(set(steps))) and len(steps) == 5 for steps in drawn)
    counts = Counter(step for steps in drawn for step in steps)
    assert sorted(counts) == list(range(9))
    assert all(count == pytest.approx(3000 * 5 / 9, rel=0.06) for count in counts.values())
    assert drawn[:50] != [random_steps(10, 5, 1, iteration) for iteration in range(50)]


def test_all_steps_but_the_last_are_drawn_and_some_of_them_trained() -> None:
    algorithm = algorithm_of(DanceGrpoConfig(num_steps=16))
    stochastic, trained, *_ = algorithm.steps(0, 3)
    assert stochastic == tuple(range(15))
    assert len(trained) == algorithm.num_trained == 9 and set(trained) < set(stochastic)
    assert (algorithm.sampler, algorithm.noise_level) == ("dance_sde", 0.3)


def test_the_last_euler_step_is_the_predicted_clean_latent() -> None:
    sigmas = shifted_sigmas(4, 3.0)
    x, v = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    predicted = x - sigmas[3] * v
    assert torch.equal(euler_step(sigmas, torch.full((3,), 3), x, v), predicted)
