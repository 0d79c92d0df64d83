"""Scoring one micro-batch: what a reward unit does, around the rewards.

score_micro_batch   result of every sample
mean_reward         of the samples that have one
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from digenrl.identity import SampleId
from digenrl.rewards.base import Failed, PromptRecord, Score, Scored
from digenrl.rewards.mix import RewardMix
from digenrl.trajectory import Trajectory

NON_FINITE = Failed("non-finite image")


def score_micro_batch(
    reward: RewardMix, trajectory: Trajectory, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]
) -> dict[SampleId, Score]:
    """Result of every sample; of a micro-batch some of whose samples were drawn again, of those drawn last.

    A sample whose decoded image was not finite has failed; the rewards are not shown the pixels that stand for it.

    Args:
        reward: the run's rewards.
        trajectory: of the micro-batch, B samples.
        images: (B, F, H, W, 3).
        prompts: B records.
    """
    finite = trajectory.finite.tolist()
    due = [row for row, sample in enumerate(trajectory.samples) if sample.draw == trajectory.micro_batch.draw]
    shown = [row for row in due if finite[row]]
    found = reward(images[shown], [prompts[row] for row in shown]).scores if shown else ()
    scores: dict[SampleId, Score] = dict.fromkeys((trajectory.samples[row] for row in due), NON_FINITE)
    for row, score in zip(shown, found, strict=True):
        scores[trajectory.samples[row]] = score
    return scores


def mean_reward(scores: Mapping[SampleId, Score]) -> float:
    """Mean of the values there are; NaN if there is none."""
    values = [score.value for score in scores.values() if isinstance(score, Scored)]
    return math.fsum(values) / len(values) if values else math.nan
