"""Where a subject is to run: the fleet, what its kinds cost, and what its memory allows.

place_of(subject, members, profile) -> Place
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from digenrl.config.errors import ConfigError
from digenrl.scheduling.bound import EVERYTHING, NEEDS, Pool
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.messages import Capability
from flows.plan.costs import costs_of, for_fleet
from flows.plan.fleet import Member
from flows.plan.memory import GIB, USABLE, Need, need_of
from flows.plan.subject import Subject


@dataclass(frozen=True)
class Place:
    """A fleet that is ready to be planned with.

    Attributes:
        subject: what was asked for, `timestep_batch: auto` settled.
        model: costs of its kinds.
        pools: workers by kind.
        source: where the costs are from.
        need: memory of one worker, None if it cannot be estimated.
        notes: what memory does not allow.
    """

    subject: Subject
    model: CostModel
    pools: tuple[Pool, ...]
    source: str
    need: Need | None
    notes: tuple[str, ...]


def place_of(subject: Subject, members: Sequence[Member] | None, profile: Path | None) -> Place:
    """The fleet file's workers, or as many as configured of the kind whose costs are known best.

    Raises:
        ConfigError: costs are not known, or the fleet cannot do everything.
    """
    known, need = costs_of(subject, profile), need_of(subject)
    if subject.config.schedule.timestep_batch == "auto" and known.timestep_batch is not None:
        batch = min(known.timestep_batch, subject.shape.timestep_batch)
        subject = replace(subject, shape=replace(subject.shape, timestep_batch=batch))
    model = known.model
    if members is None:
        members = [Member(kind=model.kinds[0], count=subject.config.cluster.workers)]
    else:
        model = for_fleet(known, members)
    pools, notes = [], []
    for member in members:
        refused = _refused(member, need, subject.shape.timestep_batch)
        notes += refused.values()
        able = EVERYTHING & frozenset(member.capabilities) - refused.keys()
        pools.append(Pool(member.kind, member.count, able, member.price_per_hour))
    for capability in dict.fromkeys(NEEDS.values()):
        if not any(capability in pool.capabilities for pool in pools):
            reason = f": {'; '.join(notes)}" if notes else ""
            raise ConfigError(f"the fleet has no worker with the capability {capability}{reason}")
    return Place(subject, model, tuple(pools), known.source, need, tuple(notes))


def _refused(member: Member, need: Need | None, timestep_batch: int) -> dict[Capability, str]:
    """Capabilities that a kind's memory does not allow, with the reason."""
    memory = member.memory_gib * GIB if member.memory_gib is not None else need.has if need is not None else None
    if need is None or memory is None:
        return {}
    refused: dict[Capability, str] = {}
    has = f"{member.kind} has {memory / GIB:.3g} GiB, of which {USABLE:.0%} can be planned with"
    if need.to_roll_out > USABLE * memory:
        refused["rollout"] = f"memory: {has}; rolling out needs {need.to_roll_out / GIB:.3g} GiB"
    most = need.most_timesteps(memory)
    if most < timestep_batch:
        wanted = f"training {timestep_batch} timesteps at once needs {need.train(timestep_batch) / GIB:.3g} GiB"
        way = f"; {most} would fit: schedule.timestep_batch={most}" if most else ""
        refused["train"] = f"memory: {has}; {wanted}{way}"
    return refused
