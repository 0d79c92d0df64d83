"""Flow-DPPO: samples leave the update by how far the policy's transition has moved, not by their ratio.

    divergence  mean_D (m - m_old)^2 / (2 s^2), the KL between the old and the new transition
    FlowDppo    -A r; 0 where the divergence has reached its threshold and the step would increase it

A ratio says by how much the likelihood of one draw has changed, which is noisy; between Gaussians of equal width the
divergence itself is known. A pair is left out if its divergence is at least the threshold and its ratio has moved the
way its advantage pulls: r > 1 and A > 0, or r < 1 and A < 0.

Source: divergence proximal policy optimisation (arXiv 2602.04879), carried over to flows by verl-omni, whose
advantages are not clipped; nor are they here, unless `adv_clip_max` is set.
Deviations: none in the loss. The old mean is computed again under the old weights, as the old log-prob is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from digenrl.algorithms.base import Replay
from digenrl.algorithms.flow_grpo import Windowed
from digenrl.algorithms.grpo_guard import drift
from digenrl.algorithms.losses import PolicyTerms, clamped
from digenrl.config import FlowDppoConfig


def masked_surrogate(
    ratio: Tensor, advantages: Tensor, divergence: Tensor, threshold: float, adv_clip_max: float | None
) -> PolicyTerms:
    """-A r of each pair, 0 and `clipped` where it has left the trust region.

    Args:
        ratio: (N,) with gradient.
        advantages: (N,).
        divergence: (N,), of which no gradient is taken.
        threshold: from here up a pair may leave.
        adv_clip_max: bound of the advantages; None: unbounded.
    """
    advantages = clamped(advantages.to(ratio.dtype), adv_clip_max)
    detached = ratio.detach()
    outward = ((detached > 1) & (advantages > 0)) | ((detached < 1) & (advantages < 0))
    left = outward & (divergence.detach() >= threshold)
    return PolicyTerms(torch.where(left, 0.0, -advantages * ratio), detached, left)


class FlowDppo(Windowed):
    """Flow-DPPO."""

    def __init__(self, section: FlowDppoConfig) -> None:
        super().__init__(section)
        self.sampler = section.sampler
        self._threshold = section.divergence_threshold

    def surrogate(self, ratio: Tensor, advantages: Tensor, replay: Replay) -> PolicyTerms:
        """See Algorithm."""
        return masked_surrogate(ratio, advantages, drift(replay), self._threshold, None)
