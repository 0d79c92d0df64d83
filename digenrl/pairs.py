"""The (sample, step) pairs of one train unit, gathered into one batch, and what is computed of them.

    gather      trajectory x steps -> Pairs, samples that take no part left out
    Pairs       mean and log-prob under the bound adapter; gradients, checked
    check_finite, gradient_of    the checks, of any pairs

Shapes: N pairs (sample, step) of the unit, ordered by step, then sample; D latent shape of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from digenrl.algorithms.accumulate import NonFiniteGradient
from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.base import PolicyGradient
from digenrl.algorithms.steps import Sampler, StepTerms, log_prob, step_mean, step_terms
from digenrl.identity import MicroBatchId, SampleId
from digenrl.models.base import Embeddings
from digenrl.models.embeddings import select
from digenrl.policy import Adapter, Policy
from digenrl.trajectory import Trajectory


@dataclass(frozen=True, eq=False)
class Pairs:
    """N pairs of one micro-batch.

    Attributes:
        micro_batch: which.
        samples: of each pair.
        steps: of each pair.
        latents: (N, *D) entering the step.
        next_latents: (N, *D) leaving it.
        sigma: (N,) of the step.
        terms: coefficients of the step.
        sampler: how the step was drawn.
        embeddings: of each pair's prompt.
        rollout_log_probs: (N,) as noted at rollout.
        weights: (N,) or, of split advantages, (N, 2) float64, what was given for each pair's sample.
    """

    micro_batch: MicroBatchId
    samples: tuple[SampleId, ...]
    steps: tuple[int, ...]
    latents: torch.Tensor
    next_latents: torch.Tensor
    sigma: torch.Tensor
    terms: StepTerms
    sampler: Sampler
    embeddings: Embeddings
    rollout_log_probs: torch.Tensor
    weights: torch.Tensor

    def mean(self, policy: Policy, guidance_scale: float) -> torch.Tensor:
        """(N, *D) mean of each pair's transition under the bound adapter."""
        velocity = policy.velocity(self.latents, self.sigma, self.embeddings, guidance_scale)
        return step_mean(self.terms, self.latents, velocity)

    def log_prob(self, mean: torch.Tensor) -> torch.Tensor:
        """(N,) of the transitions that were drawn, under one with this mean."""
        return log_prob(self.sampler, self.next_latents, mean, self.terms)

    def check_finite(self, losses: torch.Tensor) -> None:
        """See that the (N,) terms of a loss are finite.

        Raises:
            NonFiniteGradient: naming the first that is not.
        """
        check_finite(losses, self.micro_batch, self.samples, self.steps)

    def gradient(self, policy: Policy, loss: torch.Tensor, *, retain_graph: bool = False) -> Adapter:
        """Of a scalar, by parameter name; see `gradient_of`.

        Raises:
            NonFiniteGradient: naming the parameter.
        """
        return gradient_of(policy, loss, self.micro_batch, self.steps, retain_graph=retain_graph)


def check_finite(
    losses: torch.Tensor, micro_batch: MicroBatchId, samples: Sequence[SampleId], steps: Sequence[int]
) -> None:
    """See that the (N,) terms of a loss of these pairs are finite.

    Raises:
        NonFiniteGradient: naming the first that is not.
    """
    bad = (~losses.detach().isfinite()).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteGradient(
            f"the loss of {len(bad)} of {len(steps)} (sample, step) pairs of {micro_batch.label} is "
            f"not finite, the first at step {steps[bad[0]]} of {samples[bad[0]]}"
        )


def gradient_of(
    policy: Policy, loss: torch.Tensor, micro_batch: MicroBatchId, steps: Sequence[int], *, retain_graph: bool = False
) -> Adapter:
    """Of a scalar made of these pairs, by parameter name, in the parameter's dtype and at least in float32.

    Raises:
        NonFiniteGradient: naming the parameter.
    """
    parameters = policy.trainable()
    # Materialised: the last block's text projections, for one, reach no output and have no gradient.
    found = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=retain_graph, allow_unused=True, materialize_grads=True
    )
    gradient = {n: g.to(torch.promote_types(g.dtype, torch.float32)) for n, g in zip(parameters, found, strict=True)}
    for name, tensor in gradient.items():
        if not bool(tensor.isfinite().all()):
            raise NonFiniteGradient(
                f"the gradient of {name} from {micro_batch.label}, steps {sorted(set(steps))}, "
                f"is not finite although the loss is"
            )
    return gradient


def gather(
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    weights: Mapping[SampleId, Advantage],
    algorithm: PolicyGradient,
    device: torch.device,
) -> Pairs | None:
    """Some of a trajectory's steps, for the samples that have a weight; None if no pair is left.

    Raises:
        ValueError: a step is not in the trajectory, or the trajectory follows another schedule.
    """
    trajectory.check_schedule(algorithm.total_steps(trajectory.samples[0].run_seed, trajectory.micro_batch.iteration))
    positions = [trajectory.position(step) for step in steps]
    kept = [i for i, sample in enumerate(trajectory.samples) if sample in weights]
    if not kept or not positions:
        return None
    samples = tuple(trajectory.samples[i] for i in kept)
    rows = torch.tensor(kept)
    sigmas = trajectory.sigmas.to(device)
    index = torch.tensor(steps, device=device).repeat_interleave(len(kept))
    of_samples = torch.tensor([weights[s] for s in samples], dtype=torch.float64, device=device)

    def pairs(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[positions][:, kept].flatten(0, 1).to(device)

    latents = pairs(trajectory.latents)
    return Pairs(
        micro_batch=trajectory.micro_batch,
        samples=samples * len(steps),
        steps=tuple(step for step in steps for _ in kept),
        latents=latents,
        next_latents=pairs(trajectory.next_latents),
        sigma=sigmas[index],
        terms=step_terms(algorithm.sampler, sigmas, index, algorithm.noise_level, latents.ndim),
        sampler=algorithm.sampler,
        embeddings=select(embeddings, rows.repeat(len(steps))),
        rollout_log_probs=pairs(trajectory.log_probs),
        weights=torch.cat([of_samples] * len(steps)),
    )
