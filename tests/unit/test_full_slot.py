"""All weights of the transformer as what is trained: where they come from, how they are bound, and their precision."""

from __future__ import annotations

import pytest
import torch

from digenrl.models.sd3 import SD3Model
from digenrl.policy import Adapter, NumberedAdapter, Policy, adapter_hash
from digenrl.training import train_unit
from tiny_policy import GEOMETRY, LORA, PROMPT, algorithm, random_pipeline, roll_out, rollout_spec


def full(dtype: torch.dtype = torch.float32) -> Policy:
    return Policy(SD3Model(random_pipeline(dtype=dtype)), None, seed=0)


def velocity(policy: Policy) -> torch.Tensor:
    latents = torch.ones((1, *policy.model.latent_shape(GEOMETRY)))
    with torch.no_grad():
        return policy.velocity(latents, torch.tensor([0.5]), policy.model.encode([PROMPT]), 1.0)


def shaken(start: Adapter) -> Adapter:
    generator = torch.Generator().manual_seed(1)
    return {n: w + 0.01 * torch.randn(w.shape, generator=generator) for n, w in start.items()}


def test_a_run_starts_from_the_checkpoint() -> None:
    policy = full()
    start = policy.initial_adapter()
    parameters = dict(random_pipeline().transformer.named_parameters())
    assert start.keys() == parameters.keys()
    assert all(torch.equal(start[name], parameter) for name, parameter in parameters.items())
    assert policy.bound_modules > 50
    policy.bind(start, 0)
    before = velocity(policy)
    policy.bind(shaken(start), 1)
    assert not torch.equal(velocity(policy), before)
    policy.bind(start, 0)
    assert torch.equal(velocity(policy), before)
    assert all(p.requires_grad for p in policy.trainable().values())


def test_a_start_that_was_replaced_is_not_passed_off_as_one() -> None:
    policy = full()
    other = shaken(policy.initial_adapter())
    policy.bind(policy.initial_adapter(), "profile")
    assert adapter_hash(policy.initial_adapter()) == adapter_hash(full().initial_adapter())
    policy.bind(other, 1)
    with pytest.raises(RuntimeError, match="have been replaced; load it again"):
        policy.initial_adapter()


def test_there_is_no_base_model_beside_it() -> None:
    with pytest.raises(RuntimeError, match="keeps no copy of the base model"), full().reference():
        pass


def test_a_model_with_a_lora_is_refused() -> None:
    policy = Policy(SD3Model(random_pipeline()), LORA, seed=0)
    with pytest.raises(ValueError, match="already carries a LoRA"):
        Policy(policy.model, None, seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_gradients_are_float32_whatever_is_computed_in(dtype: torch.dtype) -> None:
    """A change that bfloat16 cannot hold is kept, and shows once enough of them have come together."""
    policy = full(dtype)
    start = policy.initial_adapter()
    current = NumberedAdapter(0, start)
    trajectory = roll_out(policy, rollout_spec(policy), current)
    contribution = train_unit(
        policy,
        trajectory,
        policy.model.encode([PROMPT] * len(trajectory.samples)),
        trajectory.steps[:1],
        dict.fromkeys(trajectory.samples, 1.0),
        current=current,
        old=current,
        algorithm=algorithm(),
        guidance_scale=1.0,
        normaliser=1,
    )
    assert {g.dtype for g in contribution.gradient.values()} == {w.dtype for w in start.values()} == {torch.float32}
    assert sum(bool(g.any()) for g in contribution.gradient.values()) > 50
    name = "proj_out.weight"
    small = {**start, name: start[name] * (1 + 2**-12)}
    policy.bind(small, 1)
    assert torch.equal(policy.trainable()[name], start[name].to(dtype)) == (dtype == torch.bfloat16)
    policy.bind({**start, name: start[name] * (1 + 2**-12) ** 64}, 2)
    assert not torch.equal(policy.trainable()[name], start[name].to(dtype))
