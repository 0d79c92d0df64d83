"""What the engine tells the rest of the program while it runs.

Listeners are called on the engine's event loop and must return at once: they queue, print or create tasks. The
Prefect observers, the progress display, MLflow and the checkpoints all listen here; the engine knows none of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from digenrl.guard.inspection import Inspection
from digenrl.identity import SampleId
from digenrl.policy import NumberedAdapter
from digenrl.rewards.base import Score, values_by_reward
from digenrl.scheduling.messages import Run
from workers.receipts import Receipt


@dataclass(frozen=True)
class TrainerState:
    """Committed adapter and optimiser state.

    Attributes:
        theta: number of the adapter.
        adapter: float32 tensors by parameter name.
        optimizer: float32 tensors of the optimiser's state.
        adapter_hash: content hash of `adapter`, and of `behaviour` where there is one.
        previous: weights that generated the samples of the version before, if more are still to be generated under
            them. The first ones, theta 0, are left out: every worker makes them itself.
        behaviour: weights that generate samples, if they are not `adapter`.
    """

    theta: int
    adapter: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    adapter_hash: str
    previous: NumberedAdapter | None = None
    behaviour: dict[str, torch.Tensor] | None = None

    @property
    def generator(self) -> NumberedAdapter:
        """What samples are generated with."""
        if self.behaviour is None:
            return NumberedAdapter(self.theta, self.adapter)
        return NumberedAdapter(self.theta, self.behaviour, "behaviour")


@dataclass(frozen=True)
class Dispatched:
    """A unit was handed to a worker.

    Attributes:
        run: the scheduler's command.
        worker_name: name of the worker for people.
        role: what the worker does at the moment (rollout, trainer, ...).
        outcome: resolves to the receipt, or raises what the unit raised; cancelled when the unit is withdrawn.
    """

    run: Run
    worker_name: str
    role: str
    outcome: asyncio.Future[Receipt]


@dataclass(frozen=True)
class IterationReport:
    """One closed iteration.

    Attributes:
        iteration: 0-based.
        seconds: wall time since the previous one closed.
        rewards: reward of every scored sample, in identity order: the weighted sum, before any normalisation.
        scores: every result, failed ones included.
        trained: (sample, step) pairs that entered an update.
        excluded: number of pairs that did not, by reason.
        skipped_updates: optimiser steps without effect because of a non-finite gradient.
        metrics: means over the iteration by name (loss, ratio_mean, clip_fraction, ...).
        busy: share of the wall time each worker computed on its device, by worker name.
        logp_gap: differences between log-probs at training and at rollout, under the same weights: their mean, max,
            floor (what rounding alone was found to do), and the largest of each timestep (`t=3`) and worker.
        staleness: how many versions old -> number of (sample, step) pairs that were trained.
        fingerprints: content hash per micro-batch label, of trajectory and images.
    """

    iteration: int
    seconds: float
    rewards: Sequence[float]
    scores: dict[SampleId, Score]
    trained: int
    excluded: dict[str, int]
    skipped_updates: int
    metrics: dict[str, float]
    busy: dict[str, float]
    logp_gap: dict[str, float] = field(default_factory=dict)
    staleness: dict[int, int] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    @cached_property
    def parts(self) -> dict[str, list[float]]:
        """Values of each reward alone, before weighting, by name."""
        return values_by_reward(self.scores.values())


@dataclass(frozen=True)
class Evaluation:
    """All held-out samples of one version.

    Attributes:
        version: of the weights.
        scores: result per sample; the sample's group is the index of the held-out prompt.
        previews: PNG pictures of the first samples, by prompt index.
        inspection: what the guard asked for.
    """

    version: int
    scores: dict[SampleId, Score]
    previews: dict[int, bytes]
    inspection: Inspection = field(default_factory=Inspection)


class Listener:
    """Hears nothing; override what you need."""

    def dispatched(self, event: Dispatched) -> None:
        """A unit was handed to a worker."""

    def published(self, version: int, state: TrainerState) -> None:
        """Rollouts use `version` from now on."""

    def iteration_closed(self, report: IterationReport) -> None:
        """Everything of an iteration is trained and published."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """An evaluation is complete."""

    def fleet_changed(self, message: str) -> None:
        """A worker joined, left or was lost; one sentence."""


class Listeners(Listener):
    """Passes everything on to several listeners, in order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def dispatched(self, event: Dispatched) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.dispatched(event)

    def published(self, version: int, state: TrainerState) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.published(version, state)

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.iteration_closed(report)

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.evaluated(evaluation)

    def fleet_changed(self, message: str) -> None:
        """See Listener."""
        for listener in self._listeners:
            listener.fleet_changed(message)
