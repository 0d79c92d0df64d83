"""DanceGRPO: every step but the last is drawn with a constant diffusion rate eta; a random part of them is trained.

    shifted_sigmas      its schedule: equal steps from 1 to 0, shifted towards noise
    random_steps        the trained steps of an iteration
    DanceGrpo           the algorithm

What is decoded and scored is x0 = x - sigma v as predicted at the last step, without that step's noise: an Euler step
to sigma 0 gives exactly this. The last step is not trained, so its noise is never drawn.

Source: DanceGRPO (arXiv 2505.07818). Its advantages (standard deviation with ddof 1, eps 1e-8) are defaults of its
section.
Deviations: the trained steps are drawn once per iteration, not once per sample. All samples of a micro-batch then go
through the transformer at the same steps, several of them in one batch, and the scheduler can cut an iteration into
units before it begins; over iterations every usable step is still trained equally often. The model sees 1000 sigma as
it is, not truncated to an integer, in rollout and training alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.algorithms.base import PolicyGradient, Replay, Steps
from digenrl.algorithms.losses import PolicyTerms, clipped_surrogate
from digenrl.config import DanceGrpoConfig
from digenrl.identity import draw_rng


def shifted_sigmas(num_steps: int, shift: float) -> Tensor:
    """(T+1,) float32, from 1 to 0: k t / (1 + (k - 1) t) for equally spaced t."""
    t = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return (shift * t / (1 + (shift - 1) * t)).float()


def random_steps(num_steps: int, count: int, run_seed: int, iteration: int) -> tuple[int, ...]:
    """`count` of the steps [0, num_steps - 1), increasing, all equally likely."""
    return tuple(sorted(draw_rng(run_seed, "trained steps", iteration).sample(range(num_steps - 1), count)))


class DanceGrpo(PolicyGradient):
    """DanceGRPO."""

    sampler = "dance_sde"

    def __init__(self, section: DanceGrpoConfig) -> None:
        self.noise_level = section.eta
        self.num_steps = section.num_steps
        self.num_trained = section.num_trained
        self._shift = section.sigma_shift
        self._clip_range = section.clip_range

    def steps(self, run_seed: int, iteration: int) -> Steps:
        """See Algorithm."""
        trained = random_steps(self.num_steps, self.num_trained, run_seed, iteration)
        return Steps(tuple(range(self.num_steps - 1)), trained)

    def sigmas(self, run_seed: int, iteration: int) -> Tensor | None:
        """See Algorithm."""
        return None if self._shift is None else shifted_sigmas(self.num_steps, self._shift)

    def surrogate(self, ratio: Tensor, advantages: Tensor, replay: Replay) -> PolicyTerms:
        """See Algorithm."""
        return clipped_surrogate(ratio, advantages, self._clip_range, None)
