"""Training: the gradient contribution of one train unit.

    train_unit      micro-batch x timesteps -> Contribution, in one batched forward and backward pass
    stream_unit     the same before the advantages are known -> StreamedContribution
    replay_floor    how far rounding alone moves the log-probs of a unit

What a unit leaves is described in `digenrl.contributions`. Algorithms without likelihoods train in
`digenrl.forward_training`; what follows is about the others.

The optimiser step itself is `digenrl.algorithms.optimizer.adamw_step`.

The denominator of the ratio. Where the adapter being trained is the one that generated the samples, the old log-prob
is the new one, detached: the ratio is 1 to the bit, whatever kernels the rollout ran on. Otherwise it is computed
again under the old adapter, in a forward pass of the same composition, so that kernels that depend on the batch cancel
in the difference. The log-prob noted at rollout is only compared with it.

Staleness. Samples of iteration k are generated under version k, or under version k - 1 where the run says so; anything
else is an error here, where the loss is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from digenrl.algorithms.advantages import Advantage
from digenrl.algorithms.base import Replay
from digenrl.algorithms.diffusion_nft import DiffusionNft
from digenrl.algorithms.losses import PolicyTerms, gaussian_kl, normalised_loss
from digenrl.algorithms.registry import policy_gradient_of
from digenrl.algorithms.split import surrogate
from digenrl.algorithms.streaming import StreamedGradient
from digenrl.config import AlgorithmConfig, DiffusionNftConfig
from digenrl.config.algorithm import GrpoSection
from digenrl.contributions import Contribution, StreamedContribution, UnitMetrics, check_staleness
from digenrl.forward_training import stream_forward, train_forward
from digenrl.identity import SampleId
from digenrl.models.base import Embeddings
from digenrl.pairs import Pairs, gather
from digenrl.policy import NumberedAdapter, Policy
from digenrl.trajectory import Trajectory


def train_unit(
    policy: Policy,
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    advantages: Mapping[SampleId, Advantage],
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
        steps: steps to train, all of them among those of the trajectory.
        advantages: of the samples that take part. Others are left out before the forward pass: their latents may not
            be finite, and 0 * NaN is NaN. A sample of a zero-variance group is passed with 0.0 if its KL counts.
        current: the adapter to differentiate.
        old: the adapter that generated the trajectory; with the same tag, the ratio is identically 1.
        algorithm: how its steps were drawn, and the loss.
        guidance_scale: as in the rollout.
        normaliser: nominal number of pairs of the whole update, see `digenrl.runspec.normaliser`.
        staleness: versions the samples are old, 0 or 1; see `RunShape.staleness`.

    Raises:
        StalenessError: the trajectory's version is another.
        NonFiniteGradient: a loss or a gradient is not finite. Nothing may be added to an accumulator.
        ValueError: a step is not in the trajectory.
    """
    check_staleness(trajectory, staleness)
    if isinstance(algorithm, DiffusionNftConfig):
        return train_forward(
            policy,
            trajectory,
            embeddings,
            steps,
            advantages,
            current=current,
            old=old,
            algorithm=DiffusionNft(algorithm),
            guidance_scale=guidance_scale,
            normaliser=normaliser,
            staleness=staleness,
        )
    rules = policy_gradient_of(algorithm)
    pairs = gather(trajectory, embeddings, steps, advantages, rules, policy.device)
    if pairs is None:
        return Contribution.nothing(policy)
    old_mean = None
    if old.tag != current.tag:
        policy.bind(old.weights, old.tag)
        with torch.no_grad():
            old_mean = pairs.mean(policy, guidance_scale)
    policy.bind(current.weights, current.tag)
    mean, kl = _mean_and_kl(policy, pairs, algorithm, guidance_scale)
    replay = _replay(pairs, mean, old_mean)
    terms = surrogate(rules, rules.ratio(replay), pairs.weights, replay)
    policy_loss = rules.weight(replay) * terms.loss
    pairs.check_finite(policy_loss if kl is None else policy_loss + kl)
    loss = normalised_loss(policy_loss, normaliser, kl, algorithm.kl_beta)
    gradient = pairs.gradient(policy, loss)
    metrics = _metrics(pairs, replay, terms, loss * normaliser, kl)
    return Contribution(gradient, replace(metrics, stale=metrics.pairs * staleness))


def stream_unit(
    policy: Policy,
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    rewards: Mapping[SampleId, float],
    *,
    baseline: float,
    current: NumberedAdapter,
    algorithm: AlgorithmConfig,
    guidance_scale: float,
    normaliser: int,
    old: NumberedAdapter | None = None,
) -> StreamedContribution:
    """What `train_unit` yields where the ratio is identically 1, before the advantages are known.

    One forward pass, and one backward pass for each of the two sums (and for the KL).

    Args:
        policy, trajectory, embeddings, steps, algorithm, guidance_scale, normaliser: as in `train_unit`.
        rewards: of the samples that take part.
        baseline: what is subtracted from them; one constant for a whole group, near its mean.
        current: the adapter that is differentiated, and that generated the trajectory, unless
        old: another did, which only an algorithm without likelihoods allows.

    Raises:
        StalenessError: the trajectory is not of the version of its iteration.
        NonFiniteGradient: a log-prob, KL or gradient is not finite.
        ValueError: a step is not in the trajectory.
    """
    check_staleness(trajectory, 0)
    centred = {sample: reward - baseline for sample, reward in rewards.items()}
    if isinstance(algorithm, DiffusionNftConfig):
        return stream_forward(
            policy,
            trajectory,
            embeddings,
            steps,
            centred,
            baseline=baseline,
            current=current,
            old=old or current,
            algorithm=DiffusionNft(algorithm),
            guidance_scale=guidance_scale,
            normaliser=normaliser,
        )
    rules = policy_gradient_of(algorithm)
    pairs = gather(trajectory, embeddings, steps, centred, rules, policy.device)
    if pairs is None:
        return StreamedContribution(None, UnitMetrics())
    policy.bind(current.weights, current.tag)
    mean, kl = _mean_and_kl(policy, pairs, algorithm, guidance_scale)
    replay = _replay(pairs, mean, None)
    ratio = rules.ratio(replay)
    plain = rules.weight(replay) * ratio
    pairs.check_finite(plain if kl is None else plain + kl)
    weighted = plain * pairs.weights.to(plain.dtype)
    plain_sum = pairs.gradient(policy, plain.sum() / normaliser, retain_graph=True)
    weighted_sum = pairs.gradient(policy, weighted.sum() / normaliser, retain_graph=kl is not None)
    loss, final = torch.zeros(()), None
    if kl is not None:
        loss = algorithm.kl_beta * kl.sum()
        final = pairs.gradient(policy, loss / normaliser)
    unknown = PolicyTerms(torch.zeros_like(ratio), ratio.detach(), torch.zeros_like(ratio, dtype=torch.bool))
    metrics = _metrics(pairs, replay, unknown, loss, kl)
    return StreamedContribution(StreamedGradient(plain_sum, weighted_sum, baseline, final), metrics)


@torch.no_grad()
def replay_floor(
    policy: Policy,
    trajectory: Trajectory,
    embeddings: Embeddings,
    steps: Sequence[int],
    samples: Collection[SampleId],
    *,
    old: NumberedAdapter,
    algorithm: AlgorithmConfig,
    guidance_scale: float,
) -> float | None:
    """The largest difference between log-probs computed for all pairs of a unit at once and for each by itself.

    Kernels depend on the shape of a batch, and rollout and training batch differently. What this device makes of that,
    with this model and geometry, is no fault; what lies far beyond it is. Takes a forward pass for each pair.

    Args:
        policy, trajectory, embeddings, steps, algorithm, guidance_scale: as in `train_unit`.
        samples: that take part.
        old: the adapter that generated the trajectory; it is left bound.

    Returns:
        None: no sample takes part, or the algorithm has no likelihoods.
    """
    if isinstance(algorithm, DiffusionNftConfig):
        return None
    rules = policy_gradient_of(algorithm)
    pairs = gather(trajectory, embeddings, steps, dict.fromkeys(samples, 0.0), rules, policy.device)
    if pairs is None:
        return None
    policy.bind(old.weights, old.tag)
    together = pairs.log_prob(pairs.mean(policy, guidance_scale))
    floor = 0.0
    for sample, step, of_all in zip(pairs.samples, pairs.steps, together, strict=True):
        pair = gather(trajectory, embeddings, (step,), {sample: 0.0}, rules, policy.device)
        assert pair is not None
        floor = max(floor, float((pair.log_prob(pair.mean(policy, guidance_scale)) - of_all).abs()))
    return floor


def _replay(pairs: Pairs, mean: torch.Tensor, old_mean: torch.Tensor | None) -> Replay:
    """The pairs under the bound adapter; without another old mean, it is the one that drew them."""
    log_prob = pairs.log_prob(mean)
    if old_mean is None:
        return Replay(mean, log_prob, mean.detach(), log_prob.detach(), pairs.terms)
    return Replay(mean, log_prob, old_mean, pairs.log_prob(old_mean), pairs.terms)


def _mean_and_kl(
    policy: Policy, pairs: Pairs, algorithm: GrpoSection, guidance_scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(N, *D) mean of the transitions with gradient, and (N,) KL to the base model if it has a weight."""
    if algorithm.kl_beta == 0:
        return pairs.mean(policy, guidance_scale), None
    with policy.reference(), torch.no_grad():
        reference = pairs.mean(policy, guidance_scale)
    mean = pairs.mean(policy, guidance_scale)
    return mean, gaussian_kl(mean, reference, pairs.terms, algorithm.kl_convention)


@torch.no_grad()
def _metrics(
    pairs: Pairs, replay: Replay, policy_terms: PolicyTerms, loss: torch.Tensor, kl: torch.Tensor | None
) -> UnitMetrics:
    gap = (replay.old_log_prob - pairs.rollout_log_probs).abs()
    gaps: dict[int, float] = {}
    for step, value in zip(pairs.steps, gap.tolist(), strict=True):
        gaps[step] = max(gaps.get(step, 0.0), value)
    return UnitMetrics(
        pairs=len(pairs.steps),
        loss=float(loss),
        ratio=float(policy_terms.ratio.sum()),
        ratio_max=float(policy_terms.ratio.max()),
        clipped=int(policy_terms.clipped.sum()),
        approx_kl=float(0.5 * (replay.log_prob - replay.old_log_prob).square().sum()),
        logp_gap=float(gap.sum()),
        logp_gap_max=float(gap.max()),
        logp_gaps=gaps,
        kl=0.0 if kl is None else float(kl.sum()),
    )
