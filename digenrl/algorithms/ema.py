"""Exponential moving average of the trained weights, for evaluation and checkpoints; never for rollout.

e <- e + (1 - d)(w - e) with the warmed-up decay d = min((1 + n) / (10 + n), decay), n counting optimiser steps.

It is part of the optimiser's state (`digenrl.algorithms.optimizer`), so it travels and is saved with it.

Source: Flow-GRPO's reference training, after the warm-up of TensorFlow's ExponentialMovingAverage.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def ema_decay(step: int, decay: float) -> float:
    """Decay at optimiser step `step` (0-based): small at first, so the start is forgotten quickly."""
    return min((1 + step) / (10 + step), decay)


def ema_update(
    average: Mapping[str, Tensor], weights: Mapping[str, Tensor], step: int, *, decay: float = 0.9, interval: int = 8
) -> dict[str, Tensor]:
    """The average after optimiser step `step` (0-based).

    Args:
        average: the average so far, by weight name; not changed.
        weights: the current weights, same names and shapes.
        step: optimiser step.
        decay: upper bound of the decay.
        interval: the average moves only at steps n where n + 1 is a multiple of it.

    Raises:
        ValueError: the names differ.
    """
    if average.keys() != weights.keys():
        raise ValueError(
            f"the average and the weights have different names: {sorted(average.keys() ^ weights.keys())[:5]}"
        )
    if (step + 1) % interval:
        return dict(average)
    rate = 1 - ema_decay(step, decay)
    with torch.no_grad():
        return {name: old + rate * (weights[name].detach().to(old) - old) for name, old in average.items()}
