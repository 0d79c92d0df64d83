"""The clipped GRPO loss and the KL to the reference policy, per sample.

    policy_loss_terms  clipped surrogate of each sample
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
    """What the surrogate is made of, (B,) each.

    Attributes:
        loss: max(-A r, -A clip(r, 1 - eps, 1 + eps)), with gradient.
        ratio: r = exp(log_prob - old_log_prob), detached.
        clipped: bool, r lies outside [1 - eps, 1 + eps]. Where it does and the surrogate would still gain, the sample
            has no gradient.
    """

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss_terms(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, clip_range: float, adv_clip_max: float
) -> PolicyTerms:
    """Clipped surrogate of each sample.

    Where the weights are those that generated the sample, pass `log_prob.detach()` as `old_log_prob`: the ratio is
    then 1 to the bit and its gradient is that of the log-prob.

    Args:
        log_prob: (B,) under the weights being trained, with gradient.
        old_log_prob: (B,) under the weights that generated the samples.
        advantages: (B,), clamped to +- `adv_clip_max` here.
        clip_range: eps. It goes with log-probs averaged over latent elements, hence values of 1e-3 and less.
        adv_clip_max: bound of the advantages.
    """
    advantages = advantages.to(log_prob.dtype).clamp(-adv_clip_max, adv_clip_max)
    low, high = 1.0 - clip_range, 1.0 + clip_range
    ratio = torch.exp(log_prob - old_log_prob.detach())
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    ratio = ratio.detach()
    return PolicyTerms(loss, ratio, (ratio < low) | (ratio > high))


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
        policy_loss: (B,) from `policy_loss_terms`.
        count: nominal number of (sample, timestep) pairs of the whole update: groups * G * K, whatever failed.
        kl: (B,) from `gaussian_kl`, or None.
        kl_beta: weight of the KL.

    Returns:
        Scalar.
    """
    total = policy_loss if kl is None else policy_loss + kl_beta * kl
    return total.sum() / count
