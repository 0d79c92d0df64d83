"""Timing units before a run: what is measured, and that nothing is left behind."""

from __future__ import annotations

import pytest
import torch

from digenrl import runspec
from digenrl.config.load import load_config
from digenrl.policy import NumberedAdapter, Policy
from digenrl.profile import best_timestep_batch, measure, within_memory
from digenrl.prompts import load_prompts
from tiny_policy import roll_out, rollout_spec, tiny_policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


@pytest.mark.parametrize(
    ("train_s", "best"),
    [
        ({3: 0.3, 2: 0.2}, 3),  # a draw: fewer units
        ({3: 0.3, 2: 0.19}, 3),  # not clearly better
        ({3: 0.3, 2: 0.15}, 2),
        ({9: 2.7, 5: 1.0, 3: 0.5, 2: 0.4}, 3),
        ({5: 1.0, 3: 0.7}, 5),  # 9 did not fit
        ({1: 0.4}, 1),
        ({}, 1),
    ],
)
def test_the_largest_timestep_batch_that_no_smaller_one_beats(train_s: dict[int, float], best: int) -> None:
    assert best_timestep_batch(train_s) == best


def test_every_cost_is_measured_and_nothing_is_left(policy: Policy) -> None:
    config = load_config("tiny-smoke", ["schedule.micro_batch=2", "schedule.timestep_batch=auto"])
    shape = runspec.shape(config, 0)
    prompts = load_prompts(config.data.prompts)
    first = runspec.prompts_of(shape, shape.micro_batches(0)[0], prompts, ())
    start, spec = NumberedAdapter(0, policy.initial_adapter()), rollout_spec(policy)
    before, random = roll_out(policy, spec, start), torch.get_rng_state()

    profile = measure("cpu", policy, config, shape, first, everything=True)

    assert profile.kind == "cpu"
    costs = profile.costs
    assert {3, 2} <= costs.train_s.keys() <= {1, 2, 3}
    assert all(seconds > 0 for seconds in costs.train_s.values())
    assert costs.rollout_step_s and costs.decode_s and costs.score_s
    assert profile.streamed is not None and 0.5 < profile.streamed < 4
    assert torch.equal(torch.get_rng_state(), random)
    assert all(parameter.grad is None for parameter in policy.trainable().values())
    after = roll_out(policy, spec, start)
    assert torch.equal(after.latents, before.latents) and torch.equal(after.log_probs, before.log_probs)


def test_only_what_is_needed_is_measured(policy: Policy) -> None:
    config = load_config("tiny-smoke", ["algorithm.sde_window_size=1", "schedule.micro_batch=2"])
    shape = runspec.shape(config, 0)
    first = runspec.prompts_of(shape, shape.micro_batches(0)[0], load_prompts(config.data.prompts), ())
    profile = measure("cpu", policy, config, shape, first, everything=False)
    assert profile.costs.train_s.keys() == {1}
    assert profile.costs.decode_s is profile.costs.score_s is profile.streamed is None


def test_only_the_timestep_batch_that_is_set_is_measured(policy: Policy) -> None:
    config = load_config("tiny-smoke", ["schedule.timestep_batch=2", "schedule.micro_batch=2"])
    shape = runspec.shape(config, 0)
    first = runspec.prompts_of(shape, shape.micro_batches(0)[0], load_prompts(config.data.prompts), ())
    assert measure("cpu", policy, config, shape, first, everything=False).costs.train_s.keys() == {2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu")
def test_what_does_not_fit_the_device_is_noticed() -> None:
    device = torch.device("cuda")
    total_bytes = torch.cuda.get_device_properties(device).total_memory

    def use(share: float) -> float:
        return float(torch.zeros(int(share * total_bytes), dtype=torch.uint8, device=device)[0])

    assert within_memory(device, lambda: use(0.01)) == 0.0
    assert within_memory(device, lambda: use(2.0)) is None
    assert within_memory(device, lambda: use(0.01)) == 0.0
