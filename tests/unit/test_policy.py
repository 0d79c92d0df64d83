"""The LoRA slot of the policy: what is trained, what stays, and how adapters are named, drawn and bound."""

from __future__ import annotations

import hashlib

import pytest
import torch

from digenrl.config import LoraConfig
from digenrl.config.errors import ConfigError
from digenrl.models.sd3 import SD3Model
from digenrl.policy import Policy, adapter_hash
from tiny_policy import GEOMETRY, LORA, PROMPT, moved, random_pipeline, tiny_policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def _velocity(policy: Policy) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    latents = torch.randn((2, *policy.model.latent_shape(GEOMETRY)), generator=generator)
    with torch.no_grad():
        return policy.velocity(latents, torch.tensor([0.9, 0.4]), policy.model.encode([PROMPT] * 2), 1.0)


def _base_hash(policy: Policy) -> str:
    digest = hashlib.sha256()
    for name, tensor in policy.model.transformer.state_dict().items():
        if "lora_" not in name:
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_only_the_adapter_is_trainable(policy: Policy) -> None:
    """Three blocks of eight attention projections; the last block has no text output."""
    assert policy.bound_modules == 3 * 8 - 1
    assert len(policy.trainable()) == 2 * policy.bound_modules
    trained = {name for name, p in policy.model.transformer.named_parameters() if p.requires_grad}
    assert len(trained) == len(policy.trainable()) and all("lora_" in name for name in trained)
    assert "transformer_blocks.0.attn.to_q.lora_A.weight" in policy.trainable()


def test_initial_adapter_changes_nothing_and_does_not_depend_on_the_process(policy: Policy) -> None:
    torch.manual_seed(1)
    other = tiny_policy()
    torch.manual_seed(2)
    start = policy.initial_adapter()
    assert adapter_hash(start) == adapter_hash(other.initial_adapter())
    assert adapter_hash(start) == adapter_hash(dict(reversed(start.items())))
    assert adapter_hash(start) != adapter_hash(Policy(SD3Model(random_pipeline()), LORA, seed=1).initial_adapter())
    a = start["transformer_blocks.1.attn.to_k.lora_A.weight"]
    assert a.std() == pytest.approx(1 / LORA.rank, rel=0.15)
    policy.bind(start, "start")
    bound = _velocity(policy)
    with policy.reference():
        torch.testing.assert_close(bound, _velocity(policy), rtol=0, atol=0)


def test_loading_draws_nothing_from_the_global_generator() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    tiny_policy()
    assert torch.equal(before, torch.random.get_rng_state())


def test_bind_switches_adapters_and_leaves_the_base_as_it_was(policy: Policy) -> None:
    base, one, two = _base_hash(policy), moved(policy, 1), moved(policy, 2)
    policy.bind(one.weights, 1)
    first = _velocity(policy)
    for _ in range(50):
        policy.bind(two.weights, 2)
        policy.bind(one.weights, 1)
    torch.testing.assert_close(_velocity(policy), first, rtol=0, atol=0)
    policy.bind(two.weights, 2)
    assert not torch.equal(_velocity(policy), first)
    with policy.reference():
        reference = _velocity(policy)
        assert not torch.equal(reference, first)
    assert all(p.requires_grad for p in policy.trainable().values())
    assert _base_hash(policy) == base


def test_a_bound_tag_is_not_copied_again(policy: Policy) -> None:
    policy.bind(moved(policy, 1).weights, 1)
    first = _velocity(policy)
    policy.bind(moved(policy, 2).weights, 1)
    torch.testing.assert_close(_velocity(policy), first, rtol=0, atol=0)


def test_a_foreign_adapter_is_refused(policy: Policy) -> None:
    weights = dict(policy.initial_adapter())
    weights["nobody"] = weights.popitem()[1]
    with pytest.raises(ValueError, match=r"adapter 9 has 46 tensors.*first is 'nobody'"):
        policy.bind(weights, 9)


def test_a_model_takes_one_policy(policy: Policy) -> None:
    with pytest.raises(ValueError, match="already carries a LoRA"):
        Policy(policy.model, LORA, seed=0)


def test_velocity_needs_an_adapter() -> None:
    with pytest.raises(RuntimeError, match="no adapter is bound"):
        _velocity(tiny_policy())


def test_a_target_that_matches_nothing_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"lora.targets: 'attn.to_qq' matches no linear layer.*did you mean attn.to_q"
    ):
        tiny_policy(lora=LoraConfig(targets=("attn.to_v", "attn.to_qq")))
