"""MixGRPO: a window of stochastic, trained steps that slides along the trajectory; all other steps are deterministic.

Those after the window may be fewer and of second order (MixGRPO-Flash), see `digenrl.algorithms.dpm_solver`. The
window's place follows from the iteration alone, see `digenrl.algorithms.windows`. The loss is PPO's clipped surrogate.

Source: MixGRPO (arXiv 2507.21802). Its advantages (each reward by itself, standard deviation with ddof 1, eps 1e-8) are
defaults of its section.
Deviations: those of `windows` and of `dpm_solver.compress_tail`; the model sees 1000 sigma as it is, not truncated to
an integer; Flash keeps all steps after the window unless `tail_ratio` says how many.
"""

from __future__ import annotations

from torch import Tensor

from digenrl.algorithms.base import PolicyGradient, Replay, Steps
from digenrl.algorithms.dance_grpo import shifted_sigmas
from digenrl.algorithms.dpm_solver import compress_tail, compressed_steps
from digenrl.algorithms.losses import PolicyTerms, clipped_surrogate
from digenrl.algorithms.windows import SlidingWindow, window_steps
from digenrl.config import MixGrpoConfig

#: Noise of the last steps is too small to train on.
UNTRAINED = 2


class MixGrpo(PolicyGradient):
    """MixGRPO."""

    def __init__(self, section: MixGrpoConfig) -> None:
        self.sampler = section.sampler
        self.noise_level = section.noise_level
        self.num_steps = section.num_steps
        self.num_trained = section.window.size
        self._window = SlidingWindow(limit=section.num_steps - UNTRAINED, **section.window.model_dump())
        self._shift, self._flash = section.sigma_shift, section.tail_solver == "dpm_solver"
        self._tail_ratio = section.tail_ratio
        self._clip_range = section.clip_range

    def steps(self, run_seed: int, iteration: int) -> Steps:
        """See Algorithm."""
        window = window_steps(self._window, run_seed, iteration)
        total = compressed_steps(self.num_steps, window[-1], self._tail_ratio)
        return Steps(window, window, multistep_from=window[-1] + 1 if self._flash else None, total=total)

    def sigmas(self, run_seed: int, iteration: int) -> Tensor | None:
        """See Algorithm."""
        if self._shift is None:
            return None
        table = shifted_sigmas(self.num_steps, self._shift)
        if self._tail_ratio == 1:
            return table
        return compress_tail(table, window_steps(self._window, run_seed, iteration)[-1], self._tail_ratio, self._shift)

    def surrogate(self, ratio: Tensor, advantages: Tensor, replay: Replay) -> PolicyTerms:
        """See Algorithm."""
        return clipped_surrogate(ratio, advantages, self._clip_range, None)
