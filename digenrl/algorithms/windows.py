"""MixGRPO's sliding window: which denoising steps an iteration samples stochastically and trains.

    SlidingWindow            how wide it is, and how it moves
    window_steps             the steps of one iteration
    published_random_steps   the published generator of "random", for comparison with other implementations

The window covers W of the first M steps, beginning with the noisiest. It stays in one place for some iterations, then
moves on by a stride; having reached the end it goes back to the start, or comes to rest. How long it stays:

    progressive  equally long everywhere
    decay        shorter the further it has come, falling linearly
    exp_decay    shorter beyond a certain step, falling exponentially
    random       one iteration; every place is equally likely

The published rule counts iterations as it goes. Here the place follows from the iteration alone, so that a run which is
resumed, or a worker that joins, makes the same choice.

Deviation: a window that does not fit is never used. The published rule moves its start up to step M and cuts what lies
beyond, so that its last windows are shorter and the very last is empty, an iteration without a loss. Up to there, and
from its return to the start on, the two agree.

Source: MixGRPO (arXiv 2507.21802) and its reference training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from digenrl.identity import draw_rng

WindowStrategy = Literal["progressive", "decay", "exp_decay", "random"]


@dataclass(frozen=True)
class SlidingWindow:
    """How the window moves.

    Attributes:
        size: W, steps in the window.
        limit: M, the window lies within steps [0, M). Published: two less than the denoising steps, as the noise of
            the last ones is too small to train on.
        strategy: how long it stays in one place.
        iterations: how many iterations it stays, at most. "random" does not look at it.
        stride: steps it moves on by; W means windows that do not overlap.
        rewind: after the last place go back to the start; False: stay at the last W steps.
        least_iterations: of "decay", what the stay falls to at step M; None: a quarter of `iterations`, at least 1.
        decay_after: of "exp_decay", the start beyond which stays become shorter.
        decay_rate: of "exp_decay", by how much, per step.

    Raises:
        ValueError: unknown strategy, or the window can never be placed.
    """

    size: int
    limit: int
    strategy: WindowStrategy = "progressive"
    iterations: int = 25
    stride: int = 1
    rewind: bool = True
    least_iterations: int | None = None
    decay_after: int = 13
    decay_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.strategy not in get_args(WindowStrategy):
            known = ", ".join(get_args(WindowStrategy))
            raise ValueError(f"strategy={self.strategy!r} is not known; expected one of {known}")
        if not 1 <= self.size <= self.limit:
            raise ValueError(f"a window of size={self.size} does not fit into limit={self.limit} steps")
        if min(self.stride, self.iterations) < 1:
            raise ValueError(
                f"a window never moves with stride={self.stride} and iterations={self.iterations}; both are at least 1"
            )

    def stay(self, start: int) -> int:
        """Iterations for which the window stays where it begins with step `start`."""
        match self.strategy:
            case "decay":
                least = max(1, self.iterations // 4) if self.least_iterations is None else self.least_iterations
                progress = start / self.limit
                return max(1, least, int(self.iterations * (1 - progress) + least * progress))
            case "exp_decay":
                share = math.exp(-self.decay_rate * max(0, start - self.decay_after))
                return max(1, math.ceil(self.iterations * share))
            case _:
                return self.iterations


def window_steps(window: SlidingWindow, run_seed: int, iteration: int) -> tuple[int, ...]:
    """The W steps of iteration `iteration` that are sampled stochastically and trained, increasing.

    Args:
        window: how it moves.
        run_seed: the run's seed; matters for "random" alone.
        iteration: the RL iteration.
    """
    if window.strategy == "random":
        start = draw_rng(run_seed, "window", iteration).randint(0, window.limit - window.size)
    else:
        start = _start(window, iteration)
    return tuple(range(start, start + window.size))


def published_random_steps(window: SlidingWindow, seed: int) -> tuple[int, ...]:
    """What the published "random" goes on with after an update seeded with `seed`; it begins with step 0, undrawn."""
    start = int(np.random.default_rng(seed).integers(0, window.limit - window.size + 1))
    return tuple(range(start, start + window.size))


def _start(window: SlidingWindow, iteration: int) -> int:
    """Where the window begins, having stayed at each place before."""
    last = window.limit - window.size
    stays = [(start, window.stay(start)) for start in range(0, last + 1, window.stride)]
    left = iteration % sum(stay for _, stay in stays) if window.rewind else iteration
    for start, stay in stays:
        if left < stay:
            return start
        left -= stay
    return last
