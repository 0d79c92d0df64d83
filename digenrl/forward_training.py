"""Training on the forward process: the gradient contribution of one train unit of DiffusionNFT.

    train_forward     micro-batch x noise levels -> Contribution, in one batched forward and backward pass
    stream_forward    the same before the advantages are known -> StreamedContribution

The clean latents of a micro-batch are noised again, to the noise levels of some of the rollout's steps, and the loss of
`digenrl.algorithms.nft` is taken there. Noise comes from the identity of its sample and step, so that a unit that is
done again, anywhere, is the same.

The behaviour policy. Where the weights that generated the samples are those being trained, its velocity is the
trained one, detached. Otherwise it is computed under them, in a forward pass of the same composition.

Shapes: N pairs (sample, step) of the unit, ordered by step, then sample; D latent shape of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.diffusion_nft import DiffusionNft
from digenrl.algorithms.losses import normalised_loss
from digenrl.algorithms.nft import NFTTerms, nft_loss_terms, noised, velocity_kl
from digenrl.algorithms.streaming import StreamedGradient
from digenrl.contributions import Contribution, StreamedContribution, UnitMetrics, check_staleness
from digenrl.identity import MicroBatchId, SampleId, normal
from digenrl.models.base import Embeddings
from digenrl.models.embeddings import select
from digenrl.pairs import check_finite, gradient_of
from digenrl.policy import Adapter, NumberedAdapter, Policy
from digenrl.trajectory import Trajectory


def train_forward(
    policy: Policy,
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    advantages: Mapping[SampleId, Advantage],
    *,
    current: NumberedAdapter,
    old: NumberedAdapter,
    algorithm: DiffusionNft,
    guidance_scale: float,
    normaliser: int,
    staleness: int = 0,
) -> Contribution:
    """As `digenrl.training.train_unit`, whose arguments these are; `algorithm` is the algorithm itself.

    Raises:
        StalenessError: the trajectory's version is another.
        NonFiniteGradient: a loss or a gradient is not finite. Nothing may be added to an accumulator.
        ValueError: a step is not one of the trajectory's, or it follows another schedule.
    """
    check_staleness(trajectory, staleness)
    trajectory.check_schedule(algorithm.num_steps)
    points = _points(trajectory, embeddings, steps, advantages, policy.device)
    if points is None:
        return Contribution.nothing(policy)
    r = algorithm.optimality(points.weights)
    terms, kl = _evaluate(policy, points, r, current, old, algorithm, guidance_scale)
    loss = normalised_loss(terms.loss, normaliser, kl, algorithm.kl_beta)
    gradient = gradient_of(policy, loss, trajectory.micro_batch, points.steps)
    metrics = _metrics(points, loss * normaliser, kl)
    return Contribution(gradient, replace(metrics, stale=metrics.pairs * staleness))


def stream_forward(
    policy: Policy,
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    centred: Mapping[SampleId, float],
    *,
    baseline: float,
    current: NumberedAdapter,
    old: NumberedAdapter,
    algorithm: DiffusionNft,
    guidance_scale: float,
    normaliser: int,
) -> StreamedContribution:
    """The same before the advantages are known: the loss is affine in them, see `digenrl.algorithms.nft`.

    Args, Raises: as `digenrl.training.stream_unit`; `centred` are rewards less `baseline`.
    """
    trajectory.check_schedule(algorithm.num_steps)
    points = _points(trajectory, embeddings, steps, centred, policy.device)
    if points is None:
        return StreamedContribution(None, UnitMetrics())
    # What is left of the loss where the advantage is 0 does not depend on it.
    terms, kl = _evaluate(policy, points, torch.full_like(points.weights, 0.5), current, old, algorithm, guidance_scale)
    plain = (terms.negative - terms.positive) / (2 * algorithm.beta)

    def gradient(loss: torch.Tensor, *, last: bool = False) -> Adapter:
        return gradient_of(policy, loss / normaliser, trajectory.micro_batch, points.steps, retain_graph=not last)

    sums = gradient(plain.sum()), gradient((plain * points.weights).sum())
    rest = normalised_loss(terms.loss, 1, kl, algorithm.kl_beta)
    streamed = StreamedGradient(*sums, baseline, gradient(rest, last=True))
    return StreamedContribution(streamed, _metrics(points, rest, kl))


def _evaluate(
    policy: Policy,
    points: _Points,
    r: torch.Tensor,
    current: NumberedAdapter,
    old: NumberedAdapter,
    algorithm: DiffusionNft,
    guidance_scale: float,
) -> tuple[NFTTerms, torch.Tensor | None]:
    """Terms of the loss with `r` (N,), and (N,) distance to the base model if it has a weight. Leaves `current` bound.

    Raises:
        NonFiniteGradient: a term is not finite.
    """
    old_velocity = None
    if old.tag != current.tag:
        policy.bind(old.weights, old.tag)
        with torch.no_grad():
            old_velocity = points.velocity(policy, guidance_scale)
    policy.bind(current.weights, current.tag)
    reference = None
    if algorithm.kl_beta > 0:
        with policy.reference(), torch.no_grad():
            reference = points.velocity(policy, guidance_scale)
    velocity = points.velocity(policy, guidance_scale)
    terms = nft_loss_terms(
        velocity,
        velocity if old_velocity is None else old_velocity,
        points.clean,
        points.noisy,
        points.t,
        r,
        beta=algorithm.beta,
        adv_clip_max=algorithm.adv_clip_max,
    )
    kl = None if reference is None else velocity_kl(velocity, reference)
    check_finite(terms.loss if kl is None else terms.loss + kl, points.micro_batch, points.samples, points.steps)
    return terms, kl


@torch.no_grad()
def _metrics(points: _Points, loss: torch.Tensor, kl: torch.Tensor | None) -> UnitMetrics:
    count = len(points.steps)
    return UnitMetrics(pairs=count, loss=float(loss), kl=0.0 if kl is None else float(kl.sum()), forward=count)


@dataclass(frozen=True, eq=False)
class _Points:
    """N samples at a noise level each.

    Attributes:
        micro_batch: which.
        samples: of each.
        steps: whose noise level it is.
        clean: (N, *D).
        noisy: (N, *D).
        t: (N,) noise levels.
        embeddings: of each one's prompt.
        weights: (N,) float64, what was given for each one's sample.
    """

    micro_batch: MicroBatchId
    samples: tuple[SampleId, ...]
    steps: tuple[int, ...]
    clean: torch.Tensor
    noisy: torch.Tensor
    t: torch.Tensor
    embeddings: Embeddings
    weights: torch.Tensor

    def velocity(self, policy: Policy, guidance_scale: float) -> torch.Tensor:
        """(N, *D) under the bound adapter."""
        return policy.velocity(self.noisy, self.t, self.embeddings, guidance_scale)


def _points(
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    weights: Mapping[SampleId, Advantage],
    device: torch.device,
) -> _Points | None:
    """Those of the samples that have a weight; None if none is left.

    Raises:
        ValueError: a step is not one of the trajectory's.
    """
    for step in steps:
        trajectory.position(step)
    kept = [i for i, sample in enumerate(trajectory.samples) if sample in weights]
    if not kept or not steps:
        return None
    samples = tuple(trajectory.samples[i] for i in kept)
    clean = trajectory.clean[kept].to(device).repeat(len(steps), *[1] * (trajectory.clean.ndim - 1))
    noise = torch.stack([normal(sample, "forward", step, clean.shape[1:]) for step in steps for sample in samples])
    t = trajectory.sigmas.to(device)[torch.tensor(steps, device=device).repeat_interleave(len(kept))]
    of_samples = torch.tensor([weights[sample] for sample in samples], dtype=torch.float64, device=device)
    return _Points(
        micro_batch=trajectory.micro_batch,
        samples=samples * len(steps),
        steps=tuple(step for step in steps for _ in kept),
        clean=clean,
        noisy=noised(clean, noise.to(device, clean.dtype), t),
        t=t,
        embeddings=select(embeddings, torch.tensor(kept).repeat(len(steps))),
        weights=of_samples.repeat(len(steps)),
    )
