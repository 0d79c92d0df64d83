"""The scheduler: a pure state machine without clock, threads or I/O.

    commands = scheduler.handle(event, now)

A micro-batch goes through these stages:

    rollouts.py    it is generated on one worker, step after step, under the version's adapter
    scoring.py     its samples are scored on some cpu lane; its trajectory travels to its trainer meanwhile
    scopes.py      when its std scope is scored, its advantages are known
    streams.py     with streaming it may be trained before
    training.py    its train units run on its trainer, which holds the adapter of the step before
    updates.py     the contributions of an update are merged on the lead; it steps; the result is committed
    pipeline.py    connects these stages
    iterations.py  after the last update of an iteration: publish, close, begin the next
    scheduler.py   events come in, units are handed out

With stale groups (TCSS) two iterations are open: those groups of the next one are generated, scored and sent to their
trainers while the iteration in progress is trained. Training goes strictly by iteration.

    adapters.py    who holds which adapter         evaluation.py  held-out samples of the current version
    ledger.py      what lives where                fleet.py       workers and their lanes
    policies.py    layouts: roles and order        batches.py     the state of one micro-batch
    state.py       what the stages share           progress.py    where the run is, in words

An event changes facts; then `_fill` issues commands until nothing more can be issued.

What the driver of this machine must keep to:

- Commands to one worker take effect in the order they were issued; in particular a Drop before what follows it.
- A Drop of an accumulator also voids the train units that were to add to it and were sent before: they leave nothing,
  whenever they end.
- Every Install, Transfer and (per source) Reduce is answered, by TransferFailed if it fails; an Install's failure is
  TransferFailed(AdapterRef). Nothing is answered on behalf of a worker after its WorkerLost, with one exception: a
  Reduce is answered by its lead, also for a source that is lost.
- The driver keeps what was committed to it (Commit with standby None) until a later version is published, with stale
  groups until the second one after it is. It starts with the adapter and optimiser state of the first version, and with
  the adapter of the version before if samples of the first iteration are to be generated under it
  (RunShape.versions_in_use).
- A lead keeps adapter theta - 1 when it makes theta. An UpdateUnit without any contribution is possible, when every
  sample of the update is excluded: if the answer is Updated(skipped=True), it does not count as a bad update.
- Tick comes every second or so, also when nothing is outstanding: what failed to move is tried again at a Tick.
- A unit that was cancelled is answered by nothing, or, if it already ran, by an answer that is ignored.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from digenrl.scheduling import messages as m
from digenrl.scheduling.adapters import Adapters
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.evaluation import Evaluations
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.foresight import Foresight
from digenrl.scheduling.iterations import Iterations
from digenrl.scheduling.pipeline import Pipeline
from digenrl.scheduling.policies import Layout
from digenrl.scheduling.progress import Progress, describe, measure
from digenrl.scheduling.rollouts import Rollouts
from digenrl.scheduling.scopes import AdvantageFn, Scopes, StdScope
from digenrl.scheduling.scoring import Scoring
from digenrl.scheduling.search import BubbleSearch
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.state import RunOver, State
from digenrl.scheduling.streams import Streams
from digenrl.scheduling.training import Training
from digenrl.scheduling.units import UpdateUnit
from digenrl.scheduling.updates import Updates


class Scheduler:
    """Decides what runs where.

    Attributes:
        searches: how often a trainer with nothing to train was weighed up against waiting (search=True).
    """

    def __init__(
        self,
        shape: RunShape,
        layout: Layout,
        advantages: AdvantageFn,
        *,
        std_scope: StdScope = "group",
        max_attempts: int = 3,
        max_losses: int = 5,
        patience_s: float = 60.0,
        max_failed_share: float = 0.5,
        redraws: int = 0,
        max_bad_updates: int = 3,
        queue_depth: int = 2,
        gap: bool = True,
        costs: CostModel | None = None,
        search: bool = False,
        streaming: bool = False,
        max_open_groups: int = 8,
    ) -> None:
        """Begins with no workers and the adapter of version `shape.start_iteration` on the driver.

        Args:
            shape: how the run's work is cut into units.
            layout: roles and order.
            advantages: turns the rewards of one std scope into advantages.
            std_scope: over which samples the standard deviation is taken.
            max_attempts: failures of one unit that end the run.
            max_losses: workers lost while running one and the same unit that end the run.
            patience_s: a copy that has failed `max_attempts` times ends the run if it goes on failing for this long.
            max_failed_share: share of an iteration's samples that may fail.
            redraws: how often samples of a micro-batch that have failed are drawn again before they count as failed.
            max_bad_updates: optimiser steps that may be skipped for a non-finite gradient.
            queue_depth: units outstanding per lane.
            gap: spread each group over all workers; else one worker generates all of a group.
            costs: seconds of the units, by which the last units go to whoever ends them first. It learns from the
                events; a model of nothing but a guess will do.
            search: a trainer helps only if the iteration is predicted to end earlier; else whenever it can. Needs
                `costs`.
            streaming: train on scored samples before their group is complete, where that gives the same gradient
                (streams.py). Needs `std_scope` group, and statistics from `advantages`.
            max_open_groups: groups that are not complete of which a trainer may hold sums.

        Raises:
            ValueError: `streaming` with another `std_scope`, or `search` without `costs`.
        """
        if streaming and std_scope != "group":
            raise ValueError(f"std_scope={std_scope!r} cannot be combined with streaming; use 'group'")
        if search and costs is None:
            raise ValueError("search=True needs `costs`: it predicts how long units will take")
        self._over = False
        self._state = state = State(
            shape,
            layout,
            queue_depth=queue_depth,
            max_attempts=max_attempts,
            max_losses=max_losses,
            patience_s=patience_s,
        )
        state.foresight = Foresight(costs) if costs is not None else None
        self._search = BubbleSearch(state, state.foresight, std_scope) if search and state.foresight else None
        self.searches = 0
        self._rollouts = Rollouts(state, gap=gap)
        self._scoring = Scoring(state)
        scopes = Scopes(shape, std_scope, advantages)
        streams = Streams(state, enabled=streaming, max_open_groups=max_open_groups)
        self._training = Training(state, streams)
        self._adapters = Adapters(state)
        self._updates = Updates(state, self._adapters, self._training, streams, max_bad_updates=max_bad_updates)
        self._evaluations = Evaluations(state)
        self._pipeline = Pipeline(
            state,
            self._rollouts,
            self._scoring,
            scopes,
            self._training,
            self._updates,
            self._evaluations,
            streams,
            max_failed_share=max_failed_share,
            redraws=redraws,
        )
        self._iterations = Iterations(
            state,
            scopes,
            streams,
            self._training,
            self._updates,
            self._adapters,
            self._evaluations,
            self._pipeline,
        )
        self._iterations.begin()

    def handle(self, event: m.Event, now: float) -> list[m.Command]:
        """Take note of an event and decide what follows.

        Args:
            event: what happened.
            now: seconds on the driver's clock, never decreasing. It only decides for how long something that fails to
                move is tried again.

        Returns:
            Commands in the order in which they are to be carried out. After Finished or FailRun always empty.
        """
        if self._over:
            return []
        self._state.now = now
        self._state.stuck = False
        if self._state.foresight is not None:
            self._state.foresight.observe(event)
        try:
            self._note(event)
            self._fill()
        except RunOver as end:
            self._over = True
            return [m.FailRun(str(end))]
        return self._state.take_commands()

    @property
    def shape(self) -> RunShape:
        """How the run's work is cut into units."""
        return self._state.shape

    def stop_after(self, iteration: int) -> None:
        """Let `iteration` be the last one, or the one in progress if that is later."""
        self._iterations.last = min(self._iterations.last, max(iteration, self._state.version))

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
            case m.UnitFailed():
                self._on_failed(event)
            case m.Transferred():
                self._on_transferred(event)
            case m.TransferFailed():
                self._on_transfer_failed(event)
            case m.VersionInstalled():
                if (worker := self._worker(event.worker)) is not None:
                    self._adapters.installed(worker, event.theta)
            case m.Committed():
                if self._updates.committed(event.theta) and self._updates.finished:
                    self._iterations.all_committed()
            case m.WorkerJoined():
                self._on_joined(event)
            case m.WorkerDraining():
                self._on_draining(event)
            case m.WorkerLost():
                self._on_lost(event)
            case m.Tick():
                self._state.wake_declined()
                if self._state.postponed:
                    self._try_again()

    def _worker(self, name: str) -> Worker | None:
        """A worker that is there; news of others is stale."""
        return self._state.fleet.workers.get(name)

    def _on_finished(self, event: m.UnitFinished) -> None:
        worker = self._worker(event.worker)
        if worker is None:
            return
        expected = self._state.take(event.unit, worker)
        self._state.wake(worker.name)
        if not isinstance(event.unit, UpdateUnit):
            self._pipeline.finished(event, worker, expected=expected)
        elif expected:
            assert isinstance(event.outcome, m.Updated), f"{event.unit.label} ended with {event.outcome}"
            self._updates.stepped(event.outcome)

    def _on_failed(self, event: m.UnitFailed) -> None:
        worker = self._worker(event.worker)
        if worker is None or not self._state.take(event.unit, worker):
            return
        self._state.wake(worker.name)
        self._state.failed(event.unit.label, worker.name, event.reason)
        if isinstance(event.unit, UpdateUnit):
            self._updates.step_failed()
        else:
            self._pipeline.failed(event.unit, worker)

    def _on_transferred(self, event: m.Transferred) -> None:
        if self._worker(event.target) is None:
            return
        match event.ref:
            case m.AccumulatorRef(theta, source):
                self._updates.merged(source, event.target, theta)
            case m.TrajectoryRef():
                self._pipeline.arrived(event.ref, event.target)

    def _on_transfer_failed(self, event: m.TransferFailed) -> None:
        target = self._worker(event.target)
        if target is None:
            return
        match event.ref:
            case m.AccumulatorRef(theta, source):
                self._updates.merge_failed(source, event.target, theta, event.reason)
            case m.AdapterRef(theta):
                self._adapters.failed(target, theta, event.reason)
            case m.TrajectoryRef():
                self._pipeline.copy_failed(event.ref, event.target, event.reason)

    def _on_joined(self, event: m.WorkerJoined) -> None:
        state = self._state
        worker = state.fleet.join(event.worker, event.kind, event.capabilities)
        had_trainers = bool(state.trainers)
        changed = dict.fromkeys(state.assign_roles())
        if state.postponed or not had_trainers:
            self._try_again()
        else:
            state.wake(worker.name)
            # Nothing was waiting for a trainer, and what waits for a device or a cpu lane finds the new one by itself.
            for name in {worker.name: None, **changed}:
                self._adapters.provide(state.fleet.workers[name])

    def _on_draining(self, event: m.WorkerDraining) -> None:
        worker = self._worker(event.worker)
        if worker is not None and not worker.draining:
            self._state.fleet.drain(worker)
            self._state.assign_roles()
            self._pipeline.draining(worker)
            self._try_again()

    def _on_lost(self, event: m.WorkerLost) -> None:
        worker = self._state.leave(event.worker)
        if worker is None:
            return
        self._state.lost_with(worker)
        self._state.assign_roles()
        self._state.ledger.forget(worker.name)
        self._adapters.lost(worker.name)
        self._pipeline.lost(worker.name)
        self._updates.lost(worker.name)
        self._try_again()

    def _try_again(self) -> None:
        """See to everybody's needs afresh, also to what failed to move."""
        self._state.wake_all()
        self._state.postponed.clear()
        self._updates.choose_lead()
        self._adapters.provide_all()
        self._pipeline.tend_all()

    # --- handing out ---

    def _fill(self) -> None:
        """Issue commands until nothing more can be issued."""
        self._updates.advance()
        if self._state.disturbed:
            self._pipeline.tend_all()
        self._iterations.advance()
        if self._iterations.finished:
            self._over = True
            self._state.emit(m.Finished())
            return
        self._scoring.assign()
        self._feed()

    def _feed(self) -> None:
        """Give units to the devices, one at a time to the least loaded, so that a group spreads over all of them."""
        fleet = self._state.fleet
        while self._state.awake:
            waiting = [_turn(fleet.workers[name]) for name in self._state.awake if name in fleet.workers]
            self._state.awake.clear()
            heapify(waiting)
            while waiting:
                worker = fleet.workers[heappop(waiting)[-1]]
                if fleet.has_room(worker) and self._give_unit(worker):
                    heappush(waiting, _turn(worker))

    def _give_unit(self, worker: Worker) -> bool:
        """Dispatch one unit to a device with room. False if there is nothing for it."""
        if worker.draining:
            return self._rollouts.resume(worker)
        kinds = self._state.layout.takes(worker, self._state.stage)
        trains, assists = "train" in kinds, "assist" in worker.roles
        if trains and not assists and self._training.next(worker):
            return True
        # A ready train unit waits for the running unit at most, so nothing else is queued behind another unit.
        spare = not trains or assists or not worker.device
        if worker.rolling is not None:
            # A trajectory goes on where it began, whatever the worker's role has become.
            return spare and self._rollouts.resume(worker)
        if "rollout" in kinds and spare and self._may_begin(worker):
            if self._rollouts.start(worker, urgent=assists):
                return True
            # Nothing is queued behind what runs that would keep the worker from what the update in progress waits for.
            may_train = assists and not (worker.device and self._rollouts.urgent(worker))
            if may_train and self._training.next(worker):
                return True
            # What is needed later is begun by who has nothing else to do, never queued.
            if assists and not worker.device and self._rollouts.start(worker):
                return True
        return "evaluate" in kinds and self._rollouts.evaluate(worker)

    def _may_begin(self, worker: Worker) -> bool:
        """Whether a worker may begin a trajectory: a trainer that helps, only if it is of use."""
        if "rollout" in worker.roles:
            return True
        if self._training.expects(worker):
            return False
        if not self._rollouts.waiting:
            return self._rollouts.ahead and self._updates.drained
        if self._search is None:
            return True
        self.searches += 1
        return self._search.inserts(worker, self._rollouts.waiting)


def _turn(worker: Worker) -> tuple[int, bool, int, str]:
    """Whose turn it is: the least loaded first, among equals those whose role is to roll out, then in join order."""
    return len(worker.device), "rollout" not in worker.roles, worker.order, worker.name
