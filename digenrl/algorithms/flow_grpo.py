"""Flow-GRPO: SDE steps, of which some are trained by PPO's clipped surrogate.

    Windowed    a window of consecutive stochastic steps, all of them trained
    FlowGrpo    the same with the clipped surrogate

Variants are settings: all steps but the last (window 0), Fast (a window), coefficient-preserving sampling (sampler
cps), Wan's sampler (wan_sde), without guidance (model.guidance_scale 1), with a KL to the base model in the convention
of the image recipes or of the Wan recipe.

Source: Flow-GRPO (arXiv 2505.05470) and its Fast recipe; MixGRPO (arXiv 2507.21802) for the window.
Deviations: one window for all samples of an iteration (see `selection`); with window 0 the last step, which is never
trained, is an Euler step, where the full recipe still adds its small noise.
"""

from __future__ import annotations

from torch import Tensor

from digenrl.algorithms.base import PolicyGradient, Replay, Steps
from digenrl.algorithms.losses import PolicyTerms, clipped_surrogate
from digenrl.algorithms.selection import trained_steps
from digenrl.config import FlowGrpoConfig, GrpoGuardConfig
from digenrl.config.algorithm import WindowedSection


class Windowed(PolicyGradient):
    """A window of consecutive stochastic steps, all of them trained."""

    def __init__(self, section: WindowedSection) -> None:
        self.noise_level = section.noise_level
        self.num_steps = section.num_steps
        self.num_trained = section.sde_window_size or section.num_steps - 1
        self._window = (section.sde_window_size, section.window_range)

    def steps(self, run_seed: int, iteration: int) -> Steps:
        """See Algorithm."""
        drawn = trained_steps(self.num_steps, *self._window, run_seed, iteration)
        return Steps(drawn, drawn)


class FlowGrpo(Windowed):
    """Flow-GRPO."""

    def __init__(self, section: FlowGrpoConfig | GrpoGuardConfig) -> None:
        super().__init__(section)
        self.sampler = section.sampler
        self._clip_range = section.clip_range

    def surrogate(self, ratio: Tensor, advantages: Tensor, replay: Replay) -> PolicyTerms:
        """See Algorithm."""
        return clipped_surrogate(ratio, advantages, self._clip_range, None)
