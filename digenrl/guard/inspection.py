"""What a worker finds out about pictures while it scores them, beyond the trained reward.

    Inspector     of one run
    Inspection    what it found; add them up over micro-batches

Of held-out samples it takes statistics and gold rewards, of the training samples of a group how much they differ.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from digenrl.config import RunConfig
from digenrl.guard.gold import gold_rewards, load_gold
from digenrl.guard.pictures import PictureStatistics, diversity, picture_statistics
from digenrl.rewards.base import Failed, PromptRecord, Reward, Score
from digenrl.scoring import NON_FINITE
from digenrl.trajectory import Trajectory


@dataclass(frozen=True)
class Inspection:
    """Found in one micro-batch, or in several.

    Attributes:
        pictures: statistics by prompt index, of held-out samples.
        gold: `gold[name][prompt index]` is what a gold reward says of a held-out sample.
        distances: diversity of each micro-batch of training samples.
    """

    pictures: Mapping[int, PictureStatistics] = field(default_factory=dict)
    gold: Mapping[str, Mapping[int, Score]] = field(default_factory=dict)
    distances: tuple[float, ...] = ()

    def __add__(self, other: Inspection) -> Inspection:
        names = self.gold.keys() | other.gold.keys()
        gold = {name: {**self.gold.get(name, {}), **other.gold.get(name, {})} for name in sorted(names)}
        return Inspection({**self.pictures, **other.pictures}, gold, self.distances + other.distances)

    def metrics(self) -> dict[str, float]:
        """What it says of an iteration."""
        return {"diversity": sum(self.distances) / len(self.distances)} if self.distances else {}


class Inspector:
    """Looks at what is scored in one run. Gold rewards are loaded when the first evaluation asks for them.

    Args:
        config: of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._gold: tuple[Reward, ...] | None = None

    def __call__(
        self, trajectory: Trajectory, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]
    ) -> Inspection:
        """Look at a micro-batch.

        Args:
            trajectory: B samples.
            images: (B, F, H, W, 3).
            prompts: B records.
        """
        if self._config.guard.mode == "off":
            return Inspection()
        if trajectory.micro_batch.phase == "train":
            return inspect_group(trajectory, images)
        if self._gold is None:
            self._gold = load_gold(gold_rewards(self._config))
        return inspect_evaluation(trajectory, images, prompts, self._gold, self._config.guard.prompts)


def inspect_evaluation(
    trajectory: Trajectory,
    images: NDArray[np.uint8],
    prompts: Sequence[PromptRecord],
    gold: Sequence[Reward],
    first: int,
) -> Inspection:
    """Look at held-out samples.

    Args:
        trajectory: of the micro-batch, B samples.
        images: (B, F, H, W, 3).
        prompts: B records.
        gold: what else to score them with. One that raises leaves failed scores: nothing is trained on it.
        first: how many prompts of an evaluation are looked at.
    """
    rows = [row for row, sample in enumerate(trajectory.samples) if sample.group < first]
    finite = trajectory.finite.tolist()
    shown = [row for row in rows if finite[row]]
    index = {row: trajectory.samples[row].group for row in rows}
    found: dict[str, dict[int, Score]] = {}
    for reward in gold if rows else ():
        values: dict[int, Score] = {index[row]: NON_FINITE for row in rows}
        if shown:
            scores = _scores(reward, images[shown], [prompts[row] for row in shown])
            values |= {index[row]: score for row, score in zip(shown, scores, strict=True)}
        found[reward.name] = values
    return Inspection({index[row]: picture_statistics(images[row]) for row in shown}, found)


def inspect_group(trajectory: Trajectory, images: NDArray[np.uint8]) -> Inspection:
    """Look at training samples of one prompt."""
    distance = diversity(images[trajectory.finite.numpy()])
    return Inspection(distances=() if distance is None else (distance,))


def _scores(reward: Reward, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> Sequence[Score]:
    try:
        return reward(images, prompts)
    except Exception as error:  # whatever it is, the run does not depend on it
        return [Failed(f"{type(error).__name__}: {error}")] * len(prompts)
