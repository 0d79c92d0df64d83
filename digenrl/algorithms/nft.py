"""DiffusionNFT: policy optimisation on the forward process, without log-probs or a stochastic sampler.

    optimality         advantage -> r in [0, 1], how far a sample counts as good
    forward_steps      the noise levels of an iteration
    noised             a clean sample at a noise level
    nft_loss_terms     the loss of each sample
    velocity_kl        distance to the reference policy
    OldPolicyDecay     how slowly the behaviour policy follows the trained one
    old_policy_update  the behaviour policy after an iteration

A sample x0 is noised again to x_t = (1 - t) x0 + t eps. The velocity v trained there stands for two policies, mirror
images of each other about that of the behaviour policy, v_o; a good sample pulls the one towards itself, a bad one the
other:

    v+ = v_o + beta (v - v_o)          v- = v_o - beta (v - v_o)
    l+ = mean_D (x_t - t v+ - x0)^2 / w+    w+ = mean_D |x_t - t v+ - x0|, a constant    l-, w- likewise
    L  = c [r l+ + (1 - r) l-] / beta

Where v = v_o the two gradients are opposite, and that of L is proportional to 2r - 1, which is A / c: with advantages
unclipped and taken as they are, a policy gradient.

L is affine in r, and r = 1/2 + A / 2c is affine in the advantage where no clip binds:

    L = c (l+ + l-) / 2 beta  +  A (l+ - l-) / 2 beta

so that gradients can be summed before advantages are known, in the sums of digenrl.algorithms.streaming with
h = - grad (l+ - l-) / 2 beta and the first term as the part that does not depend on the advantage.

Source: DiffusionNFT (arXiv 2509.16117) and its reference training.

Shapes: B batch, *D latent shape of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from digenrl.identity import draw_rng

AdvantageMode = Literal["all", "positive_only", "negative_only", "one_only", "binary"]

#: Lower bound of the weights: a prediction that is already right must not be divided by nothing.
LEAST_WEIGHT = 1e-5


def optimality(advantages: Tensor, adv_clip_max: float, mode: AdvantageMode = "all") -> Tensor:
    """r = A / 2c + 1/2 within [0, 1], the published probability that a sample is optimal.

    Args:
        advantages: (B,), clipped to +- `adv_clip_max` here.
        adv_clip_max: c.
        mode: what is made of the clipped advantage first: "all" nothing; "positive_only" and "negative_only" set the
            others to 0, that is r to 1/2; "one_only" takes 1 for positive ones, 0 for the others; "binary" the sign.

    Returns:
        (B,) in the type of `advantages`.

    Raises:
        ValueError: unknown mode.
    """
    if mode not in get_args(AdvantageMode):
        raise ValueError(f"mode={mode!r} is not known; expected one of {', '.join(get_args(AdvantageMode))}")
    clipped = advantages.clamp(-adv_clip_max, adv_clip_max)
    match mode:
        case "positive_only":
            clipped = clipped.clamp(min=0)
        case "negative_only":
            clipped = clipped.clamp(max=0)
        case "one_only":
            clipped = (clipped > 0).to(clipped.dtype)
        case "binary":
            clipped = clipped.sign()
    # Clamped again: of the modes that count samples instead of weighing them, 1 may exceed c.
    return (clipped / adv_clip_max / 2 + 0.5).clamp(0, 1)


def forward_steps(num_steps: int, count: int, run_seed: int, iteration: int) -> tuple[int, ...]:
    """Steps of the rollout at whose noise levels an iteration's samples are trained, increasing.

    Deviation: one choice serves a whole iteration, where the published training permutes the steps of each sample.
    Nearly all are taken, so that only the few left out differ.

    Args:
        num_steps: T, denoising steps of a rollout.
        count: K of them; published int(0.99 T).
        run_seed: the run's seed.
        iteration: the RL iteration.

    Raises:
        ValueError: there are not so many.
    """
    if not 0 < count <= num_steps:
        raise ValueError(f"count={count} of num_steps={num_steps} steps cannot be trained; expected 1 to {num_steps}")
    return tuple(sorted(draw_rng(run_seed, "forward", iteration).sample(range(num_steps), count)))


def noised(clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
    """x_t = (1 - t) x0 + t eps, (B, *D), of clean latents (B, *D), standard normal noise (B, *D) and t (B,)."""
    t = _per_sample(t, clean)
    return (1 - t) * clean + t * noise


class NFTTerms(NamedTuple):
    """What the loss is made of, (B,) float64 each, with gradient.

    Attributes:
        loss: c [r l+ + (1 - r) l-] / beta.
        positive: l+.
        negative: l-.
    """

    loss: Tensor
    positive: Tensor
    negative: Tensor


def nft_loss_terms(
    velocity: Tensor,
    old_velocity: Tensor,
    clean: Tensor,
    noisy: Tensor,
    t: Tensor,
    r: Tensor,
    *,
    beta: float,
    adv_clip_max: float,
) -> NFTTerms:
    """Loss of each sample at one noise level.

    Predictions are of the latents' type, at least float32; errors and their weights are float64.

    Args:
        velocity: v, (B, *D) at `noisy`, under the policy being trained, with gradient.
        old_velocity: v_o, (B, *D) at `noisy`, under the behaviour policy; a constant.
        clean: x0, (B, *D), the sample.
        noisy: x_t, (B, *D) from `noised`.
        t: (B,) noise levels in [0, 1].
        r: (B,) from `optimality`.
        beta: how far v+ and v- lie from v_o.
        adv_clip_max: c.
    """
    dtype = torch.promote_types(clean.dtype, torch.float32)
    clean, noisy, old_velocity = clean.to(dtype), noisy.to(dtype), old_velocity.detach().to(dtype)
    # As a distance from v_o, so that where v = v_o the two are equal to the bit and their gradients cancel.
    shift = beta * (velocity.to(dtype) - old_velocity)
    t = _per_sample(t.to(dtype), clean)
    positive = _weighted_error(noisy - t * (old_velocity + shift), clean)
    negative = _weighted_error(noisy - t * (old_velocity - shift), clean)
    r = r.to(torch.float64)
    return NFTTerms(adv_clip_max * (r * positive + (1 - r) * negative) / beta, positive, negative)


def velocity_kl(velocity: Tensor, reference: Tensor) -> Tensor:
    """mean_D (v - v_ref)^2: the KL to the reference policy up to a factor; no gradient flows into `reference`.

    Args:
        velocity: (B, *D) with gradient.
        reference: (B, *D) at the same latents, under the reference policy.

    Returns:
        (B,) in the type of `velocity`, at least float32.
    """
    dtype = torch.promote_types(velocity.dtype, torch.float32)
    return (velocity.to(dtype) - reference.detach().to(dtype)).square().flatten(1).mean(1)


@dataclass(frozen=True)
class OldPolicyDecay:
    """d(n) = min(slope max(n - delay, 0), ceiling) after n optimiser steps: old <- d old + (1 - d) current."""

    slope: float
    ceiling: float
    delay: int = 0

    def at(self, step: int) -> float:
        """d after `step` optimiser steps of the run; 0 means that the behaviour policy is the trained one."""
        return min(self.slope * max(step - self.delay, 0), self.ceiling)


#: The published schedules, by their number.
OLD_POLICY_DECAYS: Mapping[int, OldPolicyDecay] = {
    0: OldPolicyDecay(slope=0.0, ceiling=0.0),
    1: OldPolicyDecay(slope=0.001, ceiling=0.5),
    2: OldPolicyDecay(slope=0.0075, ceiling=0.999, delay=75),
}


def old_policy_update(old: Mapping[str, Tensor], current: Mapping[str, Tensor], decay: float) -> dict[str, Tensor]:
    """The behaviour policy d old + (1 - d) current, by weight name; with d = 0 it is `current`, to the bit.

    Args:
        old: the behaviour policy so far; not changed.
        current: the trained weights, same names and shapes.
        decay: d, in [0, 1].

    Raises:
        ValueError: the names differ.
    """
    if old.keys() != current.keys():
        raise ValueError(
            f"the old and the current policy have different names: {sorted(old.keys() ^ current.keys())[:5]}"
        )
    if decay == 0:
        return {name: weight.detach().clone() for name, weight in current.items()}
    with torch.no_grad():
        return {name: decay * weight + (1 - decay) * current[name].detach().to(weight) for name, weight in old.items()}


def _weighted_error(prediction: Tensor, clean: Tensor) -> Tensor:
    """mean_D (prediction - x0)^2 / w, w = mean_D |prediction - x0|: (B,) float64. No gradient flows into w."""
    error = (prediction.double() - clean.double()).flatten(1)
    weight = error.detach().abs().mean(1).clamp(min=LEAST_WEIGHT)
    return error.square().mean(1) / weight


def _per_sample(values: Tensor, like: Tensor) -> Tensor:
    """(B,) values as (B, 1, ..., 1), broadcastable against `like`."""
    return values.reshape((-1,) + (1,) * (like.ndim - 1))
