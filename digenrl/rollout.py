"""Rollout: denoise one micro-batch, stochastically at some steps and by steps of an ODE solver elsewhere.

    RolloutSpec     everything that determines the samples, apart from the weights and the prompts
    start_rollout   initial noise
    advance         denoising steps [first, last); any cutting of the steps into calls gives the same bits
    finish          decode; the trajectory and the images
    rollout_hash    equal hashes mean bit-equal rollouts

Every random number comes from the identity of its sample (`digenrl.identity`). Gradients are off through no_grad, not
inference mode: the latents made here enter the backward pass of training, which may not save inference tensors.

Shapes: B micro-batch, K trained steps, T denoising steps, D latent shape of one sample, F frames.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from digenrl.algorithms.dpm_solver import predict_clean, solver_step, solver_terms
from digenrl.algorithms.steps import Sampler, euler_step, log_prob, sample_next, step_terms
from digenrl.identity import MicroBatchId, SampleId, normal
from digenrl.models.base import Embeddings, Geometry
from digenrl.policy import Policy
from digenrl.trajectory import Trajectory, tensor_hash


@dataclass(frozen=True, eq=False)
class RolloutSpec:
    """What one micro-batch's rollout is.

    Attributes:
        micro_batch: which one.
        samples: B identities, in the order of the batch axis.
        version: version of the weights that generate it; the caller binds them.
        sigmas: (T+1,) float32, decreasing, ending in 0.
        stochastic: the steps that are drawn; empty for evaluation.
        steps: the K steps that are kept for training, increasing: transitions of stochastic ones.
        sampler: how a stochastic step is drawn.
        noise_level: its noise level a.
        guidance_scale: see FlowModel.velocity.
        geometry: size of the samples.
        multistep_from: deterministic steps from this one on are of second order (DPM-Solver++), None: Euler steps.
        keep_clean: the latent that is decoded is kept for training, instead of transitions.
        same_noise: all samples of a group start from the same noise.
    """

    micro_batch: MicroBatchId
    samples: tuple[SampleId, ...]
    version: int
    sigmas: torch.Tensor
    stochastic: tuple[int, ...]
    steps: tuple[int, ...]
    sampler: Sampler
    noise_level: float
    guidance_scale: float
    geometry: Geometry
    multistep_from: int | None = None
    keep_clean: bool = False
    same_noise: bool = False

    @property
    def num_steps(self) -> int:
        """T, denoising steps of the whole rollout."""
        return len(self.sigmas) - 1


@dataclass(frozen=True, eq=False)
class RolloutState:
    """A rollout between two denoising steps.

    Attributes:
        step: the next step to take.
        latents: (B, *D) float32, entering `step`.
        entered: latents (B, *D) that entered each kept step taken so far.
        left: latents (B, *D) that left it.
        log_probs: (B,) of each.
        predicted: (B, *D) clean latent predicted at the step before, if that was of the multistep solver.
    """

    step: int
    latents: torch.Tensor
    entered: tuple[torch.Tensor, ...] = ()
    left: tuple[torch.Tensor, ...] = ()
    log_probs: tuple[torch.Tensor, ...] = ()
    predicted: torch.Tensor | None = None


def start_rollout(policy: Policy, spec: RolloutSpec) -> RolloutState:
    """The state before step 0: initial noise of every sample, on the policy's device."""
    # That of a group is that of its first sample, whether or not it was drawn again.
    starts = tuple(replace(s, generation=0, draw=0) for s in spec.samples) if spec.same_noise else spec.samples
    return RolloutState(0, _noise(policy, spec, starts, "init", 0))


@torch.no_grad()
def advance(
    policy: Policy, spec: RolloutSpec, state: RolloutState, embeddings: Embeddings, first: int, last: int
) -> RolloutState:
    """Take the denoising steps [first, last) under the adapter that is bound.

    Args:
        policy: with the adapter of `spec.version` bound.
        spec: the rollout.
        state: from `start_rollout` or the previous `advance`; not changed.
        embeddings: of the B prompts, in the order of `spec.samples`.
        first: must be the step the state is at.
        last: at most T.

    Raises:
        ValueError: the steps do not continue the state, or go beyond T.
    """
    if first != state.step or not first < last <= spec.num_steps:
        raise ValueError(
            f"rollout {spec.micro_batch.label} is at step {state.step} of {spec.num_steps}; "
            f"steps [{first}, {last}) do not continue it"
        )
    sigmas = spec.sigmas.to(state.latents.device)
    with policy.model.rollout():
        for step in range(first, last):
            state = _take_step(policy, spec, state, embeddings, sigmas, step)
    return state


def finish(policy: Policy, spec: RolloutSpec, state: RolloutState) -> tuple[Trajectory, NDArray[np.uint8]]:
    """Decode a complete rollout.

    Returns:
        The trajectory, on the policy's device, and the images (B, F, H, W, 3).

    Raises:
        ValueError: steps are missing.
    """
    if state.step != spec.num_steps:
        raise ValueError(
            f"rollout {spec.micro_batch.label} is at step {state.step} of {spec.num_steps}; it cannot be decoded yet"
        )
    decoded = policy.model.decode(state.latents)
    nothing = state.latents.new_empty((0, *state.latents.shape))
    trajectory = Trajectory(
        micro_batch=spec.micro_batch,
        samples=spec.samples,
        version=spec.version,
        sigmas=spec.sigmas,
        steps=spec.steps,
        latents=torch.stack(state.entered) if state.entered else nothing,
        next_latents=torch.stack(state.left) if state.left else nothing,
        log_probs=torch.stack(state.log_probs) if state.log_probs else nothing.new_empty((0, len(spec.samples))),
        finite=decoded.finite,
        clean=state.latents if spec.keep_clean else state.latents.new_empty((0, *state.latents.shape[1:])),
    )
    return trajectory, decoded.images.numpy()


def rollout_hash(trajectory: Trajectory, images: NDArray[np.uint8]) -> str:
    """SHA-256 over everything a rollout leaves: latents, log-probs and images."""
    made = (trajectory.latents, trajectory.next_latents, trajectory.log_probs, trajectory.finite, trajectory.clean)
    return tensor_hash(trajectory.sigmas, *made, torch.from_numpy(images))


def _take_step(
    policy: Policy, spec: RolloutSpec, state: RolloutState, embeddings: Embeddings, sigmas: torch.Tensor, step: int
) -> RolloutState:
    latents = state.latents
    index = torch.full((len(latents),), step, device=latents.device)
    velocity = policy.velocity(latents, sigmas[index], embeddings, spec.guidance_scale)
    if step not in spec.stochastic:
        return _deterministic(spec, state, sigmas, index, velocity)
    terms = step_terms(spec.sampler, sigmas, index, spec.noise_level, latents.ndim)
    after, mean = sample_next(terms, latents, velocity, _noise(policy, spec, spec.samples, "step", step))
    if step not in spec.steps:
        return replace(state, step=step + 1, latents=after)
    return RolloutState(
        step=step + 1,
        latents=after,
        entered=(*state.entered, latents),
        left=(*state.left, after),
        # Of the very float32 latent that is stored: scoring one and storing a narrower one moves the log-prob.
        log_probs=(*state.log_probs, log_prob(spec.sampler, after, mean, terms)),
    )


def _deterministic(
    spec: RolloutSpec, state: RolloutState, sigmas: torch.Tensor, index: torch.Tensor, velocity: torch.Tensor
) -> RolloutState:
    if spec.multistep_from is None or state.step < spec.multistep_from:
        return replace(state, step=state.step + 1, latents=euler_step(sigmas, index, state.latents, velocity))
    predicted = predict_clean(sigmas, index, state.latents, velocity)
    terms = solver_terms(sigmas, index, state.latents.ndim)
    latents = solver_step(terms, state.latents, predicted, state.predicted)
    return replace(state, step=state.step + 1, latents=latents, predicted=predicted)


def _noise(policy: Policy, spec: RolloutSpec, samples: tuple[SampleId, ...], purpose: str, step: int) -> torch.Tensor:
    shape = policy.model.latent_shape(spec.geometry)
    return torch.stack([normal(sample, purpose, step, shape) for sample in samples]).to(policy.device)
