"""The clipped GRPO loss and the KL to the reference policy, per sample.

    likelihood_ratio   of a transition under two policies
    clipped_surrogate  PPO's loss of each sample
    gaussian_kl        KL between two transitions of one step
    normalised_loss    sum over a unit, divided by the nominal size of the whole update

Per-sample terms stay unreduced because a train unit sees only part of an update: the mean over the update is the sum
over its units of sums, each divided by the same count, known before any sample is made. A failed sample then
contributes nothing instead of giving its neighbours more weight.

Sources: Flow-GRPO (arXiv 2505.05470); clipped surrogate of PPO (arXiv 1707.06347).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from digenrl.algorithms.steps import StepTerms

KLConvention = Literal["image", "transition"]


class PolicyTerms(NamedTuple):
    """What the loss of the policy is made of, (B,) each.

    Attributes:
        loss: to be minimised, with gradient.
        ratio: of new to old likelihood, detached.
        clipped: bool, the sample is outside the region in which the policy may move in one iteration.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def likelihood_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Tensor:
    """exp(log_prob - old_log_prob), (B,), with gradient through the first.

    Where the weights are those that generated the sample, pass `log_prob.detach()` as `old_log_prob`: the ratio is
    then 1 to the bit and its gradient is that of the log-prob.
    """
    return torch.exp(log_prob - old_log_prob.detach())


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip_range: float, adv_clip_max: float | None) -> PolicyTerms:
    """max(-A r, -A clip(r, 1 - eps, 1 + eps)) of each sample.

    `clipped` is where r lies outside [1 - eps, 1 + eps]; where the loss would still fall there, it has no gradient.

    Args:
        ratio: (B,) r, with gradient.
        advantages: (B,) A.
        clip_range: eps. It goes with log-probs averaged over latent elements, hence values of 1e-3 and less.
        adv_clip_max: advantages are clamped to +- this; None: not at all.
    """
    advantages = clamped(advantages.to(ratio.dtype), adv_clip_max)
    low, high = 1.0 - clip_range, 1.0 + clip_range
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    ratio = ratio.detach()
    return PolicyTerms(loss, ratio, (ratio < low) | (ratio > high))


def clamped(advantages: Tensor, bound: float | None) -> Tensor:
    """Advantages within +- `bound`; None: as they are."""
    return advantages if bound is None else advantages.clamp(-bound, bound)


def gaussian_kl(mean: Tensor, mean_ref: Tensor, terms: StepTerms, convention: KLConvention) -> Tensor:
    """KL from the reference's transition to the policy's, averaged over latent elements.

    mean_D (m - m_ref)^2 / (2 scale^2). The Gaussian KL has scale s = g sqrt(sigma - sigma') ("transition"); the
    published image recipes divide by the rate g instead ("image"), which is smaller by the factor sigma - sigma': a
    weight tuned for one is wrong for the other.

    A step without noise has no policy and gives 0.

    Args:
        mean: (B, *D) with gradient.
        mean_ref: (B, *D) under the reference, from the same latents; treated as a constant.
        terms: coefficients of the step.
        convention: which scale.

    Returns:
        (B,), exactly 0 where the means are equal.

    Raises:
        ValueError: unknown convention.
    """
    if convention not in ("image", "transition"):
        raise ValueError(f"convention={convention!r} is not known; expected image or transition")
    scale = (terms.g if convention == "image" else terms.std).flatten()
    squared = (mean - mean_ref.detach()).square().flatten(1).mean(1)
    # Both branches of a `where` are differentiated, so the unused one must be finite as well.
    safe = torch.where(scale == 0, 1.0, scale)
    return torch.where(scale == 0, 0.0, squared / (2 * safe.square()))


def normalised_loss(policy_loss: Tensor, count: int, kl: Tensor | None = None, kl_beta: float = 0.0) -> Tensor:
    """A unit's share of the update's loss: sum(policy_loss + kl_beta * kl) / count.

    Args:
        policy_loss: (B,) from `clipped_surrogate`, say.
        count: nominal number of (sample, timestep) pairs of the whole update: groups * G * K, whatever failed.
        kl: (B,) from `gaussian_kl`, or None.
        kl_beta: weight of the KL.

    Returns:
        Scalar.
    """
    total = policy_loss if kl is None else policy_loss + kl_beta * kl
    return total.sum() / count
