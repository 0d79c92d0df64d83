"""The few statistics that a run's summary states and its guard judges by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np


def mean_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean, 10,000 resamples, fixed seed.

    Args:
        values: one value per held-out prompt; (nan, nan) if there are none.
        level: coverage.
    """
    if not values:
        return math.nan, math.nan
    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    means = data[rng.integers(0, len(data), size=(10_000, len(data)))].mean(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def paired_rise(
    before: Mapping[int, float], after: Mapping[int, float], level: float = 0.95
) -> tuple[float, tuple[float, float]]:
    """Mean rise and its interval over the prompts that were scored both times.

    Args:
        before: reward by prompt index.
        after: likewise, same noise.
        level: coverage of the interval.
    """
    rises = [after[i] - before[i] for i in sorted(before.keys() & after.keys())]
    return (float(np.mean(rises)) if rises else math.nan), mean_interval(rises, level)
