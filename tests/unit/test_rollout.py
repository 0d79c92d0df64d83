"""Rollouts depend on identity and weights alone, never on how their steps are cut into units."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from digenrl.identity import normal
from digenrl.policy import Policy
from digenrl.rollout import RolloutSpec, advance, finish, rollout_hash, start_rollout
from tiny_policy import embeddings_for, moved, rollout_spec, tiny_policy


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy = tiny_policy()
    adapter = moved(policy, 1)
    policy.bind(adapter.weights, adapter.theta)
    return policy


def _run(policy: Policy, spec: RolloutSpec, cuts: list[int]):
    state = start_rollout(policy, spec)
    for first, last in pairwise(cuts):
        state = advance(policy, spec, state, embeddings_for(policy, spec), first, last)
    return finish(policy, spec, state)


@pytest.mark.parametrize("sampler", ["flow_sde", "cps", "dance_sde"])
def test_any_cutting_of_the_steps_gives_the_same_bits(policy: Policy, sampler: str) -> None:
    spec = rollout_spec(policy, steps=(1, 2, 4), sampler=sampler)
    whole = rollout_hash(*_run(policy, spec, [0, 6]))
    assert rollout_hash(*_run(policy, spec, [0, 1, 2, 3, 4, 5, 6])) == whole
    assert rollout_hash(*_run(policy, spec, [0, 2, 5, 6])) == whole
    redrawn = replace(spec, samples=(spec.samples[0].redrawn(), *spec.samples[1:]))
    assert rollout_hash(*_run(policy, redrawn, [0, 6])) != whole


@pytest.mark.parametrize("multistep_from", [0, 3])
def test_a_multistep_solver_remembers_across_any_cut(policy: Policy, multistep_from: int) -> None:
    spec = replace(rollout_spec(policy, steps=()), multistep_from=multistep_from)
    whole, _ = start = _run(policy, spec, [0, 6])
    assert rollout_hash(*_run(policy, spec, [0, 1, 2, 3, 4, 5, 6])) == rollout_hash(*start)
    assert whole.clean.shape[0] == 0
    euler = _run(policy, replace(spec, multistep_from=None), [0, 6])
    assert rollout_hash(*euler) != rollout_hash(*start)
    # Of second order are the steps that know a prediction of the solver, but not the last.
    last = _run(policy, replace(spec, multistep_from=4), [0, 6])
    assert rollout_hash(*last) == rollout_hash(*euler)


def test_the_clean_latent_is_kept_where_it_is_trained(policy: Policy) -> None:
    spec = replace(rollout_spec(policy, size=3, steps=()), steps=(0, 2), multistep_from=0, keep_clean=True)
    trajectory, images = _run(policy, spec, [0, 6])
    assert trajectory.steps == (0, 2) and trajectory.latents.shape[:2] == (0, 3) and trajectory.log_probs.numel() == 0
    assert torch.equal(torch.from_numpy(images), policy.model.decode(trajectory.clean).images)
    assert trajectory.position(2) == 1 and trajectory.nbytes == 4 * (trajectory.clean.numel() + 7)


def test_trajectory_holds_the_stochastic_steps(policy: Policy) -> None:
    spec = rollout_spec(policy, size=3, steps=(1, 2, 4))
    trajectory, images = _run(policy, spec, [0, 6])
    shape = policy.model.latent_shape(spec.geometry)
    assert trajectory.latents.shape == trajectory.next_latents.shape == (3, 3, *shape)
    assert trajectory.log_probs.shape == (3, 3) and bool(trajectory.log_probs.isfinite().all())
    assert trajectory.latents.dtype == trajectory.next_latents.dtype == trajectory.log_probs.dtype == torch.float32
    assert torch.equal(trajectory.next_latents[0], trajectory.latents[1])
    assert images.shape == (3, 1, 12, 24, 3) and images.dtype == "uint8"
    assert trajectory.finite.all() and trajectory.sigmas is spec.sigmas and trajectory.samples == spec.samples


def test_noise_belongs_to_the_sample(policy: Policy) -> None:
    """A sample starts from the same noise whatever batch and position it is in."""
    spec = rollout_spec(policy, size=4)
    backwards = replace(spec, samples=spec.samples[::-1])
    assert torch.equal(start_rollout(policy, spec).latents, start_rollout(policy, backwards).latents.flip(0))
    expected = normal(spec.samples[2], "init", 0, policy.model.latent_shape(spec.geometry))
    assert torch.equal(start_rollout(policy, spec).latents[2], expected)


def test_all_samples_of_a_group_may_start_from_the_same_noise(policy: Policy) -> None:
    """Whatever micro-batch they are in and however often they were drawn; from then on each goes its own way."""
    spec = replace(rollout_spec(policy, size=4), same_noise=True)
    start = start_rollout(policy, spec).latents
    assert all(torch.equal(latents, start[0]) for latents in start)
    rest = replace(spec, samples=(spec.samples[3].redrawn(), spec.samples[2]))
    assert torch.equal(start_rollout(policy, rest).latents, start[:2])
    other = replace(spec, samples=tuple(replace(s, group=1) for s in spec.samples))
    assert not torch.equal(start_rollout(policy, other).latents[0], start[0])
    trajectory, _ = _run(policy, spec, [0, 6])
    assert torch.equal(trajectory.latents[0][0], trajectory.latents[0][1])
    assert not torch.equal(trajectory.next_latents[0][0], trajectory.next_latents[0][1])


def test_evaluation_has_no_stochastic_step(policy: Policy) -> None:
    trajectory, images = _run(policy, rollout_spec(policy, size=2, steps=()), [0, 6])
    assert trajectory.latents.shape[:2] == (0, 2) and trajectory.log_probs.shape == (0, 2)
    assert len(images) == 2


def test_latents_can_enter_a_backward_pass(policy: Policy) -> None:
    trajectory, _ = _run(policy, rollout_spec(policy), [0, 6])
    assert not trajectory.latents.requires_grad and not trajectory.latents.is_inference()


def test_steps_must_continue_the_state(policy: Policy) -> None:
    spec = rollout_spec(policy)
    state = start_rollout(policy, spec)
    embeddings = embeddings_for(policy, spec)
    with pytest.raises(ValueError, match=r"rollout i0 m0 is at step 0 of 6; steps \[1, 2\) do not continue it"):
        advance(policy, spec, state, embeddings, 1, 2)
    with pytest.raises(ValueError, match=r"steps \[0, 7\) do not continue it"):
        advance(policy, spec, state, embeddings, 0, 7)
    with pytest.raises(ValueError, match="cannot be decoded yet"):
        finish(policy, spec, advance(policy, spec, state, embeddings, 0, 3))
