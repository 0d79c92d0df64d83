"""Training: the gradient contribution of one train unit.

    train_unit      micro-batch x timesteps -> Contribution, in one batched forward and backward pass
    Contribution    gradient by parameter name, and metrics
    UnitMetrics     sums and counts; add them up over units, then read the means

The optimiser step itself is `digenrl.algorithms.optimizer.adamw_step`.

The denominator of the ratio. Where the adapter being trained is the one that generated the samples, the old log-prob
is the new one, detached: the ratio is 1 to the bit, whatever kernels the rollout ran on. Otherwise it is computed
again under the old adapter, in a forward pass of the same composition, so that kernels that depend on the batch cancel
in the difference. The log-prob noted at rollout is only compared with it.

Staleness. Samples of iteration k are generated under version k, or under version k - 1 where the run says so; anything
else is an error here, where the loss is computed.

Shapes: N pairs (sample, step) of the unit, ordered by step, then sample; D latent shape of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import torch

from digenrl.algorithms.accumulate import NonFiniteGradient
from digenrl.algorithms.losses import PolicyTerms, gaussian_kl, normalised_loss, policy_loss_terms
from digenrl.algorithms.steps import StepTerms, log_prob, step_mean, step_terms
from digenrl.config import AlgorithmConfig
from digenrl.identity import SampleId
from digenrl.models.base import Embeddings
from digenrl.models.embeddings import select
from digenrl.policy import Adapter, NumberedAdapter, Policy
from digenrl.trajectory import Trajectory


@dataclass(frozen=True)
class UnitMetrics:
    """Sums over (sample, step) pairs; `a + b` are those of both units. Fields named `max` are maxima.

    Attributes:
        pairs: number of pairs.
        loss: sum of loss terms, before the division by the update's size.
        ratio: sum of ratios.
        ratio_max: largest ratio.
        clipped: pairs whose ratio lies outside the clip range.
        approx_kl: sum of half the squared change of the log-prob since the rollout's weights.
        logp_gap: sum of |log p at training - log p at rollout|, both under the rollout's weights.
        logp_gap_max: the largest.
        kl: sum of KLs to the base model (0 where kl_beta is 0).
        stale: pairs whose sample is one version old.
    """

    pairs: int = 0
    loss: float = 0.0
    ratio: float = 0.0
    ratio_max: float = 0.0
    clipped: int = 0
    approx_kl: float = 0.0
    logp_gap: float = 0.0
    logp_gap_max: float = 0.0
    kl: float = 0.0
    stale: int = 0

    @property
    def staleness(self) -> dict[int, int]:
        """Histogram: how many versions old -> number of pairs."""
        return {0: self.pairs - self.stale, 1: self.stale}

    def __add__(self, other: UnitMetrics) -> UnitMetrics:
        merged = {}
        for field in fields(self):
            own, others = getattr(self, field.name), getattr(other, field.name)
            merged[field.name] = max(own, others) if field.name.endswith("_max") else own + others
        return UnitMetrics(**merged)

    def means(self) -> dict[str, float]:
        """Means per pair (maxima as they are); empty if there are no pairs."""
        if not self.pairs:
            return {}
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value if name.endswith("_max") or name == "pairs" else value / self.pairs
            for name, value in values.items()
        }


class StalenessError(ValueError):
    """A trajectory was not generated under the weights it should have been."""


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one train unit adds to its update.

    Attributes:
        gradient: of the update's loss, by parameter name, in the adapter's dtype; zeros if no sample took part.
        metrics: of the pairs that took part.
    """

    gradient: Adapter
    metrics: UnitMetrics


@dataclass(frozen=True, eq=False)
class _Batch:
    """The N pairs of a unit, gathered."""

    samples: tuple[SampleId, ...]
    steps: tuple[int, ...]
    latents: torch.Tensor
    next_latents: torch.Tensor
    sigma: torch.Tensor
    terms: StepTerms
    embeddings: Embeddings
    rollout_log_probs: torch.Tensor
    advantages: torch.Tensor


def train_unit(
    policy: Policy,
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    advantages: Mapping[SampleId, float],
    *,
    current: NumberedAdapter,
    old: NumberedAdapter,
    algorithm: AlgorithmConfig,
    guidance_scale: float,
    normaliser: int,
    staleness: int = 0,
) -> Contribution:
    """Gradient of one micro-batch at some of its trained steps. Leaves `current` bound.

    Args:
        policy: the policy.
        trajectory: of the micro-batch.
        embeddings: of its B prompts.
        steps: steps to train, all of them stochastic in the trajectory.
        advantages: of the samples that take part. Others are left out before the forward pass: their latents may not
            be finite, and 0 * NaN is NaN. A sample of a zero-variance group is passed with 0.0 if its KL counts.
        current: the adapter to differentiate.
        old: the adapter that generated the trajectory; with the same theta, the ratio is identically 1.
        algorithm: sampler, noise level, clipping and KL weight.
        guidance_scale: as in the rollout.
        normaliser: nominal number of pairs of the whole update, see `digenrl.runspec.normaliser`.
        staleness: versions the samples are old, 0 or 1; see `RunShape.staleness`.

    Raises:
        StalenessError: the trajectory's version is another.
        NonFiniteGradient: a loss or a gradient is not finite. Nothing may be added to an accumulator.
        ValueError: a step is not in the trajectory.
    """
    _check_staleness(trajectory, staleness)
    batch = _gather(trajectory, embeddings, steps, advantages, algorithm, policy.device)
    if batch is None:
        zeros = {name: torch.zeros_like(p, requires_grad=False) for name, p in policy.trainable().items()}
        return Contribution(zeros, UnitMetrics())
    old_log_prob = None
    if old.theta != current.theta:
        policy.bind(old.weights, old.theta)
        with torch.no_grad():
            old_log_prob = _log_prob(algorithm, batch, _mean(policy, batch, guidance_scale))
    policy.bind(current.weights, current.theta)
    reference_mean = None
    if algorithm.kl_beta > 0:
        with policy.reference(), torch.no_grad():
            reference_mean = _mean(policy, batch, guidance_scale)

    mean = _mean(policy, batch, guidance_scale)
    new_log_prob = _log_prob(algorithm, batch, mean)
    if old_log_prob is None:
        old_log_prob = new_log_prob.detach()
    policy_terms = policy_loss_terms(
        new_log_prob, old_log_prob, batch.advantages, algorithm.clip_range, algorithm.adv_clip_max
    )
    # The published weights of SD3's KL belong to the "image" convention.
    kl = None if reference_mean is None else gaussian_kl(mean, reference_mean, batch.terms, "image")
    _check_finite(trajectory, batch, policy_terms.loss if kl is None else policy_terms.loss + kl)
    loss = normalised_loss(policy_terms.loss, normaliser, kl, algorithm.kl_beta)
    gradient = _gradient(policy, trajectory, batch, loss)
    metrics = _metrics(batch, policy_terms, new_log_prob, old_log_prob, loss * normaliser, kl)
    return Contribution(gradient, replace(metrics, stale=metrics.pairs * staleness))


def _check_staleness(trajectory: Trajectory, staleness: int) -> None:
    found = trajectory.micro_batch.iteration - trajectory.version
    if found != staleness or staleness not in (0, 1):
        raise StalenessError(
            f"{trajectory.micro_batch.label} was generated under version {trajectory.version}, so it is {found} "
            f"versions old; it must be {staleness}, and never more than 1"
        )


def _gather(
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    advantages: Mapping[SampleId, float],
    algorithm: AlgorithmConfig,
    device: torch.device,
) -> _Batch | None:
    """The unit's pairs as one batch; None if no sample takes part."""
    positions = [trajectory.position(step) for step in steps]
    kept = [i for i, sample in enumerate(trajectory.samples) if sample in advantages]
    if not kept or not positions:
        return None
    samples = tuple(trajectory.samples[i] for i in kept)
    rows = torch.tensor(kept)
    sigmas = trajectory.sigmas.to(device)
    index = torch.tensor(steps, device=device).repeat_interleave(len(kept))

    def pairs(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[positions][:, kept].flatten(0, 1).to(device)

    latents = pairs(trajectory.latents)
    return _Batch(
        samples=samples * len(steps),
        steps=tuple(step for step in steps for _ in kept),
        latents=latents,
        next_latents=pairs(trajectory.next_latents),
        sigma=sigmas[index],
        terms=step_terms(algorithm.sampler, sigmas, index, algorithm.noise_level, latents.ndim),
        embeddings=select(embeddings, rows.repeat(len(steps))),
        rollout_log_probs=pairs(trajectory.log_probs),
        advantages=torch.tensor([advantages[s] for s in samples], dtype=torch.float64, device=device).repeat(
            len(steps)
        ),
    )


def _mean(policy: Policy, batch: _Batch, guidance_scale: float) -> torch.Tensor:
    """(N, *D) mean of each pair's transition under the bound adapter."""
    velocity = policy.velocity(batch.latents, batch.sigma, batch.embeddings, guidance_scale)
    return step_mean(batch.terms, batch.latents, velocity)


def _log_prob(algorithm: AlgorithmConfig, batch: _Batch, mean: torch.Tensor) -> torch.Tensor:
    return log_prob(algorithm.sampler, batch.next_latents, mean, batch.terms)


def _gradient(policy: Policy, trajectory: Trajectory, batch: _Batch, loss: torch.Tensor) -> Adapter:
    parameters = policy.trainable()
    # Materialised: the last block's text projections, for one, reach no output and have no gradient.
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, materialize_grads=True)
    gradient = dict(zip(parameters, found, strict=True))
    for name, tensor in gradient.items():
        if not bool(tensor.isfinite().all()):
            raise NonFiniteGradient(
                f"the gradient of {name} from {trajectory.micro_batch.label}, steps {sorted(set(batch.steps))}, "
                f"is not finite although the loss is"
            )
    return gradient


def _check_finite(trajectory: Trajectory, batch: _Batch, losses: torch.Tensor) -> None:
    bad = (~losses.detach().isfinite()).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteGradient(
            f"the loss of {len(bad)} of {len(batch.steps)} (sample, step) pairs of {trajectory.micro_batch.label} is "
            f"not finite, the first at step {batch.steps[bad[0]]} of {batch.samples[bad[0]]}"
        )


@torch.no_grad()
def _metrics(
    batch: _Batch,
    policy_terms: PolicyTerms,
    new_log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    loss: torch.Tensor,
    kl: torch.Tensor | None,
) -> UnitMetrics:
    gap = (old_log_prob - batch.rollout_log_probs).abs()
    return UnitMetrics(
        pairs=len(batch.steps),
        loss=float(loss),
        ratio=float(policy_terms.ratio.sum()),
        ratio_max=float(policy_terms.ratio.max()),
        clipped=int(policy_terms.clipped.sum()),
        approx_kl=float(0.5 * (new_log_prob - old_log_prob).square().sum()),
        logp_gap=float(gap.sum()),
        logp_gap_max=float(gap.max()),
        kl=0.0 if kl is None else float(kl.sum()),
    )
