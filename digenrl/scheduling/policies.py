"""Layouts: which worker plays which role, and what it may take now.

    Layout          the protocol
    Disaggregated   a fixed number of trainers, the others roll out
    Digenrl         the same, and a trainer with nothing to train helps to roll out
    Colocated       everybody rolls out; when all is rolled out, everybody trains; evaluation comes last

A layout is pure and remembers nothing: what it needs to know of the past (who is a trainer already) it reads from the
workers' present roles.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from digenrl.scheduling.fleet import Worker

#: `assist`: takes train units when there is nothing to roll out.
Role = Literal["rollout", "train", "assist"]

#: What a worker may take, apart from going on with what it has begun.
Kind = Literal["train", "rollout", "evaluate"]

#: Where an iteration is: trajectories are being generated for the first time; all are there; all updates are committed.
Stage = Literal["generate", "train", "publish"]


class Layout(Protocol):
    """Decides roles and order. Everything else is the same for every layout."""

    def roles(self, workers: Collection[Worker]) -> dict[str, frozenset[Role]]:
        """Roles of all workers, which come in join order. Asked whenever one joins, drains or is lost."""

    def takes(self, worker: Worker, stage: Stage) -> frozenset[Kind]:
        """Kinds of unit a worker may be given in this stage. Train units go first, evaluation last."""


@dataclass(frozen=True)
class Disaggregated:
    """The first `trainers` workers that can train do; the others roll out.

    A lost trainer is replaced by the first rollout worker that can train, except that the last rollout worker is taken
    only if there is no trainer at all. With nobody left to roll out, trainers do that too, between train units.
    A worker that can train but not roll out is a trainer in any case.
    """

    trainers: int

    def roles(self, workers: Collection[Worker]) -> dict[str, frozenset[Role]]:
        """See Layout."""
        staying = [w for w in workers if not w.draining]
        trainers = {
            w.name
            for w in staying
            if "train" in w.capabilities and ("train" in w.roles or "rollout" not in w.capabilities)
        }
        rollers = [w.name for w in staying if "rollout" in w.capabilities and w.name not in trainers]
        for worker in staying:
            if len(trainers) >= self.trainers or (trainers and len(rollers) < 2):
                break
            if "train" in worker.capabilities and worker.name not in trainers:
                trainers.add(worker.name)
                rollers.remove(worker.name)
        roles: dict[str, frozenset[Role]] = {w.name: frozenset() for w in workers}
        for worker in staying:
            if worker.name in trainers:
                helps = not rollers and "rollout" in worker.capabilities
                roles[worker.name] = frozenset({"train", "rollout"} if helps else {"train"})
            elif "rollout" in worker.capabilities:
                roles[worker.name] = frozenset({"rollout"})
        return roles

    def takes(self, worker: Worker, stage: Stage) -> frozenset[Kind]:
        """See Layout."""
        return _takes(worker.roles, "rollout" in worker.capabilities, helps=False)


@dataclass(frozen=True)
class Digenrl(Disaggregated):
    """Disaggregated with trainer-assisted generation (TAG), and its counterpart.

    A trainer takes rollout units while it has nothing to train and returns as soon as it has: a ready train unit waits
    for the unit that runs there at most, because nothing but train units is ever queued behind another unit. It holds
    the version's adapter in any case, so helping copies nothing. Whoever helps keeps its role and its accumulator.

    A worker that rolls out and can train takes train units while nothing is to be rolled out for the update in
    progress. So all share the tail of an update.
    """

    def roles(self, workers: Collection[Worker]) -> dict[str, frozenset[Role]]:
        """See Layout."""
        able = {worker.name for worker in workers if "train" in worker.capabilities}
        found = super().roles(workers)
        return {
            name: roles | {"assist"} if roles == {"rollout"} and name in able else roles
            for name, roles in found.items()
        }

    def takes(self, worker: Worker, stage: Stage) -> frozenset[Kind]:
        """See Layout."""
        return _takes(worker.roles, "rollout" in worker.capabilities, helps=True)


@cache
def _takes(roles: frozenset[Role], can_roll: bool, helps: bool) -> frozenset[Kind]:
    kinds: set[Kind] = {"train"} if "train" in roles or "assist" in roles else set()
    if "rollout" in roles or (helps and can_roll):
        kinds.add("rollout")
    if can_roll:
        kinds.add("evaluate")
    return frozenset(kinds)


@dataclass(frozen=True)
class Colocated:
    """All workers roll out, barrier, all workers train, barrier, and only then is the version evaluated.

    A trajectory lost after the first barrier is generated again beside the training.
    """

    def roles(self, workers: Collection[Worker]) -> dict[str, frozenset[Role]]:
        """See Layout."""
        able: dict[str, frozenset[Role]] = {}
        for worker in workers:
            both: tuple[Role, ...] = ("rollout", "train")
            able[worker.name] = frozenset(r for r in both if r in worker.capabilities and not worker.draining)
        return able

    def takes(self, worker: Worker, stage: Stage) -> frozenset[Kind]:
        """See Layout."""
        kinds: set[Kind] = set()
        if stage == "train" and "train" in worker.roles:
            kinds.add("train")
        if stage != "publish" and "rollout" in worker.roles:
            kinds.add("rollout")
        if stage == "publish" and "rollout" in worker.roles:
            kinds.add("evaluate")
        return frozenset(kinds)
