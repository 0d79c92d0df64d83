"""AdamW as a function of weights, gradient and state, and the learning-rate schedule.

    learning_rate   optimiser section, iteration -> rate
    adamw_step      one step; nothing is changed in place
    OptimizerState  moments and step count, to and from a flat dict of tensors (safetensors)

A functional step is what lets a lead trainer die in the middle of one: the committed weights and state are never
half-written. The arithmetic is that of `torch.optim.AdamW` (single-tensor), operation by operation.

Sources: AdamW (arXiv 1711.05101), Adam (arXiv 1412.6980).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from digenrl.config import OptimizerConfig


@dataclass(frozen=True)
class OptimizerState:
    """State of AdamW.

    Attributes:
        step: optimiser steps taken; skipped ones do not count.
        exp_avg: running mean of the gradients by weight name, float32.
        exp_avg_sq: running mean of their squares, float32.
    """

    step: int
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]

    @classmethod
    def initial(cls, weights: Mapping[str, Tensor]) -> OptimizerState:
        """The state before the first step."""
        return cls(
            0, *({name: torch.zeros_like(w, requires_grad=False) for name, w in weights.items()} for _ in range(2))
        )

    def to_tensors(self) -> dict[str, Tensor]:
        """Flat dict: `step` (int64 scalar), `exp_avg.NAME`, `exp_avg_sq.NAME`."""
        return {
            "step": torch.tensor(self.step, dtype=torch.int64),
            **{f"exp_avg.{name}": tensor for name, tensor in self.exp_avg.items()},
            **{f"exp_avg_sq.{name}": tensor for name, tensor in self.exp_avg_sq.items()},
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OptimizerState:
        """Inverse of `to_tensors`.

        Raises:
            ValueError: `step` is missing, or the two moments cover different weights.
        """
        moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}}
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            if moment in moments:
                moments[moment][name] = tensor
            elif key != "step":
                raise ValueError(f"optimiser state holds {key!r}; expected step, exp_avg.NAME and exp_avg_sq.NAME")
        if "step" not in tensors:
            raise ValueError("optimiser state has no `step`")
        _check_names("exp_avg_sq", moments["exp_avg_sq"], moments["exp_avg"])
        return cls(int(tensors["step"]), moments["exp_avg"], moments["exp_avg_sq"])


@dataclass(frozen=True)
class StepResult:
    """Outcome of an optimiser step.

    Attributes:
        weights: the new weights; the very tensors that came in if the step was skipped.
        state: the new state; likewise.
        grad_norm: L2 norm of the whole gradient before it was scaled down (not finite: the step was skipped).
        skipped: the gradient held a NaN or infinity.
    """

    weights: dict[str, Tensor]
    state: OptimizerState
    grad_norm: float
    skipped: bool


def adamw_step(
    weights: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
    state: OptimizerState,
    optimizer: OptimizerConfig,
    learning_rate: float,
) -> StepResult:
    """One AdamW step with gradient-norm clipping.

    Args:
        weights: float32 by name; not changed.
        gradient: float32 by the same names.
        state: from the step before, or `OptimizerState.initial`; not changed.
        optimizer: betas, eps, weight decay and max_grad_norm are read.
        learning_rate: from `learning_rate`.

    Raises:
        ValueError: weights, gradient and state do not have the same names.
    """
    _check_names("gradient", gradient, weights)
    _check_names("optimiser state", state.exp_avg, weights)
    norm = gradient_norm(gradient)
    if not math.isfinite(norm):
        return StepResult(dict(weights), state, norm, skipped=True)
    scale = min(1.0, optimizer.max_grad_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    beta1, beta2 = optimizer.betas
    step = state.step + 1
    step_size = learning_rate / (1 - beta1**step)
    correction = math.sqrt(1 - beta2**step)
    new, exp_avg, exp_avg_sq = {}, {}, {}
    with torch.no_grad():
        for name, weight in weights.items():
            grad = gradient[name] * scale
            mean = exp_avg[name] = torch.lerp(state.exp_avg[name], grad, 1 - beta1)
            square = exp_avg_sq[name] = (state.exp_avg_sq[name] * beta2).addcmul_(grad, grad, value=1 - beta2)
            denominator = (square.sqrt() / correction).add_(optimizer.eps)
            decayed = weight.detach() * (1 - learning_rate * optimizer.weight_decay)
            new[name] = decayed.addcdiv_(mean, denominator, value=-step_size)
    return StepResult(new, OptimizerState(step, exp_avg, exp_avg_sq), norm, skipped=False)


def gradient_norm(gradient: Mapping[str, Tensor]) -> float:
    """L2 norm over all tensors, summed in float64 in the order of the names."""
    return math.sqrt(math.fsum(float(gradient[name].detach().double().square().sum()) for name in sorted(gradient)))


def learning_rate(optimizer: OptimizerConfig, iterations: int, iteration: int) -> float:
    """Learning rate of all optimiser steps of one iteration.

    Rises linearly over the first `warmup_iterations`, the last of which has the peak rate. "linear" then falls
    linearly to `final_fraction` of the peak, reached at the run's last iteration; "constant" stays.

    Args:
        optimizer: the optimiser section.
        iterations: iterations of the whole run.
        iteration: 0 ... iterations - 1.
    """
    peak, warmup = optimizer.learning_rate, optimizer.warmup_iterations
    if iteration < warmup:
        return peak * (iteration + 1) / warmup
    top, last = max(warmup - 1, 0), iterations - 1
    if optimizer.decay == "constant" or last <= top:
        return peak
    progress = min((iteration - top) / (last - top), 1.0)
    return peak * (1 - (1 - optimizer.final_fraction) * progress)


def _check_names(what: str, tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    if tensors.keys() != weights.keys():
        raise ValueError(
            f"the names of the {what} differ from the weights': missing {sorted(weights.keys() - tensors.keys())[:5]}, "
            f"unexpected {sorted(tensors.keys() - weights.keys())[:5]}"
        )
