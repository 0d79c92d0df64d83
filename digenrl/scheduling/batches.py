"""The state of one micro-batch, from its first rollout step to its last train unit."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from digenrl.identity import MicroBatchId, SampleId
from digenrl.rewards.base import Failed, Score, Scored
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import RolloutUnit, TrainUnit

if TYPE_CHECKING:
    from digenrl.algorithms.advantages import Advantage


@dataclass(slots=True, eq=False)
class Batch:
    """One micro-batch.

    Attributes:
        id: which.
        samples: its samples, in batch order.
        theta: the adapter that generates it.
        update: the theta its gradient helps to make; 0 for evaluation.
        rollout: its rollout units, in order.
        roller: who generates it, or generated it last.
        queued: it waits for a worker to generate it.
        issued: rollout units dispatched to `roller`.
        finished: rollout units that ended there.
        generated: it, or the one that is drawn again in it, has been generated at least once.
        copying: copies under way, target -> source.
        waits_for_score: it waits for a worker to score it.
        scorer: who scores it.
        scoring: the score unit is dispatched; before that the trajectory has to reach the scorer.
        known: scores of samples that are not scored again, because only others are drawn again.
        scores: one per sample, once scored.
        advantages: of the samples that take part, once the std scope is closed.
        home: the trainer it is sent to early, because it will probably train on it.
        lines: the lines of train units it is in.
        open: train units that are not in the update yet.
        ready: open train units that anybody may take.
        claims: open train units that wait for the trajectory to arrive, and where.
        running: open train units that are dispatched, and where.
        avoid: workers where a unit of it failed.
    """

    id: MicroBatchId
    samples: tuple[SampleId, ...]
    theta: int
    update: int
    rollout: list[RolloutUnit]
    open: dict[TrainUnit, None]
    roller: str | None = None
    queued: bool = False
    issued: int = 0
    finished: int = 0
    generated: bool = False
    copying: dict[str, str] = field(default_factory=dict)
    waits_for_score: bool = False
    scorer: str | None = None
    scoring: bool = False
    known: dict[SampleId, Score] = field(default_factory=dict)
    scores: dict[SampleId, Score] | None = None
    advantages: dict[SampleId, Advantage] | None = None
    home: str | None = None
    lines: set[str] = field(default_factory=set)
    ready: dict[TrainUnit, None] = field(default_factory=dict)
    claims: dict[TrainUnit, str] = field(default_factory=dict)
    running: dict[TrainUnit, str] = field(default_factory=dict)
    avoid: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, shape: RunShape, micro_batch: MicroBatchId) -> Batch:
        """A micro-batch nothing has been done for."""
        training = micro_batch.phase == "train"
        return cls(
            id=micro_batch,
            samples=shape.samples(micro_batch),
            theta=shape.theta_of_version(shape.version_of(micro_batch)),
            update=shape.update_of_group(micro_batch.iteration, shape.group_of(micro_batch)) if training else 0,
            rollout=shape.rollout_units(micro_batch),
            open=dict.fromkeys(shape.train_units(micro_batch)) if training else {},
        )

    def redrawn(self, shape: RunShape, scores: Mapping[SampleId, Score]) -> Batch:
        """The micro-batch in which its samples that have failed are drawn once more.

        All of it is generated again, as sizes of units are fixed; the others come out as they were and keep their
        scores.
        """
        failed = [isinstance(scores[sample], Failed) for sample in self.samples]
        batch = Batch.of(shape, self.id.redrawn(failed))
        batch.known = {sample: score for sample, score in scores.items() if isinstance(score, Scored)}
        batch.generated = True
        return batch

    @property
    def on_policy(self) -> bool:
        """Whether it is trained from the adapter that generated it: its ratio is identically 1."""
        return self.update == self.theta + 1

    @property
    def rewards(self) -> dict[SampleId, float]:
        """Rewards of the samples that are scored and have one."""
        scores = self.scores or {}
        return {s: score.value for s in self.samples if isinstance(score := scores.get(s), Scored)}

    @property
    def closed(self) -> bool:
        """Whether its advantages are known."""
        return self.advantages is not None

    @property
    def silent(self) -> bool:
        """Whether it is known that none of its samples takes part."""
        return self.closed and not self.advantages

    @property
    def taking_part(self) -> Collection[SampleId]:
        """Samples that take part in training, as far as is known."""
        return self.rewards if self.advantages is None else self.advantages

    @property
    def needed(self) -> bool:
        """Whether somebody still has to read the trajectory."""
        return self.scores is None or bool(self.open)

    @property
    def complete(self) -> bool:
        """Whether all rollout units ended on `roller`."""
        return self.finished == len(self.rollout)

    def restart(self) -> None:
        """The trajectory is gone: it will be generated from step 0."""
        self.roller = None
        self.issued = self.finished = 0
