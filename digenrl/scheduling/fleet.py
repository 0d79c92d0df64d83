"""Who is there, what each worker may do, and which units it has been given.

    Worker     one incarnation: capabilities, role, the units outstanding on its two lanes
    Fleet      workers in join order; gives units to lanes and takes them back
    LoadIndex  workers with room on the cpu lane, by load: the least loaded in constant time

The scheduler's picture of a lane is the set of units it has sent there and not heard of since. A lane is a priority
queue on the worker, so which of them runs is the worker's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from digenrl.identity import MicroBatchId
from digenrl.scheduling.messages import Capability
from digenrl.scheduling.policies import Role
from digenrl.scheduling.units import Unit


@dataclass(slots=True, eq=False)
class Worker:
    """One incarnation.

    Attributes:
        name: the incarnation.
        kind: its type.
        capabilities: what it is able to do.
        order: place in the order of joining.
        draining: it will leave; it gets nothing new.
        roles: what the layout wants it to do.
        device: units outstanding on the device lane, in order of dispatch.
        cpu: units outstanding on the cpu lane. A score unit waiting for its trajectory to arrive counts.
        rolling: the trajectory it has begun and whose later units are not all dispatched.
        until: when the device is predicted to have done what is on it.
    """

    name: str
    kind: str
    capabilities: frozenset[Capability]
    order: int
    draining: bool = False
    roles: frozenset[Role] = frozenset()
    device: dict[Unit, None] = field(default_factory=dict)
    cpu: dict[Unit, None] = field(default_factory=dict)
    rolling: MicroBatchId | None = None
    until: float = 0.0

    @property
    def trains(self) -> bool:
        """Whether it may be given train units: as its role, or to assist."""
        return "train" in self.roles or "assist" in self.roles

    @property
    def load(self) -> int:
        """Units outstanding on both lanes."""
        return len(self.device) + len(self.cpu)

    def lane(self, unit: Unit) -> dict[Unit, None]:
        """The lane a unit belongs to."""
        return self.device if unit.lane == "device" else self.cpu


class LoadIndex:
    """Workers by load. Loads are small integers, so each load has a bucket; a bucket keeps order of arrival."""

    def __init__(self) -> None:
        self._buckets: list[dict[str, None]] = []
        self._load: dict[str, int] = {}

    def place(self, name: str, load: int) -> None:
        """Insert a worker, or move it."""
        if self._load.get(name) == load:
            return
        self.remove(name)
        while len(self._buckets) <= load:
            self._buckets.append({})
        self._buckets[load][name] = None
        self._load[name] = load

    def remove(self, name: str) -> None:
        """Take a worker out; nothing happens if it is not in."""
        load = self._load.pop(name, None)
        if load is not None:
            del self._buckets[load][name]

    def __iter__(self) -> Iterator[str]:
        """Names, least loaded first."""
        return chain.from_iterable(self._buckets)

    def least(self) -> dict[str, None]:
        """The workers that share the smallest load; empty if there are none."""
        return next((bucket for bucket in self._buckets if bucket), {})


class Fleet:
    """Workers by name, in join order.

    Attributes:
        workers: those that are there.
        scorers: those with room on their cpu lane, by load.
        rollers: those whose role it is to roll out.
        idle_rollers: of these, those with nothing on their device.
        trainers: those whose role it is to train.
        idle_trainers: those who train or assist and have nothing on their device, by kind, the longest idle first.
        kinds: how many there are of each type.
    """

    def __init__(self, queue_depth: int) -> None:
        """`queue_depth`: units a lane may have outstanding, so that it goes on while the scheduler thinks."""
        self.queue_depth = queue_depth
        self.workers: dict[str, Worker] = {}
        self.scorers = LoadIndex()
        self.rollers: set[str] = set()
        self.idle_rollers: set[str] = set()
        self.trainers: set[str] = set()
        self.idle_trainers: dict[str, dict[str, None]] = {}
        self.kinds: Counter[str] = Counter()
        self._joined = 0

    def join(self, name: str, kind: str, capabilities: frozenset[Capability]) -> Worker:
        """Add a worker."""
        assert name not in self.workers, f"worker {name} joined twice"
        worker = Worker(name, kind, capabilities, self._joined)
        self._joined += 1
        self.workers[name] = worker
        self.kinds[kind] += 1
        self.idle_trainers.setdefault(kind, {})
        self._index(worker)
        return worker

    def leave(self, name: str) -> Worker | None:
        """Remove a worker. Returns it, or None if it is not known (any more)."""
        self.scorers.remove(name)
        for names in (self.rollers, self.idle_rollers, self.trainers):
            names.discard(name)
        worker = self.workers.pop(name, None)
        if worker is not None:
            self.kinds[worker.kind] -= 1
            self.idle_trainers[worker.kind].pop(name, None)
        return worker

    def assign(self, roles: dict[str, frozenset[Role]]) -> list[str]:
        """Give every worker its roles. Returns whose roles are others than before."""
        changed = [name for name, worker in self.workers.items() if worker.roles != roles[name]]
        for name in changed:
            self.workers[name].roles = roles[name]
        self.rollers = {name for name, worker in self.workers.items() if "rollout" in worker.roles}
        self.idle_rollers = {name for name in self.rollers if not self.workers[name].device}
        self.trainers = {name for name, worker in self.workers.items() if "train" in worker.roles}
        for kind in self.idle_trainers:
            self.idle_trainers[kind] = {
                name: None for name, w in self.workers.items() if w.kind == kind and w.trains and not w.device
            }
        return changed

    def drain(self, worker: Worker) -> None:
        """Mark a worker as leaving."""
        worker.draining = True
        self._index(worker)

    def give(self, unit: Unit, worker: Worker) -> None:
        """Count a unit on its lane."""
        lane = worker.lane(unit)
        assert unit not in lane, f"{unit.label} is already on {worker.name}"
        assert len(lane) < self.queue_depth, f"the {unit.lane} lane of {worker.name} is full"
        lane[unit] = None
        self._index(worker)

    def take(self, unit: Unit, worker: Worker) -> bool:
        """Take a unit off its lane. False if it is not there: the news is stale."""
        lane = worker.lane(unit)
        if unit not in lane:
            return False
        del lane[unit]
        self._index(worker)
        return True

    def has_room(self, worker: Worker) -> bool:
        """Whether the device lane takes another unit."""
        return len(worker.device) < self.queue_depth

    def alive(self, name: str | None) -> bool:
        """Whether a worker of this name is there."""
        return name in self.workers

    def staying(self, capability: Capability) -> list[Worker]:
        """Workers with a capability that are not leaving, in join order."""
        return [w for w in self.workers.values() if capability in w.capabilities and not w.draining]

    def _index(self, worker: Worker) -> None:
        if worker.device:
            self.idle_rollers.discard(worker.name)
            self.idle_trainers[worker.kind].pop(worker.name, None)
        else:
            if worker.name in self.rollers:
                self.idle_rollers.add(worker.name)
            if worker.trains:
                self.idle_trainers[worker.kind][worker.name] = None
        if "score" not in worker.capabilities:
            return
        if worker.draining or len(worker.cpu) >= self.queue_depth:
            self.scorers.remove(worker.name)
        else:
            self.scorers.place(worker.name, worker.load)
