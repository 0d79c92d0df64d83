"""Which denoising steps are stochastic and trained.

The choice follows from the run's seed and the iteration alone, so every worker, in whatever role, makes the same one.
One window serves a whole iteration: windows that differ between members of a group add to the spread of its rewards
and drown the signal.
"""

from __future__ import annotations

from digenrl.identity import draw_rng


def trained_steps(
    num_steps: int, window_size: int, window_range: tuple[int, int], run_seed: int, iteration: int
) -> tuple[int, ...]:
    """Steps of iteration `iteration` that are sampled stochastically and trained, increasing.

    Args:
        num_steps: T, denoising steps of a rollout.
        window_size: W consecutive steps (Flow-GRPO-Fast), or 0 for every step but the last. The last step's noise is
            so small that its log-prob is a thousand times more sensitive than its neighbours'.
        window_range: [lo, hi), the steps a window may take; its start is uniform over lo ... hi - W.
        run_seed: the run's seed.
        iteration: the RL iteration.

    Raises:
        ValueError: the window does not fit into its range, or the range into the trajectory.
    """
    if window_size == 0:
        return tuple(range(num_steps - 1))
    lo, hi = window_range
    if not 0 <= lo < hi <= num_steps or not 0 < window_size <= hi - lo:
        raise ValueError(
            f"sde_window_size={window_size} in sde_window_range=[{lo}, {hi}) does not fit into num_steps={num_steps}"
        )
    start = draw_rng(run_seed, "window", iteration).randint(lo, hi - window_size)
    return tuple(range(start, start + window_size))
