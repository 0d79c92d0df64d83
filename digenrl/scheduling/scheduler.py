"""The scheduler: a pure state machine without clock, threads or I/O.

    commands = scheduler.handle(event, now)

A micro-batch goes through these stages; each is a file that knows nothing of the others, and this one connects them:

    rollouts.py    it is generated on one worker, step after step, under the version's adapter
    scoring.py     its samples are scored on some cpu lane; its trajectory travels to its trainer meanwhile
    scopes.py      when its std scope is scored, its advantages are known
    training.py    its train units run on its trainer, which holds the adapter of the step before
    updates.py     the contributions of an update are merged on the lead; it steps; the result is committed
    scheduler.py   after the last update of an iteration: publish, close, begin the next

    adapters.py    who holds which adapter         evaluation.py  held-out samples of the current version
    ledger.py      what lives where                fleet.py       workers and their lanes
    policies.py    layouts: roles and order        batches.py     the state of one micro-batch

The machine is level-triggered. An event changes facts; `_tend` gives a micro-batch what it needs next, judging only by
the facts, and may be called at any time; `_fill` then hands out units until nobody can take one. So a loss needs no
repair plan: the lost facts are taken back and the micro-batches concerned are tended again.

What the driver of this machine must keep to:

- Commands to one worker take effect in the order they were issued; in particular a Drop before what follows it.
- Every Install, Transfer and (per source) Reduce is answered, by TransferFailed if it fails; an Install's failure is
  TransferFailed(AdapterRef). Nothing is answered on behalf of a worker after its WorkerLost, with one exception: a
  Reduce is answered by its lead, also for a source that is lost.
- The driver keeps what was committed to it (Commit with standby None) until a later version is published; it starts
  with the adapter and optimiser state of the first version.
- A lead keeps adapter theta - 1 when it makes theta. An UpdateUnit without any contribution is possible, when every
  sample of the update is excluded: if the answer is Updated(skipped=True), it does not count as a bad update.
- A unit that was cancelled is answered by nothing, or, if it already ran, by an answer that is ignored.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from digenrl.scheduling import messages as m
from digenrl.scheduling.adapters import Adapters
from digenrl.scheduling.batches import Batch
from digenrl.scheduling.evaluation import Evaluations
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.ledger import Account
from digenrl.scheduling.policies import Layout
from digenrl.scheduling.progress import Progress, describe, measure
from digenrl.scheduling.rollouts import Rollouts
from digenrl.scheduling.scopes import AdvantageFn, Scopes, StdScope
from digenrl.scheduling.scoring import Scoring
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.state import RunOver, State
from digenrl.scheduling.training import Training
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, UpdateUnit
from digenrl.scheduling.updates import Updates


class Scheduler:
    """Decides what runs where."""

    def __init__(
        self,
        shape: RunShape,
        layout: Layout,
        advantages: AdvantageFn,
        *,
        std_scope: StdScope = "group",
        max_attempts: int = 3,
        max_losses: int = 5,
        max_failed_share: float = 0.5,
        max_bad_updates: int = 3,
        queue_depth: int = 2,
    ) -> None:
        """Begins with no workers and the adapter of version `shape.start_iteration` on the driver.

        Args:
            shape: how the run's work is cut into units.
            layout: roles and order.
            advantages: turns the rewards of one std scope into advantages.
            std_scope: over which samples the standard deviation is taken.
            max_attempts: failures of one unit (or copy) that end the run.
            max_losses: workers lost while running one and the same unit that end the run.
            max_failed_share: share of an iteration's samples that may fail.
            max_bad_updates: optimiser steps that may be skipped for a non-finite gradient.
            queue_depth: units outstanding per lane.
        """
        self._max_failed_share = max_failed_share
        self._last = shape.iterations - 1
        self._over = False
        self._state = State(shape, layout, queue_depth=queue_depth, max_attempts=max_attempts, max_losses=max_losses)
        self._rollouts = Rollouts(self._state)
        self._scoring = Scoring(self._state)
        self._scopes = Scopes(shape, std_scope, advantages)
        self._training = Training(self._state)
        self._adapters = Adapters(self._state)
        self._updates = Updates(self._state, self._adapters, self._training, max_bad_updates=max_bad_updates)
        self._evaluations = Evaluations(self._state)
        self._to_generate = 0
        self._begin()

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Take note of an event and decide what follows.

        Args:
            event: what happened.
            now: seconds on the driver's clock. No decision depends on it so far.

        Returns:
            Commands in the order in which they are to be carried out. After Finished or FailRun always empty.
        """
        if self._over:
            return []
        try:
            self._note(event)
            self._fill()
        except RunOver as end:
            self._over = True
            return [m.FailRun(str(end))]
        return self._state.take_commands()

    def stop_after(self, iteration: int) -> None:
        """Let `iteration` be the last one, or the one in progress if that is later."""
        self._last = max(min(self._last, iteration), min(self._state.version, self._last))

    def progress(self) -> Progress:
        """Where the run is."""
        return measure(self._state, self._updates, self._evaluations, self._over)

    def waiting_for(self) -> str:
        """One sentence for a person: what has to happen next."""
        return describe(self._state, self._updates, self._adapters, self._evaluations, self._over)

    # --- events ---

    def _note(self, event: m.Event) -> None:
        match event:
            case m.UnitFinished():
                self._on_finished(event)
            case m.Transferred():
                self._on_transferred(event)
            case m.VersionInstalled():
                if (worker := self._worker(event.worker)) is not None:
                    self._adapters.installed(worker, event.theta)
            case m.UnitFailed():
                self._on_failed(event)
            case m.TransferFailed():
                self._on_transfer_failed(event)
            case m.Committed():
                if self._updates.committed(event.theta) and self._updates.finished:
                    self._all_committed()
            case m.WorkerJoined():
                self._on_joined(event)
            case m.WorkerDraining():
                self._on_draining(event)
            case m.WorkerLost():
                self._on_lost(event)
            case m.Tick():
                pass

    def _on_finished(self, event: m.UnitFinished) -> None:
        worker = self._worker(event.worker)
        if worker is None:
            return
        self._state.wake(worker.name)
        expected = self._state.fleet.take(event.unit, worker)
        unit, outcome = event.unit, event.outcome
        if isinstance(unit, UpdateUnit):
            assert isinstance(outcome, m.Updated), f"{unit.label} ended with {outcome}"
            if expected:
                self._updates.stepped(outcome)
            return
        batch = self._state.batches.get(unit.micro_batch)
        if not expected or batch is None:
            self._unexpected(batch, unit, worker)
            return
        match unit, outcome:
            case RolloutUnit(), m.RolloutDone():
                if self._rollouts.finished(batch, unit, worker):
                    self._generated(batch)
            case ScoreUnit(), m.ScoresDone():
                self._scored(batch, outcome)
            case TrainUnit(), m.Trained():
                self._updates.contributed(batch, unit, worker, outcome)
            case _:
                raise TypeError(f"{unit.label} ended with {outcome}")

    def _unexpected(self, batch: Batch | None, unit: RolloutUnit | ScoreUnit | TrainUnit, worker: Worker) -> None:
        """The outcome of a unit that is no longer wanted, or was reported before, is dropped."""
        if isinstance(unit, TrainUnit):
            self._updates.unexpected(unit, worker)
        elif isinstance(unit, RolloutUnit):
            wanted = batch is not None and (
                batch.roller == worker.name or worker.name in self._state.ledger.holders(batch.id)
            )
            if not wanted:
                self._state.drop(m.TrajectoryRef(unit.micro_batch), worker.name)

    def _on_failed(self, event: m.UnitFailed) -> None:
        worker = self._worker(event.worker)
        if worker is None or not self._state.fleet.take(event.unit, worker):
            return
        self._state.wake(worker.name)
        self._state.failed(event.unit.label, worker.name, event.reason)
        if isinstance(event.unit, UpdateUnit):
            self._updates.step_failed()
            return
        batch = self._state.batches[event.unit.micro_batch]
        batch.avoid.add(worker.name)
        match event.unit:
            case RolloutUnit():
                self._rollouts.abandon(batch)
            case ScoreUnit():
                self._scoring.release(batch)
            case TrainUnit():
                self._training.redo(batch, event.unit)
                self._training.unassign(batch)
        self._tend(batch)

    def _on_transferred(self, event: m.Transferred) -> None:
        target = self._worker(event.target)
        if target is None:
            return
        match event.ref:
            case m.AccumulatorRef(theta, source):
                self._updates.merged(source, event.target, theta)
            case m.TrajectoryRef(micro_batch):
                batch = self._state.batches.get(micro_batch)
                if batch is None or batch.copying.pop(event.target, None) is None:
                    self._state.drop(event.ref, event.target)
                    return
                self._state.ledger.keep(micro_batch, event.target)
                self._tend(batch)
            case m.AdapterRef():
                pass

    def _on_transfer_failed(self, event: m.TransferFailed) -> None:
        target = self._worker(event.target)
        if target is None:
            return
        match event.ref:
            case m.AccumulatorRef(theta, source):
                self._updates.merge_failed(source, event.target, theta, event.reason)
            case m.AdapterRef(theta):
                self._adapters.failed(target, theta, event.reason)
            case m.TrajectoryRef(micro_batch):
                batch = self._state.batches.get(micro_batch)
                source = batch.copying.pop(event.target, None) if batch is not None else None
                if batch is None or source is None:
                    return
                if self._state.fleet.alive(source):
                    self._state.failed(f"copying {micro_batch.label} to {event.target}", event.target, event.reason)
                self._tend(batch)

    # --- a micro-batch ---

    def _tend(self, batch: Batch) -> None:
        """Give a micro-batch what it needs next."""
        if not self._state.ledger.holders(batch.id):
            if batch.complete:
                batch.restart()
            if batch.needed and batch.roller is None:
                self._rollouts.queue(batch)
            return
        if batch.scores is None:
            self._scoring.queue(batch)
            self._scoring.proceed(batch)
        self._training.place(batch)

    def _generated(self, batch: Batch) -> None:
        first_time = not batch.generated
        batch.generated = True
        if first_time and batch.id.phase == "train":
            self._to_generate -= 1
            if not self._to_generate:
                self._state.stage = "train"
                self._state.wake_all()
        self._tend(batch)

    def _scored(self, batch: Batch, outcome: m.ScoresDone) -> None:
        assert outcome.scores.keys() == set(batch.samples), f"{batch.id.label}: scores of other samples"
        batch.scores = outcome.scores
        self._scoring.release(batch)
        if batch.id.phase == "eval":
            self._evaluations.scored(batch)
            self._state.release(batch)
            return
        closed, excluded = self._scopes.scored(batch)
        self._check_failed_share()
        steps = self._state.shape.trained_steps(batch.id.iteration)
        for sample, reason in excluded.items():
            self._updates.account.exclude([(sample, step) for step in steps], reason)
        for member in closed:
            if not member.advantages:
                self._training.leave_out(member)
            self._updates.close(member)
            self._tend(member)

    def _check_failed_share(self) -> None:
        samples = self._state.shape.groups * self._state.shape.group_size
        failed = self._scopes.failed
        if failed > self._max_failed_share * samples:
            raise RunOver(
                f"{failed} of {samples} samples of iteration {self._state.version} failed; "
                f"max_failed_share={self._max_failed_share} allows {int(self._max_failed_share * samples)}"
            )

    # --- the fleet ---

    def _worker(self, name: str) -> Worker | None:
        """A worker that is there; news of others is stale."""
        return self._state.fleet.workers.get(name)

    def _on_joined(self, event: m.WorkerJoined) -> None:
        self._state.fleet.join(event.worker, event.kind, event.capabilities)
        self._fleet_changed()

    def _on_draining(self, event: m.WorkerDraining) -> None:
        worker = self._worker(event.worker)
        if worker is None or worker.draining:
            return
        self._state.fleet.drain(worker)
        for batch in self._state.batches.values():
            if batch.trainer == worker.name:
                self._training.unassign(batch)
            if batch.scorer == worker.name and not batch.scoring:
                self._scoring.release(batch)
        self._fleet_changed()

    def _on_lost(self, event: m.WorkerLost) -> None:
        worker = self._state.fleet.leave(event.worker)
        if worker is None:
            return
        self._state.lost_with(worker)
        self._state.ledger.forget(worker.name)
        self._adapters.lost(worker.name)
        for batch in self._state.batches.values():
            self._detach(batch, worker.name)
        self._training.lost(worker.name)
        self._updates.lost(worker.name)
        self._fleet_changed()

    def _detach(self, batch: Batch, lost: str) -> None:
        """Take back what is no longer true of a micro-batch."""
        if batch.roller == lost:
            if batch.complete:
                batch.roller = None
            else:
                batch.restart()
        if batch.scorer == lost:
            self._scoring.release(batch)
        if batch.trainer == lost:
            self._training.unassign(batch)
        for unit in [unit for unit, name in batch.running.items() if name == lost]:
            self._training.redo(batch, unit)
        for target in [target for target, source in batch.copying.items() if lost in (target, source)]:
            del batch.copying[target]

    def _fleet_changed(self) -> None:
        self._state.assign_roles()
        self._adapters.provide_all()
        for batch in self._state.batches.values():
            self._tend(batch)

    # --- iterations ---

    def _begin(self) -> None:
        """Open the iteration of the current version, if there is one, and the version's evaluation."""
        state, shape = self._state, self._state.shape
        opened = self._evaluations.begin()
        if state.version <= self._last:
            batches = [Batch.of(shape, micro_batch) for micro_batch in shape.micro_batches(state.version)]
            pairs = shape.groups * shape.group_size * len(shape.trained_steps(state.version))
            self._scopes.open(batches)
            self._updates.open(batches, Account(pairs))
            self._training.forget_loads()
            self._to_generate = len(batches)
            state.stage = "generate"
            opened += batches
        for batch in opened:
            state.batches[batch.id] = batch
            self._tend(batch)

    def _all_committed(self) -> None:
        """The last update of the iteration is committed: its trajectories have served."""
        self._state.stage = "publish"
        for batch in [batch for batch in self._state.batches.values() if batch.id.phase == "train"]:
            self._state.release(batch)
        self._state.wake_all()

    def _publish(self) -> None:
        """Close the iteration, and go on with the next version."""
        state = self._state
        assert state.lead is not None
        iteration = state.version
        state.version += 1
        state.emit(m.Publish(state.version, state.theta, state.lead))
        trained, excluded, skipped = self._updates.account.close()
        state.emit(m.CloseIteration(iteration, trained, excluded, skipped))
        state.ledger.driver = {theta for theta in state.ledger.driver if theta >= state.version_theta}
        self._begin()
        self._adapters.retire()
        if not self._finished:
            self._adapters.provide_all()

    @property
    def _finished(self) -> bool:
        return self._state.version > self._last and not self._evaluations.running

    # --- handing out ---

    def _fill(self) -> None:
        """Issue commands until nothing more can be issued."""
        self._updates.advance()
        lead = self._state.lead
        if (
            self._state.version <= self._last
            and self._updates.finished
            and not self._evaluations.running
            and lead in self._state.ledger.adapters(self._state.theta)
        ):
            self._publish()
        if self._finished:
            self._over = True
            self._state.emit(m.Finished())
            return
        self._scoring.assign()
        self._feed()

    def _feed(self) -> None:
        """Give units to the devices, one at a time to the least loaded, so that a group spreads over all of them."""
        fleet = self._state.fleet
        waiting = [self._turn(fleet.workers[name]) for name in self._state.awake if name in fleet.workers]
        self._state.awake.clear()
        heapify(waiting)
        while waiting:
            worker = fleet.workers[heappop(waiting)[2]]
            if fleet.has_room(worker) and self._give_unit(worker):
                heappush(waiting, self._turn(worker))

    def _turn(self, worker: Worker) -> tuple[int, int, str]:
        return len(worker.device), worker.order, worker.name

    def _give_unit(self, worker: Worker) -> bool:
        """Dispatch one unit to a device with room. False if there is nothing for it."""
        if worker.draining:
            return self._rollouts.resume(worker)
        kinds = self._state.layout.takes(worker, self._state.stage)
        # A train unit must not wait for more than the unit that is running: only one other unit may be outstanding.
        spare = "train" not in kinds or not worker.helping
        for kind in kinds:
            if kind == "train" and self._training.next(worker):
                return True
            if kind == "rollout" and spare and (self._rollouts.resume(worker) or self._rollouts.start(worker)):
                return True
            if kind == "evaluate" and self._rollouts.evaluate(worker):
                return True
        # A trajectory goes on where it began, whatever the worker's role has become.
        return spare and self._rollouts.resume(worker)
