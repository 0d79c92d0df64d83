"""GRPO-Guard: Flow-GRPO with a ratio that is centred at 1 and has the same scale at every step.

    drift       mean_D (m - m_old)^2 / (2 s^2): by how much the log-prob falls, on average, as the mean moves
    GrpoGuard   r = exp((log p - log p_old + drift) s), weighted by 1 / (sigma - sigma')

Under the old policy E[log p - log p_old] = -drift, so that ratios of the plain surrogate lie below 1 and positive
advantages are clipped too late. Adding the drift centres them; the exponent s = g sqrt(sigma - sigma') takes out how
log-probs scale with the noise of a step, and the weight gives every step a gradient of the same size.

Source: GRPO-Guard (arXiv 2510.22319).
Deviations: drift, scale and weight are those of each (sample, step) pair, where the references average the scale (and
one of them the drift) over a micro-batch, so that the loss does not depend on what is batched together; where all
pairs are at the same step, scale and weight are theirs. The old mean is computed again under the old weights at the
composition of the batch being trained, as the old log-prob is, instead of being stored.
"""

from __future__ import annotations

from torch import Tensor

from digenrl.algorithms.base import Replay
from digenrl.algorithms.flow_grpo import FlowGrpo


def drift(replay: Replay) -> Tensor:
    """(N,) Gaussian KL between the old and the new transition, averaged over latent elements; with gradient."""
    squared = (replay.mean - replay.old_mean.detach()).square().flatten(1).mean(1)
    return squared / (2 * replay.terms.std.flatten().square())


def guarded_ratio(replay: Replay, bias: Tensor) -> Tensor:
    """(N,) exp((log p - log p_old + bias) s) with gradient.

    Args:
        replay: the transitions.
        bias: what re-centres the change of the log-prob; `drift`.
    """
    change = replay.log_prob - replay.old_log_prob.detach()
    return ((change + bias) * replay.terms.std.flatten()).exp()


class GrpoGuard(FlowGrpo):
    """GRPO-Guard."""

    def ratio(self, replay: Replay) -> Tensor:
        """See Algorithm."""
        return guarded_ratio(replay, drift(replay))

    def weight(self, replay: Replay) -> Tensor:
        """1 / (sigma - sigma'), as s = g sqrt(sigma - sigma')."""
        return (replay.terms.g / replay.terms.std).flatten().square()
