"""Opens and closes Prefect task runs as the engine hands out units.

A detailed iteration has a page of its own (a subflow) on which every unit is one task run with its edges. Elsewhere a
task run stands for a micro-batch or for the whole iteration; an evaluation is one task run. Showing never changes what
is computed: this is a listener, and what Prefect does not take is counted and missing on its page.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar
from uuid import UUID

from prefect import State, tags

from digenrl.config import ObserveConfig
from digenrl.identity import MicroBatchId
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from tasks.kinds import OBSERVERS
from tasks.metered import Metered
from tasks.pages import Page
from workers.listener import Dispatched, Evaluation, IterationReport, Listener

logger = logging.getLogger(__name__)

#: Share of the run's time up to which `detail: auto` shows micro-batches; detailed iterations count.
BUDGET = 0.02

#: How long the end of a run may wait for Prefect here: while it takes nothing, and in all if nobody is in a hurry.
CLOSE_S, PATIENT_S = 6.0, 30.0

T = TypeVar("T")
Outcome = asyncio.Future[object]


class Observers(Listener):
    """Task runs of one flow run. Create it inside the flow."""

    def __init__(self, config: ObserveConfig, shape: RunShape) -> None:
        """Args: what to show, and the run's shape."""
        self._config = config
        self._shape = shape
        self._states: dict[Unit, asyncio.Task[State[None] | None]] = {}
        self._lanes: dict[tuple[str, str], Outcome] = {}
        self._open: dict[str, tuple[asyncio.Future[None], Counter[str]]] = {}
        self._pages: dict[int, Page] = {}
        self._subflows: list[UUID] = []
        self._running: set[asyncio.Task[Any]] = set()
        self._iteration_s = 0.0
        self._cost_s = 0.0
        self._started = time.monotonic()
        self._lost = 0
        self.emitted = 0

    # --- what the engine says ---

    def dispatched(self, event: Dispatched) -> None:
        """See Listener."""
        unit = event.run.unit
        lane = (event.run.worker, unit.lane)
        before = self._lanes.get(lane)
        self._lanes[lane] = event.outcome
        if not isinstance(unit, UpdateUnit) and unit.micro_batch.phase == "eval":
            self._open_group("evaluate", f"evaluate v{unit.micro_batch.iteration}")
            return
        iteration = self._iteration_of(unit)
        detail = self._detail(iteration)
        if detail == "unit":
            page = self._page(iteration)
            labels = [event.role, event.worker_name, self._version_label(event), f"iteration {iteration}"]
            observing = self._observe(event.role, unit.label, event.outcome, labels, page, self._upstream(unit), before)
            self._states[unit] = self._spawn(observing)
        elif isinstance(unit, RolloutUnit):
            kind = "micro-batch" if detail == "microbatch" else "iteration"
            label = unit.micro_batch.label if detail == "microbatch" else f"iteration {iteration}"
            self._open_group(kind, label)
        if detail == "microbatch" and isinstance(unit, TrainUnit):
            event.outcome.add_done_callback(lambda done: self._trained(unit, done))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        self._end_group(f"evaluate v{evaluation.version}")

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self._iteration_s = report.seconds
        names = (f"i{report.iteration} ", f"iteration {report.iteration} ")
        for label in [label for label in self._open if f"{label} ".startswith(names)]:
            self._end_group(label)
        self._states = {unit: state for unit, state in self._states.items() if self._recent(unit, report.iteration)}
        page = self._pages.pop(report.iteration, None)
        if page is not None:
            self._spawn(self._close_page(page))

    async def close(self, *, patient: bool = False) -> None:
        """Cancel every open task run, end every page and wait until Prefect was told.

        Args:
            patient: wait for `PATIENT_S`, as long as Prefect takes one after the other; else for `CLOSE_S`.
        """
        for outcome, _ in self._open.values():
            outcome.cancel()
        self._open.clear()
        for page in self._pages.values():
            self._spawn(self._close_page(page))
        self._pages.clear()
        deadline = time.monotonic() + (PATIENT_S if patient else CLOSE_S)
        while self._running and (left_s := deadline - time.monotonic()) > 0:
            wait_s = min(left_s, CLOSE_S)
            taken, _ = await asyncio.wait(self._running, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if not taken:
                break
        for task in self._running:
            self._lost += 1
            task.cancel()
        if self._lost:
            logger.warning("Prefect did not take %d task runs of this run; they are missing on its page", self._lost)

    @property
    def flow_runs(self) -> list[UUID]:
        """Ids of the subflow runs that were made."""
        return list(self._subflows)

    @property
    def share(self) -> float:
        """Share of the time since the start that this process spent on observing (its CPU time per wall time)."""
        return self._cost_s / max(time.monotonic() - self._started, 1e-9)

    # --- which detail ---

    def _iteration_of(self, unit: Unit) -> int:
        match unit:
            case UpdateUnit():
                return (unit.theta - 1) // self._shape.updates
            case RolloutUnit() | ScoreUnit() | TrainUnit():
                return unit.micro_batch.iteration

    def _recent(self, unit: Unit, iteration: int) -> bool:
        return self._iteration_of(unit) > iteration

    def _detail(self, iteration: int) -> str:
        if self._shape.detailed(iteration):
            return "unit"
        if self._config.detail != "auto":
            return self._config.detail
        per_run_s = self._cost_s / self.emitted if self.emitted else 0.0
        runs = len(self._shape.micro_batches(iteration))
        affordable = self.share <= BUDGET and runs * per_run_s <= BUDGET * self._iteration_s
        return "microbatch" if affordable else "iteration"

    # --- edges ---

    def _upstream(self, unit: Unit) -> list[Unit]:
        match unit:
            case RolloutUnit():
                earlier = [u for u in self._shape.rollout_units(unit.micro_batch) if u.last == unit.first]
                return list(earlier)
            case ScoreUnit():
                return [self._shape.rollout_units(unit.micro_batch)[-1]]
            case TrainUnit():
                return [ScoreUnit(m) for m in self._group_mates(unit.micro_batch)]
            case UpdateUnit():
                iteration, groups = self._shape.groups_of_update(unit.theta)
                members = [m for m in self._shape.micro_batches(iteration) if self._shape.group_of(m) in groups]
                return [u for m in members for u in self._shape.train_units(m)]

    def _group_mates(self, micro_batch: MicroBatchId) -> list[MicroBatchId]:
        group = self._shape.group_of(micro_batch)
        mates = self._shape.micro_batches(micro_batch.iteration)
        # Of a micro-batch that was drawn again in part, itself instead of the first draw.
        return [micro_batch if m.index == micro_batch.index else m for m in mates if self._shape.group_of(m) == group]

    # --- task runs ---

    def _page(self, iteration: int) -> Page:
        if iteration not in self._pages:
            self._pages[iteration] = Page(f"iteration {iteration}")
            self.emitted += 1  # the subflow's node in the training run is a task run too
        return self._pages[iteration]

    async def _close_page(self, page: Page) -> None:
        try:
            await page.close()
        except BaseException:  # a cancellation too: what Prefect did not take is not waited for
            self.emitted -= 1
            raise
        if page.flow_run_id is not None:
            self._subflows.append(page.flow_run_id)

    async def _observe(
        self,
        kind: str,
        label: str,
        outcome: Outcome,
        labels: Sequence[str] = (),
        page: Page | None = None,
        upstream: Sequence[Unit] = (),
        before: Outcome | None = None,
    ) -> State[None] | None:
        # Looked up now: Prefect may be so late that the iteration is closed, and forgotten, before all have ended.
        observed = [self._states[unit] for unit in upstream if unit in self._states]
        # A queued unit starts when the one before it on its lane ends: open the task run then, not when it was queued.
        if before is not None:
            await asyncio.wait([before])
        states = [await state for state in observed]
        if outcome.cancelled():
            return None
        # An attempt that failed was replaced by another; Prefect would never start what waits for it.
        done = [state for state in states if state is not None and state.is_completed()]
        work = self._task_run(kind, label, outcome, labels, done)
        return await (work if page is None else page.put(work))

    async def _task_run(
        self, kind: str, label: str, outcome: Outcome, labels: Sequence[str], wait_for: Sequence[State[None]]
    ) -> State[None] | None:
        with tags(*labels):
            run = Metered(OBSERVERS[kind](label, outcome, return_state=True, wait_for=wait_for))
            self.emitted += 1
            try:
                state: State[None] = await run
            except BaseException:  # as above
                self.emitted -= 1
                raise
        self._cost_s += run.seconds
        return state

    def _version_label(self, event: Dispatched) -> str:
        return f"version {event.run.theta // self._shape.updates}"

    def _open_group(self, kind: str, label: str) -> None:
        """One task run that stands for many units. It has no tags: Prefect asks its server about limits of each."""
        if label in self._open:
            return
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._open[label] = (outcome, Counter())
        self._spawn(self._observe(kind, label, outcome))

    def _trained(self, unit: TrainUnit, done: Outcome) -> None:
        label = unit.micro_batch.label
        if label not in self._open or done.cancelled() or done.exception() is not None:
            return
        counts = self._open[label][1]
        counts["trained"] += 1
        if counts["trained"] == len(self._shape.train_units(unit.micro_batch)):
            self._end_group(label)

    def _end_group(self, label: str) -> None:
        opened = self._open.pop(label, None)
        if opened is not None and not opened[0].done():
            opened[0].set_result(None)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T | None]:
        task = asyncio.create_task(self._unless_lost(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _unless_lost(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What Prefect makes of `work`; None if it fails at that, which is no reason to end a run."""
        try:
            return await work
        except Exception as error:
            self._lost += 1
            if self._lost == 1:
                logger.info("Prefect does not take a task run (said once): %s: %s", type(error).__name__, error)
            return None
