"""Who is free when, and who finishes first: what a cost model says of the present state.

The rule that follows from it: a worker leaves the units at the head of the line to those who would have ended them
before it ended one. So the last micro-batches of a group go to whoever finishes them first, a slow worker works on what
is needed later, and begins nothing at the end that it would be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from digenrl.identity import MicroBatchId
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.free_times import FreeTimes
from digenrl.scheduling.messages import Event, TrajectoryRef, Transfer, WorkerJoined
from digenrl.scheduling.units import RolloutUnit, TrainUnit, Unit


class Foresight:
    """Predictions from a cost model that learns from the events."""

    def __init__(self, costs: CostModel) -> None:
        """`costs` learns from every event it is shown here."""
        self.costs = costs
        shape = costs.shape
        self._kinds: set[str] = set()
        self._free = FreeTimes()
        self._trajectory = RolloutUnit(MicroBatchId("train", shape.start_iteration, 0), 0, shape.num_steps)

    def observe(self, event: Event) -> None:
        """Learn from an event."""
        if isinstance(event, WorkerJoined):
            self._kinds.add(event.kind)
        self.costs.observe(event)

    def given(self, unit: Unit, worker: Worker, now: float) -> None:
        """A device was given a unit."""
        worker.until = max(now, worker.until) + self.unit_s(unit, worker.kind)
        self._free.note(worker)

    def ended(self, worker: Worker, now: float) -> None:
        """A device ended a unit and begins the next one it has, if any."""
        worker.until = now + sum(self.unit_s(unit, worker.kind) for unit in worker.device)
        self._free.note(worker)

    def assigned(self, worker: Worker) -> None:
        """A worker has other roles than before."""
        self._free.note(worker)

    def left(self, name: str) -> None:
        """A worker is gone."""
        self._free.forget(name)

    def free_at(self, worker: Worker, now: float) -> float:
        """When the device has done what it has been given; `now` if it is idle or late."""
        return max(now, worker.until) if worker.device else now

    def rollout_s(self, kind: str) -> float:
        """A whole trajectory of a micro-batch."""
        return self.costs.seconds(self._trajectory, kind)

    def unit_s(self, unit: Unit, kind: str) -> float:
        """One unit."""
        return self.costs.seconds(unit, kind)

    def transfer_s(self, worker: Worker) -> float:
        """Bringing a trajectory to a worker."""
        return self.costs.move_s(Transfer(TrajectoryRef(self._trajectory.micro_batch), "", worker.name))

    def outrun(
        self,
        worker: Worker,
        unit: TrainUnit | None,
        now: float,
        *,
        others: Callable[[Worker], bool],
        without: Iterable[Worker],
        most: int,
    ) -> int:
        """How many units the others would have ended before this worker ended one more.

        Args:
            worker: who is asked.
            unit: such a unit; None: a whole trajectory.
            now: the driver's clock.
            others: who else takes such units; must depend on its kind, roles and capabilities only.
            without: workers of whom that is true, but who take none now. None twice, and not `worker`.
            most: counting stops there.
        """
        seconds: dict[str, float] = {}

        def needs(kind: str) -> float:
            if kind not in seconds:
                seconds[kind] = self.unit_s(unit or self._trajectory, kind)
            return seconds[kind]

        end = self.free_at(worker, now) + needs(worker.kind)
        if now + min(map(needs, self._kinds)) >= end:
            return 0
        return self._free.ended_before(end, now, needs, others, (worker, *without), most)
