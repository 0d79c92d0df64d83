"""AdamW as a function of weights, gradient and state, and the learning-rate schedule.

    learning_rate   optimiser section, iteration -> rate
    adamw_step      one step; nothing is changed in place
    OptimizerState  moments, moving average and step count, to and from a flat dict of tensors (safetensors)
    evaluated       the weights that are evaluated and exported; `average_of` the moving average alone

A functional step is what lets a lead trainer die in the middle of one: the committed weights and state are never
half-written. The arithmetic is that of `torch.optim.AdamW` (single-tensor), operation by operation.

Sources: AdamW (arXiv 1711.05101), Adam (arXiv 1412.6980).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from digenrl.algorithms.ema import ema_update
from digenrl.config import OptimizerConfig

_AVERAGE = "average."


@dataclass(frozen=True)
class OptimizerState:
    """State of AdamW, and of the average that goes with it.

    Attributes:
        step: optimiser steps taken; skipped ones do not count.
        exp_avg: running mean of the gradients by weight name, float32.
        exp_avg_sq: running mean of their squares, float32.
        average: moving average of the weights; empty where none is kept.
    """

    step: int
    exp_avg: dict[str, Tensor]
    exp_avg_sq: dict[str, Tensor]
    average: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def initial(cls, weights: Mapping[str, Tensor], *, averaged: bool = False) -> OptimizerState:
        """The state before the first step; `averaged`: keep a moving average of the weights."""
        mean, square = ({n: torch.zeros_like(w, requires_grad=False) for n, w in weights.items()} for _ in range(2))
        return cls(0, mean, square, dict(weights) if averaged else {})

    def to_tensors(self) -> dict[str, Tensor]:
        """Flat dict: `step` (int64 scalar), `exp_avg.NAME`, `exp_avg_sq.NAME`, `average.NAME`."""
        return {
            "step": torch.tensor(self.step, dtype=torch.int64),
            **{f"exp_avg.{name}": tensor for name, tensor in self.exp_avg.items()},
            **{f"exp_avg_sq.{name}": tensor for name, tensor in self.exp_avg_sq.items()},
            **{f"{_AVERAGE}{name}": tensor for name, tensor in self.average.items()},
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> OptimizerState:
        """Inverse of `to_tensors`.

        Raises:
            ValueError: `step` is missing, or the two moments or the average cover different weights.
        """
        moments: dict[str, dict[str, Tensor]] = {"exp_avg": {}, "exp_avg_sq": {}, "average": {}}
        for key, tensor in tensors.items():
            moment, _, name = key.partition(".")
            if moment in moments:
                moments[moment][name] = tensor
            elif key != "step":
                raise ValueError(
                    f"optimiser state holds {key!r}; expected step, exp_avg.NAME, exp_avg_sq.NAME, average.NAME"
                )
        if "step" not in tensors:
            raise ValueError("optimiser state has no `step`")
        _check_names("exp_avg_sq", moments["exp_avg_sq"], moments["exp_avg"])
        if moments["average"]:
            _check_names("average", moments["average"], moments["exp_avg"])
        return cls(int(tensors["step"]), **moments)


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
        optimizer: betas, eps, weight decay, max_grad_norm and the average's keys are read.
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
    average = state.average
    if average and optimizer.ema_decay is not None:
        average = ema_update(average, new, state.step, decay=optimizer.ema_decay, interval=optimizer.ema_every)
    return StepResult(new, OptimizerState(step, exp_avg, exp_avg_sq, average), norm, skipped=False)


def evaluated(weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What is evaluated, sampled from and exported: the moving average if there is one, else the weights.

    Args:
        weights: by name.
        state: the optimiser's, as a flat dict.
    """
    return average_of(state) or dict(weights)


def average_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The moving average in an optimiser's state as a flat dict; empty if there is none."""
    return {name.removeprefix(_AVERAGE): t for name, t in state.items() if name.startswith(_AVERAGE)}


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
