"""DPM-Solver++ for flow matching: steps of second order from the last two predictions of the clean latent.

    solver_terms    sigma table, step index per sample -> SolverTerms
    predict_clean   x0 = x - sigma v
    solver_step     x', or its mean, from x and the predictions
    solver_sample   x' of the stochastic form, the noise being an argument
    compress_tail   a sigma table with fewer steps after the last stochastic one; `compressed_steps` says how many

A multistep solver remembers. Here what it remembers, the prediction x0_ made one step before, is an argument; without
it a step is of first order. With alpha = 1 - sigma, lambda = ln(alpha / sigma), h = lambda' - lambda, h_ the same of
the step before, and e = exp(-h):

    ODE  x' = (sigma' / sigma) x + alpha' (1 - e) x0 + c (x0 - x0_)
    SDE  x' = (sigma' / sigma) e x + alpha' (1 - e^2) x0 + c (x0 - x0_) + sigma' sqrt(1 - e^2) z

         midpoint  c = (h / h_) alpha' (1 - q) / 2           ODE: q = e, u = h
         heun      c = (h / h_) alpha' (1 - (1 - q) / u)     SDE: q = e^2, u = 2h

The ODE form of first order is the Euler step. h is infinite where sigma is 1 or sigma' is 0. The step after sigma = 1
is therefore of first order by itself (h / h_ = 0), and the last one is made so, as published.

MixGRPO-Flash takes its deterministic steps this way, DiffusionNFT all of its rollout (ODE, midpoint).

Sources: DPM-Solver++ (arXiv 2211.01095), MixGRPO (arXiv 2507.21802), DiffusionNFT (arXiv 2509.16117).

Step indices are per sample. Coefficients are computed in float64 and rounded once, see digenrl.algorithms.steps.

Shapes: B batch, T denoising steps, *D latent shape of one sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from digenrl.algorithms.steps import compute_dtype, endpoints

SolverType = Literal["midpoint", "heun"]


@dataclass(frozen=True)
class SolverTerms:
    """Coefficients of one step: x' = c_x x + c_clean x0 + c_change (x0 - x0_) + std z.

    All have shape (B, 1, ..., 1), broadcastable against (B, *D), in the type of the computation.

    Attributes:
        c_x: weight of the latent.
        c_clean: weight of the prediction x0 of the clean latent.
        c_change: weight of its change since the step before; 0 where a step is of first order.
        std: standard deviation of the noise; 0 in the ODE form and on the last step.
    """

    c_x: Tensor
    c_clean: Tensor
    c_change: Tensor
    std: Tensor


def solver_terms(
    sigmas: Tensor, index: Tensor, ndim: int, *, solver: SolverType = "midpoint", stochastic: bool = False
) -> SolverTerms:
    """Coefficients of the steps sigmas[index] -> sigmas[index + 1].

    Args:
        sigmas: (T+1,) decreasing noise levels in [0, 1], ending in 0; float32 or float64.
        index: (B,) int64, the step each sample is at, in [0, T).
        ndim: dimensions of the latents, batch axis included.
        solver: how the second order is reached.
        stochastic: the SDE form instead of the ODE's.

    Raises:
        ValueError: unknown solver, or a step outside the table.
    """
    if solver not in get_args(SolverType):
        raise ValueError(f"solver={solver!r} is not known; expected one of {', '.join(get_args(SolverType))}")
    table = sigmas.to(torch.float64)
    sigma, sigma_next = endpoints(table, index)
    before = table[(index.to(table.device) - 1).clamp(min=0)]
    # e and 1 - e as fractions of sigmas: exact at both ends, and no difference of nearly equal numbers between them.
    e = (1 - sigma) * sigma_next / (sigma * (1 - sigma_next))
    one_minus_q = (sigma - sigma_next) / (sigma * (1 - sigma_next))
    h, h_before = -e.log(), _log_snr(sigma) - _log_snr(before)
    u, c_x, std = h, sigma_next / sigma, torch.zeros_like(sigma)
    if stochastic:
        one_minus_q = one_minus_q * (1 + e)
        u, c_x, std = 2 * h, c_x * e, sigma_next * one_minus_q.sqrt()
    alpha = 1 - sigma_next
    change = one_minus_q / 2 if solver == "midpoint" else 1 - one_minus_q / u
    second_order = (index.to(table.device) > 0) & (sigma_next > 0)
    c_change = torch.where(second_order, h / h_before * alpha * change, 0.0)
    dtype, shape = compute_dtype(sigmas), (-1,) + (1,) * (ndim - 1)
    return SolverTerms(*(term.to(dtype).reshape(shape) for term in (c_x, alpha * one_minus_q, c_change, std)))


def predict_clean(sigmas: Tensor, index: Tensor, x: Tensor, v: Tensor) -> Tensor:
    """The clean latent (B, *D) that velocity `v` at latent `x` points to; `sigmas` and `index` as in `solver_terms`."""
    dtype = compute_dtype(sigmas)
    sigma, _ = endpoints(sigmas.to(dtype), index)
    return x.to(dtype) - sigma.reshape((-1,) + (1,) * (x.ndim - 1)) * v.to(dtype)


def solver_step(terms: SolverTerms, x: Tensor, clean: Tensor, before: Tensor | None = None) -> Tensor:
    """The next latent of the ODE form, or the mean of that of the SDE form.

    Args:
        terms: coefficients of the step.
        x: (B, *D).
        clean: (B, *D) from `predict_clean` at this step.
        before: (B, *D) the same at the step before; None, where there was none, makes a step of first order.

    Returns:
        (B, *D) in the type of `terms`.
    """
    dtype = terms.c_x.dtype
    mean = terms.c_x * x.to(dtype) + terms.c_clean * clean.to(dtype)
    return mean if before is None else mean + terms.c_change * (clean.to(dtype) - before.to(dtype))


def solver_sample(
    terms: SolverTerms, x: Tensor, clean: Tensor, before: Tensor | None, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Next latents of the SDE form and their mean, (B, *D) each, from standard normal `noise` (B, *D)."""
    mean = solver_step(terms, x, clean, before)
    return mean + terms.std * noise.to(mean.dtype), mean


def compress_tail(sigmas: Tensor, last: int, ratio: float, shift: float) -> Tensor:
    """A sigma table with fewer steps after step `last`, for a solver of higher order ("post" of MixGRPO-Flash).

    Of the N - last noise levels that follow, the share `ratio` is kept, rounded down, equally spaced before the shift.
    Those up to the one that step `last` leads to stay as they are, bit for bit: what is trained does not change.

    Deviation: at least two are kept, the first and 0. The published rule can keep one, and then stops before the
    latent is clean.

    Args:
        sigmas: (N+1,) decreasing noise levels, ending in 0.
        last: the last stochastic step.
        ratio: in (0, 1]; published 0.4.
        shift: s of the schedule's sigma = s t / (1 + (s - 1) t); exp(mu) where it depends on the resolution.

    Returns:
        (n+1,) with n <= N, in the type of `sigmas`, decreasing, ending in 0.

    Raises:
        ValueError: no such step, or a ratio outside (0, 1].
    """
    steps = len(sigmas) - 1
    kept = compressed_steps(steps, last, ratio) - last
    if last + 1 == steps:
        return sigmas.clone()
    sigma = float(sigmas[last + 1])
    start = sigma / (shift - (shift - 1) * sigma)
    times = torch.linspace(start, 0, kept, dtype=torch.float64, device=sigmas.device)[1:]
    return torch.cat([sigmas[: last + 2], (shift * times / (1 + (shift - 1) * times)).to(sigmas.dtype)])


def compressed_steps(steps: int, last: int, ratio: float) -> int:
    """Denoising steps that `compress_tail` leaves of `steps`.

    Raises:
        ValueError: no such step, or a ratio outside (0, 1].
    """
    if not 0 <= last < steps:
        raise ValueError(f"last={last} is not one of the {steps} steps")
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio={ratio} must be in (0, 1]")
    return min(last + max(int((steps - last) * ratio), 2), steps)


def _log_snr(sigma: Tensor) -> Tensor:
    """lambda = ln(alpha / sigma); minus infinity at sigma = 1."""
    return ((1 - sigma) / sigma).log()
