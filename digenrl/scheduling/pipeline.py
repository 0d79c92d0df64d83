"""The life of a micro-batch: connects the stages it goes through, which know nothing of each other.

The pipeline is level-triggered. News change facts about a micro-batch; `tend` gives it what it needs next, judging only
by the facts, and may be called at any time. So a loss needs no repair plan: what is no longer true is taken back
(`detach`), and the micro-batch is tended again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from digenrl.identity import SampleId
from digenrl.rewards.base import Failed, Score
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.evaluation import Evaluations
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.messages import Cancel, RolloutDone, ScoresDone, Trained, TrajectoryRef, UnitFinished
from digenrl.scheduling.rollouts import Rollouts
from digenrl.scheduling.scopes import Closed, Scopes
from digenrl.scheduling.scoring import Scoring
from digenrl.scheduling.state import RunOver, State, copying
from digenrl.scheduling.streams import Streams
from digenrl.scheduling.training import Training
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit
from digenrl.scheduling.updates import Updates


class Pipeline:
    """Moves micro-batches on."""

    def __init__(
        self,
        state: State,
        rollouts: Rollouts,
        scoring: Scoring,
        scopes: Scopes,
        training: Training,
        updates: Updates,
        evaluations: Evaluations,
        streams: Streams,
        *,
        max_failed_share: float,
        redraws: int,
    ) -> None:
        self._state = state
        self._rollouts = rollouts
        self._scoring = scoring
        self._scopes = scopes
        self._training = training
        self._updates = updates
        self._evaluations = evaluations
        self._streams = streams
        self._max_failed_share = max_failed_share
        self._redraws = redraws
        self._to_generate = 0

    def open(self, batches: Sequence[Batch]) -> None:
        """Take in micro-batches nothing has been done for."""
        for batch in batches:
            self._state.batches[batch.id] = batch
            self.tend(batch)

    def begin(self) -> None:
        """The iteration of the current version is in progress, and all its micro-batches are taken in."""
        self._to_generate = sum(not b.generated for b in self._state.batches.values() if self._current(b))
        self._state.stage = "generate" if self._to_generate else "train"
        self._state.wake_all()

    def discard(self, batch: Batch) -> None:
        """Close a micro-batch that is not wanted, whatever is under way for it."""
        scorer = self._state.fleet.workers.get(batch.scorer or "")
        if scorer is not None and batch.scoring:
            self._state.emit(Cancel(ScoreUnit(batch.id), scorer.name))
        self._scoring.release(batch)
        self._training.discard(batch)
        if batch.roller is not None and not batch.complete:
            self._rollouts.abandon(batch)
        self._state.release(batch)

    def tend(self, batch: Batch) -> None:
        """Give a micro-batch what it needs next."""
        if not self._state.ledger.holders(batch.id):
            if batch.complete:
                batch.restart()
            # It must not hold a cpu lane until it is generated again: that may have to wait for what the lane is for.
            self._scoring.release(batch)
            if batch.needed:
                self._rollouts.queue(batch)
                return
        if batch.roller is not None and not batch.complete:
            # It is being generated again, but a copy was on its way after all, or none of its samples takes part.
            self._rollouts.abandon(batch)
        if not batch.needed:
            return
        if batch.scores is None:
            self._scoring.queue(batch)
            self._scoring.proceed(batch)
        self._training.place(batch)

    def tend_all(self) -> None:
        """Give every micro-batch what it needs next."""
        self._state.disturbed = False
        for batch in self._state.batches.values():
            self.tend(batch)

    # --- news of units ---

    def finished(self, event: UnitFinished, worker: Worker, *, expected: bool) -> None:
        """A unit of a micro-batch ended. `expected`: it was outstanding on that worker."""
        unit, outcome = event.unit, event.outcome
        assert isinstance(unit, RolloutUnit | ScoreUnit | TrainUnit)
        batch = self._state.batches.get(unit.micro_batch)
        if batch is None or not expected:
            self._unexpected(batch, unit, worker)
            return
        match unit, outcome:
            case RolloutUnit(), RolloutDone():
                if self._rollouts.finished(batch, unit, worker):
                    self._generated(batch)
            case ScoreUnit(), ScoresDone():
                self._scored(batch, outcome)
            case TrainUnit(), Trained():
                self._updates.contributed(batch, unit, worker, outcome)
            case _:
                raise TypeError(f"{unit.label} ended with {outcome}")

    def failed(self, unit: RolloutUnit | ScoreUnit | TrainUnit, worker: Worker) -> None:
        """A unit raised. It runs again, elsewhere if there is anybody else."""
        batch = self._state.batches.get(unit.micro_batch)
        if batch is None:
            return
        batch.avoid.add(worker.name)
        match unit:
            case RolloutUnit():
                self._rollouts.abandon(batch)
            case ScoreUnit():
                self._scoring.release(batch)
            case TrainUnit():
                self._updates.redo(batch, unit)
                self._training.forsake(batch, worker.name)
        self.tend(batch)

    def _unexpected(self, batch: Batch | None, unit: RolloutUnit | ScoreUnit | TrainUnit, worker: Worker) -> None:
        """The outcome of a unit that is no longer wanted, or was reported before, is dropped."""
        if isinstance(unit, TrainUnit):
            self._updates.unexpected(unit, worker)
        elif isinstance(unit, RolloutUnit) and (batch is None or not self._belongs(batch, worker.name)):
            self._state.drop(TrajectoryRef(unit.micro_batch), worker.name)

    def _generated(self, batch: Batch) -> None:
        if not batch.generated and self._current(batch):
            self._to_generate -= 1
            if not self._to_generate:
                self._state.stage = "train"
                self._state.wake_all()
        batch.generated = True
        self.tend(batch)

    def _scored(self, batch: Batch, outcome: ScoresDone) -> None:
        scores = {**outcome.scores, **batch.known}
        assert scores.keys() == set(batch.samples), f"{batch.id.label}: scores of other samples"
        self._scoring.release(batch)
        failed = any(isinstance(score, Failed) for score in scores.values())
        if failed and batch.id.phase == "train" and batch.id.draw < self._redraws:
            self._redraw(batch, scores)
            return
        batch.scores = scores
        if batch.id.phase == "eval":
            self._evaluations.scored(batch)
            self._state.release(batch)
            return
        closed = self._scopes.scored(batch)
        self._check_failed_share(batch.id.iteration)
        if closed is None:
            self.tend(batch)
        else:
            self._close(closed, batch.id.iteration)

    def _redraw(self, batch: Batch, scores: Mapping[SampleId, Score]) -> None:
        """Draw the samples that have failed once more, in a micro-batch that takes the place of this one."""
        other = batch.redrawn(self._state.shape, scores)
        self._scopes.replace(batch, other)
        self.discard(batch)
        self.open([other])

    def _close(self, closed: Closed, iteration: int) -> None:
        steps = self._state.shape.trained_steps(iteration)
        for sample, reason in closed.excluded.items():
            self._updates.accounts[iteration].exclude([(sample, step) for step in steps], reason)
        for member in closed.members:
            if not member.advantages:
                self._training.leave_out(member)
            self._updates.close(member)
            self._streams.close(member, closed.statistics)
        for member in closed.members:
            self.tend(member)

    def _check_failed_share(self, iteration: int) -> None:
        samples = self._state.shape.groups * self._state.shape.group_size
        failed = self._scopes.failed(iteration)
        if len(failed) > self._max_failed_share * samples:
            raise RunOver(
                f"{len(failed)} of {samples} samples of iteration {iteration} failed; "
                f"gates.max_failed_share={self._max_failed_share} allows {int(self._max_failed_share * samples)}; "
                f"the first: {failed[0].reason}"
            )

    # --- news of copies ---

    def arrived(self, ref: TrajectoryRef, target: str) -> None:
        """A trajectory was copied to a worker."""
        batch = self._state.batches.get(ref.micro_batch)
        if batch is None:
            self._state.drop(ref, target)
            return
        self._state.succeeded(copying(batch, target))
        if batch.copying.pop(target, None) is not None:
            if batch.roller == target and not batch.complete:
                # The target has given the copy up and generates the trajectory itself; it will end with the same one.
                return
            self._state.ledger.keep(batch.id, target)
            self.tend(batch)
        elif not self._belongs(batch, target):
            self._state.drop(ref, target)

    def copy_failed(self, ref: TrajectoryRef, target: str, reason: str) -> None:
        """A trajectory did not reach a worker."""
        batch = self._state.batches.get(ref.micro_batch)
        source = batch.copying.pop(target, None) if batch is not None else None
        if batch is None or source is None:
            return
        if self._state.fleet.alive(source):
            self._state.postpone(copying(batch, target), target, reason)
        self.tend(batch)

    # --- news of workers ---

    def draining(self, worker: Worker) -> None:
        """A worker is leaving: others take over what it has not been given yet."""
        for batch in self._state.batches.values():
            self._training.forsake(batch, worker.name)
            if batch.scorer == worker.name and not batch.scoring:
                self._scoring.release(batch)

    def lost(self, name: str) -> None:
        """A worker is gone, and what it had of any micro-batch."""
        for batch in self._state.batches.values():
            if batch.roller == name:
                if batch.complete:
                    batch.roller = None
                else:
                    batch.restart()
            if batch.scorer == name:
                self._scoring.release(batch)
            self._training.forsake(batch, name)
            for unit in [unit for unit, trainer in batch.running.items() if trainer == name]:
                self._updates.redo(batch, unit)
            batch.copying.pop(name, None)
        self._training.lost(name)

    def _current(self, batch: Batch) -> bool:
        """Whether it belongs to the iteration in progress."""
        return batch.id.phase == "train" and batch.id.iteration == self._state.version

    def _belongs(self, batch: Batch, worker: str) -> bool:
        """Whether the worker is meant to have the trajectory, or a part of it."""
        return worker == batch.roller or worker in batch.copying or worker in self._state.ledger.holders(batch.id)
