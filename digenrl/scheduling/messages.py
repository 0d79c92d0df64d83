"""Events the state machine is told, and commands it answers with.

Both are frozen values and contain everything the state needs: no side channels. A recorded event sequence replays to
the same commands.

`worker` is always an incarnation: a uuid made when a worker process starts. A worker that restarts is another worker.
`theta` numbers the adapters: theta 0 is the run's start, each optimiser step adds one. `version` numbers what rollout
uses and advances once an iteration: version v is theta v * updates_per_iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from digenrl.identity import MicroBatchId, SampleId
from digenrl.rewards.base import Score
from digenrl.scheduling.units import TrainUnit, Unit

if TYPE_CHECKING:
    from digenrl.algorithms.advantages import Advantage, GroupStatistics

Capability = Literal["rollout", "train", "score"]


# --- things that live on workers and are moved or dropped ---


@dataclass(frozen=True, order=True, slots=True)
class TrajectoryRef:
    """A finished rollout: trajectory and decoded images of one micro-batch."""

    micro_batch: MicroBatchId


@dataclass(frozen=True, order=True, slots=True)
class AccumulatorRef:
    """The gradient contributions to the step that makes `theta`, as accumulated by `worker`."""

    theta: int
    worker: str


@dataclass(frozen=True, order=True, slots=True)
class AdapterRef:
    """The adapter weights numbered `theta`."""

    theta: int


Ref = TrajectoryRef | AccumulatorRef | AdapterRef


# --- outcomes ---


@dataclass(frozen=True, slots=True)
class RolloutDone:
    """Steps of a rollout finished; the state stays on the worker."""


@dataclass(frozen=True, slots=True)
class ScoresDone:
    """Result per sample of a scored micro-batch."""

    scores: dict[SampleId, Score]


@dataclass(frozen=True, slots=True)
class Trained:
    """A contribution was added to the worker's accumulator.

    Attributes:
        contributions: the units whose gradient the accumulator now holds because of this unit (itself).
        excluded: (sample, step) pairs left out on the worker, with the reason (e.g. a non-finite loss).
        streamed: its group was not complete, which takes a second backward pass.
    """

    contributions: tuple[TrainUnit, ...]
    excluded: dict[tuple[SampleId, int], str] = field(default_factory=dict)
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Updated:
    """The optimiser step was taken, or skipped because the gradient was not finite (weights unchanged)."""

    theta: int
    skipped: bool = False


Outcome = RolloutDone | ScoresDone | Trained | Updated


# --- events ---


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker is ready for units. `kind` is its type (GPU model, "cpu"); rates are kept per kind."""

    worker: str
    kind: str
    capabilities: frozenset[Capability]


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """The worker will leave: give it no new work, let it finish and hand over what it holds."""

    worker: str


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The process is gone, and all it held."""

    worker: str


@dataclass(frozen=True, slots=True)
class UnitFinished:
    """A unit ran to its end in `seconds` of worker time.

    `gap_s` is how long its lane stood still before, if it waited there for the unit before it to end.
    """

    unit: Unit
    worker: str
    seconds: float
    outcome: Outcome
    gap_s: float | None = None


@dataclass(frozen=True, slots=True)
class UnitFailed:
    """A unit raised. `reason` is the worker's message."""

    unit: Unit
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class VersionInstalled:
    """The worker holds adapter `theta`, hash-checked. Bringing it there took `seconds`, None if not measured."""

    worker: str
    theta: int
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Transferred:
    """`ref` now also lives on `target` (an accumulator: was merged whole into the target's).

    `seconds` is how long a trajectory took to arrive, None if that was not measured.
    """

    ref: Ref
    target: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The copy did not arrive, e.g. because the source died. The target holds nothing of it."""

    ref: Ref
    target: str
    reason: str


@dataclass(frozen=True, slots=True)
class Committed:
    """Adapter and optimiser state of `theta` exist on a standby trainer or in durable storage."""

    theta: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. Lets deadlines act."""


Event = (
    WorkerJoined
    | WorkerDraining
    | WorkerLost
    | UnitFinished
    | UnitFailed
    | VersionInstalled
    | Transferred
    | TransferFailed
    | Committed
    | Tick
)


# --- commands ---


@dataclass(frozen=True, slots=True)
class Run:
    """Run `unit` on `worker`.

    Attributes:
        theta: the adapter a rollout uses, or the one a train unit differentiates.
        priority: higher runs first among the units queued on one lane.
        advantages: train units: the advantage of each sample that takes part; samples not named are left out.
        rewards: train units of a group that is not complete, instead of advantages: the reward of each sample that
            takes part. The gradient goes into the group's own sums.
        baseline: what is subtracted from these rewards; the same for all units of an update.
        closings: train and update units: groups to fold into the update's gradient before the unit runs, with their
            statistics; None: drop their sums. An update unit names all that were open, and maybe others.
        old_theta: train units: adapter that generated the samples. Equal to `theta` means ratio identically 1.
        depends_on: units of the same worker that must end first (they are queued before this one).
    """

    unit: Unit
    worker: str
    theta: int
    priority: int
    advantages: dict[SampleId, Advantage] = field(default_factory=dict)
    old_theta: int | None = None
    depends_on: tuple[Unit, ...] = ()
    rewards: dict[SampleId, float] = field(default_factory=dict)
    baseline: float = 0.0
    closings: dict[int, GroupStatistics | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cancel:
    """Withdraw a queued unit. If it already runs it ends and its outcome is dropped."""

    unit: Unit
    worker: str


@dataclass(frozen=True, slots=True)
class Install:
    """Bring adapter `theta` to `worker` from `source` (None: from the driver's committed copy).

    `with_optimizer` also brings the optimiser state: the worker becomes lead or standby.
    """

    theta: int
    worker: str
    source: str | None
    with_optimizer: bool = False


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy `ref` from `source` to `target`, peer to peer."""

    ref: Ref
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Reduce:
    """Merge the accumulators of `sources` for the step that makes `theta` into the lead's own.

    Answered by one Transferred(AccumulatorRef) or TransferFailed per source. `contributions` is, per source, what its
    accumulator must hold; a different set is refused whole. `closings` are groups to be folded on arrival, as in Run.
    """

    theta: int
    lead: str
    sources: tuple[str, ...]
    contributions: dict[str, frozenset[TrainUnit]]
    closings: dict[int, GroupStatistics | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Commit:
    """Copy adapter and optimiser state `theta` from `lead` to `standby` (None: to the driver); Committed answers."""

    theta: int
    lead: str
    standby: str | None


@dataclass(frozen=True, slots=True)
class Publish:
    """`version` (= adapter `theta`) is committed and is what rollouts use from now on."""

    version: int
    theta: int
    lead: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget `ref` on `worker`."""

    ref: Ref
    worker: str


@dataclass(frozen=True, slots=True)
class CloseIteration:
    """Everything of `iteration` is trained, committed and published.

    Attributes:
        trained: (sample, step) pairs that entered an update.
        excluded: pairs that did not, with the reason.
        skipped_updates: optimiser steps skipped for a non-finite gradient.
    """

    iteration: int
    trained: int
    excluded: dict[tuple[SampleId, int], str]
    skipped_updates: int


@dataclass(frozen=True, slots=True)
class FailRun:
    """The run cannot go on; `reason` is a sentence for the person."""

    reason: str


@dataclass(frozen=True, slots=True)
class EvaluationDone:
    """All evaluation micro-batches of `version` are scored."""

    version: int
    scores: dict[SampleId, Score]


@dataclass(frozen=True, slots=True)
class Finished:
    """No work is left."""


Command = (
    Run
    | Cancel
    | Install
    | Transfer
    | Reduce
    | Commit
    | Publish
    | Drop
    | CloseIteration
    | EvaluationDone
    | FailRun
    | Finished
)
