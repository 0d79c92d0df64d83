"""One reverse step of a flow-matching sampler, and the log-probability of its outcome.

A stochastic step from sigma to sigma' draws x' ~ N(m, s^2 I) with m = c_x x + c_v v. The samplers differ only in
these three coefficients, so a sampler is one small function and everything else is shared:

    step_terms   sampler, sigma table, step index per sample -> StepTerms
    step_mean    m
    sample_next  x' = m + s z, the noise z being an argument
    log_prob     mean log-density of x' over the latent elements
    euler_step   the deterministic step, x' = x + (sigma' - sigma) v

Sources: Flow-GRPO (arXiv 2505.05470) for "flow_sde" and its Wan variant "wan_sde", coefficient-preserving sampling
(arXiv 2509.05952) for "cps", DanceGRPO (arXiv 2505.07818) for "dance_sde".

Step indices are per sample: neighbours in a batch may sit at different steps. Coefficients are computed in float64
and rounded once; latents and velocities are cast to the type of the sigma table (float64, else float32) before any
arithmetic, because narrower types move the log-prob by more than a clip range.

Shapes: B batch, T denoising steps, *D latent shape of one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Sampler = Literal["flow_sde", "cps", "wan_sde", "dance_sde"]

#: From here up a sigma counts as 1. UniPC tables start at 1 - 1e-6, where 1 / (1 - sigma) would still explode.
SIGMA_ONE = 1.0 - 1e-4


@dataclass(frozen=True)
class StepTerms:
    """Coefficients of one stochastic step.

    All have shape (B, 1, ..., 1), broadcastable against (B, *D), in the type of the computation.

    Attributes:
        c_x: weight of the latent in the mean.
        c_v: weight of the velocity in the mean.
        std: s, standard deviation of the transition.
        g: diffusion rate, s = g sqrt(sigma - sigma'). "cps" has no rate; there it is s, as its reference reports.
    """

    c_x: Tensor
    c_v: Tensor
    std: Tensor
    g: Tensor


def step_terms(sampler: Sampler, sigmas: Tensor, index: Tensor, noise_level: float, ndim: int) -> StepTerms:
    """Coefficients of the steps sigmas[index] -> sigmas[index + 1].

    Args:
        sampler: which stochastic sampler.
        sigmas: (T+1,) decreasing noise levels in [0, 1], ending in 0; float32 or float64.
        index: (B,) int64, the step each sample is at, in [0, T).
        noise_level: a of "flow_sde" and "cps"; eta of "dance_sde"; for "wan_sde" a factor on its fixed rate, 1 being
            the published sampler. 0 gives the Euler step with std 0.
        ndim: dimensions of the latents, batch axis included.

    Raises:
        ValueError: unknown sampler, or a step outside the table.
    """
    if sampler not in _TRANSITIONS:
        raise ValueError(f"sampler={sampler!r} is not known; expected one of {', '.join(get_args(Sampler))}")
    table = sigmas.to(torch.float64)
    sigma, sigma_next = endpoints(table, index)
    c_x, c_v, std, g = _TRANSITIONS[sampler](sigma, sigma_next, table, noise_level)
    dtype = compute_dtype(sigmas)
    shape = (-1,) + (1,) * (ndim - 1)
    return StepTerms(*(term.to(dtype).reshape(shape) for term in (c_x, c_v, std, g)))


def step_mean(terms: StepTerms, x: Tensor, v: Tensor) -> Tensor:
    """Mean (B, *D) of the transition from latents `x` under velocity `v`, both (B, *D)."""
    dtype = terms.c_x.dtype
    return terms.c_x * x.to(dtype) + terms.c_v * v.to(dtype)


def sample_next(terms: StepTerms, x: Tensor, v: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Next latents and their mean, (B, *D) each, from standard normal `noise` (B, *D)."""
    mean = step_mean(terms, x, v)
    return mean + terms.std * noise.to(mean.dtype), mean


def euler_step(sigmas: Tensor, index: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """Deterministic step x + (sigma' - sigma) v of (B, *D) latents; `sigmas` and `index` as in `step_terms`."""
    dtype = compute_dtype(sigmas)
    sigma, sigma_next = endpoints(sigmas.to(torch.float64), index)
    delta = (sigma_next - sigma).to(dtype).reshape((-1,) + (1,) * (x.ndim - 1))
    return x.to(dtype) + delta * v.to(dtype)


def log_prob(sampler: Sampler, x_next: Tensor, mean: Tensor, terms: StepTerms) -> Tensor:
    """Log-probability of `x_next`, averaged (not summed) over the latent elements.

    mean_D[-(x' - m)^2 / (2 s^2)] - ln s - ln(2 pi) / 2, in nats. "cps" is, by its definition, the bare
    mean_D[-(x' - m)^2]: its ratios are not likelihood ratios and its clip ranges are not those of the others; on the
    last step, where s = 0, it is exactly 0 at rollout.

    Args:
        sampler: the sampler `terms` belong to.
        x_next: (B, *D), a constant: no gradient flows into it.
        mean: (B, *D) from `step_mean`, with gradient where wanted.
        terms: coefficients of the step.

    Returns:
        (B,) in the type of `terms`.

    Raises:
        ValueError: a deterministic step (std 0) has no density; "cps" alone is defined there.
    """
    squared = (x_next.detach().to(mean.dtype) - mean).square().flatten(1).mean(1)
    if sampler == "cps":
        return -squared
    std = terms.std.flatten()
    if bool((std == 0).any()):
        raise ValueError(
            "log_prob of a deterministic step (std 0, noise level 0) is undefined: do not store or train it"
        )
    return -squared / (2 * std.square()) - std.log() - 0.5 * math.log(2 * math.pi)


def compute_dtype(sigmas: Tensor) -> torch.dtype:
    """Type in which latents are computed along this table: float64 if it is, else float32."""
    return torch.float64 if sigmas.dtype == torch.float64 else torch.float32


def endpoints(table: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """sigma and sigma' of each sample, (B,) each.

    Raises:
        ValueError: a step outside the table. A negative index must not wrap around to the clean end.
    """
    steps = len(table) - 1
    if bool(((index < 0) | (index >= steps)).any()):
        raise ValueError(f"step index {index.tolist()} is outside [0, {steps}) of a table of {steps} steps")
    index = index.to(table.device)
    return table[index], table[index + 1]


# --- samplers: (sigma, sigma', table, noise level), float64 (B,) -> c_x, c_v, s, g ---

_Terms = tuple[Tensor, Tensor, Tensor, Tensor]
_Transition = Callable[[Tensor, Tensor, Tensor, float], _Terms]


def _sde(rate: Callable[[Tensor, Tensor, float], Tensor]) -> _Transition:
    """The SDE whose marginals are the flow's, for a diffusion rate g(sigma, table, noise level).

    The drift is the ODE's minus g^2/2 times the score -x1/sigma, x1 = x + (1 - sigma) v being the predicted noise.
    """

    def transition(sigma: Tensor, sigma_next: Tensor, table: Tensor, noise_level: float) -> _Terms:
        g = rate(sigma, table, noise_level)
        delta = sigma_next - sigma
        pull = g.square() / (2 * sigma)
        return 1 + pull * delta, (1 + pull * (1 - sigma)) * delta, g * (-delta).sqrt(), g

    return transition


def _flow_rate(sigma: Tensor, table: Tensor, noise_level: float) -> Tensor:
    """a sqrt(sigma / (1 - sigma)), with the table's second sigma in the denominator where sigma is 1."""
    bounded = torch.where(sigma >= SIGMA_ONE, table[1], sigma)
    return noise_level * (sigma / (1 - bounded)).sqrt()


def _wan_rate(sigma: Tensor, table: Tensor, noise_level: float) -> Tensor:
    return noise_level * (table[-1] + (table[1] - table[-1]) * sigma)


def _dance_rate(sigma: Tensor, table: Tensor, noise_level: float) -> Tensor:
    return torch.full_like(sigma, noise_level)


def _cps(sigma: Tensor, sigma_next: Tensor, table: Tensor, noise_level: float) -> _Terms:
    """m = (1 - sigma') x0 + sqrt(sigma'^2 - s^2) x1 with x0 = x - sigma v, x1 = x + (1 - sigma) v."""
    angle = noise_level * math.pi / 2
    std = sigma_next * math.sin(angle)
    kept = sigma_next * abs(math.cos(angle))  # sqrt(sigma'^2 - s^2) without the cancellation
    return (1 - sigma_next) + kept, kept * (1 - sigma) - (1 - sigma_next) * sigma, std, std


_TRANSITIONS: dict[str, _Transition] = {
    "flow_sde": _sde(_flow_rate),
    "wan_sde": _sde(_wan_rate),
    "dance_sde": _sde(_dance_rate),
    "cps": _cps,
}
