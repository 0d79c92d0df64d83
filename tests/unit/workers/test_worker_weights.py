"""Weights on a worker: the behaviour policy follows the adapter as its decay says, and goes wherever that goes."""

from __future__ import annotations

import pytest
import torch

from digenrl.algorithms.optimizer import OptimizerState
from digenrl.config.load import load_config
from digenrl.policy import Adapter, Policy, adapter_hash
from digenrl.scheduling.messages import AdapterRef
from tiny_policy import moved, tiny_policy
from workers.held import TrainerStateRef
from workers.weights import Weights


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def _weights(policy: Policy, *overrides: str) -> Weights:
    """Two updates an iteration."""
    found = Weights(load_config("tiny-smoke", ["algorithm.name=diffusion_nft", *overrides]), policy)
    found.begin(policy.initial_adapter())
    return found


def _advance(weights: Weights, policy: Policy, theta: int) -> Adapter:
    adapter = moved(policy, theta).weights
    weights.advance(theta, adapter, OptimizerState.initial(adapter))
    return adapter


def test_the_behaviour_policy_follows_at_the_end_of_an_iteration(policy: Policy) -> None:
    """d = 0.001 n after the n-th optimiser step; within an iteration nothing moves."""
    weights = _weights(policy)
    start = weights.behaviour(0)
    assert start == weights.trained(0)
    _advance(weights, policy, 1)
    assert weights.behaviour(1).weights is start.weights
    second = _advance(weights, policy, 2)
    old = weights.behaviour(2)
    for name, weight in old.weights.items():
        assert torch.equal(weight, 0.002 * start.weights[name] + (1 - 0.002) * second[name])
    _advance(weights, policy, 3)
    assert weights.behaviour(3).weights is old.weights and weights.trained(3).weights is not old.weights
    fourth = _advance(weights, policy, 4)
    for name, weight in weights.behaviour(4).weights.items():
        assert torch.equal(weight, 0.004 * old.weights[name] + (1 - 0.004) * fourth[name])
    assert len({weights.behaviour(theta).tag for theta in (2, 4)} | {weights.trained(4).tag}) == 3


def test_without_a_decay_it_is_the_adapter(policy: Policy) -> None:
    weights = _weights(policy, "algorithm.old_policy_decay=0")
    for theta in (1, 2):
        _advance(weights, policy, theta)
        assert weights.behaviour(theta) == weights.trained(theta)


def test_a_decay_that_begins_late_is_the_adapter_until_then(policy: Policy) -> None:
    """Within an iteration it is still what the iteration began with."""
    weights = _weights(policy, "algorithm.old_policy_decay=2")
    _advance(weights, policy, 1)
    assert weights.behaviour(1).weights is weights.trained(0).weights and weights.behaviour(1).role == "behaviour"
    _advance(weights, policy, 2)
    assert weights.behaviour(2) == weights.trained(2)


@pytest.mark.parametrize("kind", [AdapterRef, TrainerStateRef])
def test_it_travels_with_the_adapter(policy: Policy, kind: type[AdapterRef | TrainerStateRef]) -> None:
    source, target = _weights(policy), _weights(policy)
    _advance(source, policy, 1)
    second = _advance(source, policy, 2)
    behaviour = source.behaviour(2).weights
    target.store(kind(2), source.load(kind(2)), adapter_hash(second, behaviour))
    assert target.holds(AdapterRef(2)) and target.holds(TrainerStateRef(2)) is (kind is TrainerStateRef)
    assert all(torch.equal(target.behaviour(2).weights[name], weight) for name, weight in behaviour.items())
    assert all(torch.equal(target.trained(2).weights[name], weight) for name, weight in second.items())
    target.drop(2)
    assert not target.holds(kind(2)) and not target._behaviours


def test_what_changed_on_the_way_is_refused(policy: Policy) -> None:
    """The hash covers both."""
    source, target = _weights(policy), _weights(policy)
    for theta in (1, 2):
        _advance(source, policy, theta)
    expected = adapter_hash(source.trained(2).weights, source.behaviour(2).weights)
    tensors = source.load(AdapterRef(2))
    name = next(name for name in tensors if name.startswith("behaviour/"))
    with pytest.raises(ValueError, match=r"adapter theta 2 arrived with hash .*: not installed"):
        target.store(AdapterRef(2), {**tensors, name: tensors[name] + 1}, expected)
    with pytest.raises(ValueError, match=r"names are in one of them only"):
        target.store(AdapterRef(2), {k: t for k, t in tensors.items() if k != name}, "")
    assert not target.holds(AdapterRef(2))
