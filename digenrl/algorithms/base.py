"""What an algorithm decides. Each has a file of its own; `digenrl.algorithms.registry` finds it by its section.

    Algorithm       which steps are drawn and trained, along which schedule, with which weights
    PolicyGradient  an algorithm with likelihoods, and the loss of its policy
    Steps           of one iteration
    Replay          transitions that were drawn, under the weights being trained and under those that drew them

What all share is elsewhere: samplers in `steps`, advantages in `advantages`, the KL to the base model in `losses`.

Shapes: N (sample, step) pairs of one train unit, *D latent shape of one sample.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from digenrl.algorithms.losses import PolicyTerms, likelihood_ratio
from digenrl.algorithms.steps import Sampler, StepTerms


class Steps(NamedTuple):
    """Denoising steps of one iteration.

    Attributes:
        stochastic: drawn from the sampler; the others are deterministic.
        trained: those that are trained, increasing. Of stochastic ones the transition is, of others the noise level.
        multistep_from: from this step on, deterministic ones are of second order; None: all of them are Euler steps.
        total: how many steps there are; None: as many as everywhere.
    """

    stochastic: tuple[int, ...]
    trained: tuple[int, ...]
    multistep_from: int | None = None
    total: int | None = None


@dataclass(frozen=True, eq=False)
class Replay:
    """Transitions that were drawn, evaluated again.

    Attributes:
        mean: (N, *D) under the weights being trained, with gradient.
        log_prob: (N,) of what was drawn, under them, with gradient.
        old_mean: (N, *D) under the weights that drew it.
        old_log_prob: (N,) under those.
        terms: coefficients of the steps.
    """

    mean: Tensor
    log_prob: Tensor
    old_mean: Tensor
    old_log_prob: Tensor
    terms: StepTerms


class Algorithm(ABC):
    """An algorithm with its settings. Holds no state: equal settings give equal answers in every process.

    Attributes:
        sampler: how a stochastic step is drawn, if there is any.
        noise_level: of that sampler.
        num_steps: T, denoising steps of a training rollout, at most; see `steps`.
        num_trained: K, trained steps of each sample.
        forward: clean latents are noised again and trained on, instead of the transitions of the rollout.
        lags: samples may be generated with other weights than those that were trained last, see `decay_after`.
    """

    sampler: Sampler = "flow_sde"
    noise_level: float = 0.0
    num_steps: int
    num_trained: int
    forward: ClassVar[bool] = False
    lags: bool = False

    @abstractmethod
    def steps(self, run_seed: int, iteration: int) -> Steps:
        """The steps of an iteration, from identity alone."""

    def total_steps(self, run_seed: int, iteration: int) -> int:
        """Denoising steps of an iteration's rollouts."""
        return self.steps(run_seed, iteration).total or self.num_steps

    def sigmas(self, run_seed: int, iteration: int) -> Tensor | None:
        """(T+1,) float32 noise levels of an iteration's rollouts; None: those of the checkpoint."""
        return None

    def decay_after(self, theta: int) -> float:
        """d: after optimiser step `theta`, which ends an iteration, samples are generated with d old + (1 - d) new."""
        return 0.0


class PolicyGradient(Algorithm):
    """An algorithm that trains transitions by their likelihood."""

    def ratio(self, replay: Replay) -> Tensor:
        """(N,) with gradient; exactly 1 where the weights being trained are those that drew the transitions."""
        return likelihood_ratio(replay.log_prob, replay.old_log_prob)

    def weight(self, replay: Replay) -> Tensor:
        """(N,) constants that a pair's loss is multiplied by."""
        return torch.ones_like(replay.old_log_prob)

    @abstractmethod
    def surrogate(self, ratio: Tensor, advantages: Tensor, replay: Replay) -> PolicyTerms:
        """Loss of each pair before it is weighted.

        Where the ratio is 1 its gradient must be that of -advantage * ratio: streaming relies on it.

        Args:
            ratio: (N,) from `ratio`.
            advantages: (N,), within their bound already.
            replay: what the ratio is of.
        """
