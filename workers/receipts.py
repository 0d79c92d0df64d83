"""Small frozen records between the engine and the workers.

RunSetup    engine -> worker, once: what a replica is built from
Assignment  engine -> worker, per unit
Receipt     worker -> engine, per unit: what happened, and nothing large
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from digenrl.config import RunConfig
from digenrl.contributions import UnitMetrics
from digenrl.guard.inspection import Inspection
from digenrl.rewards.base import PromptRecord
from digenrl.scheduling.messages import Capability, Outcome, Ref, Run

if TYPE_CHECKING:
    from workers.process import Hosted


@dataclass(frozen=True)
class RunSetup:
    """What every worker needs to know of a run.

    Attributes:
        epoch: uuid of this attempt at the run; a unit of another epoch is refused.
        config: the resolved configuration.
        held_out: number of evaluation prompts.
        start_iteration: first iteration of this attempt.
        texts: that the run will encode; empty: not known, and encoders are kept.
        replica: (setup, incarnation) -> what runs the units on a worker; None: `workers.replica.Replica`.
    """

    epoch: str
    config: RunConfig
    held_out: int
    start_iteration: int = 0
    texts: tuple[str, ...] = ()
    replica: Callable[[RunSetup, str], Hosted] | None = None


@dataclass(frozen=True)
class Readiness:
    """A worker's answer once its replica is built."""

    incarnation: str
    kind: str
    capabilities: frozenset[Capability]
    load_s: float


#: References to forget, numbered per worker in the order the scheduler dropped them.
Drops = tuple[tuple[int, Ref], ...]


@dataclass(frozen=True)
class Assignment:
    """One unit for one worker.

    Attributes:
        epoch: the attempt at the run it belongs to.
        run: the scheduler's command.
        prompts: one record per sample of the unit's micro-batch (empty for updates).
        learning_rate: for update units.
        drops: what the worker must forget first; it ignores what it has forgotten already.
        sent_after: number of the last drop, of any worker, that was issued before this unit.
    """

    epoch: str
    run: Run
    prompts: tuple[PromptRecord, ...] = ()
    learning_rate: float | None = None
    drops: Drops = ()
    sent_after: int = 0


@dataclass(frozen=True)
class Receipt:
    """What a unit did.

    Attributes:
        outcome: for the scheduler.
        started_at: Unix time in seconds at which the unit began on the worker.
        seconds: how long it ran.
        training: train units only: sums over (sample, step) pairs.
        grad_norm: update units only: norm of the gradient before clipping.
        fingerprint: content hash of what was made (trajectory and images, or adapter), empty if nothing was.
        previews: evaluation only: small PNG pictures by prompt index.
        inspection: score units only: what the guard asks for.
    """

    outcome: Outcome
    started_at: float
    seconds: float
    training: UnitMetrics = field(default_factory=UnitMetrics)
    grad_norm: float | None = None
    fingerprint: str = ""
    previews: dict[int, bytes] = field(default_factory=dict)
    inspection: Inspection = field(default_factory=Inspection)
