"""What one worker holds of a run, and the units it runs on it.

Thread use: the device lane and the cpu lane each run one unit at a time; loads, stores and drops come from threads of
the event loop. They touch different entries by construction of the schedule: nothing is dropped while a unit needs it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from digenrl import runspec
from digenrl.algorithms.accumulate import NonFiniteGradient
from digenrl.algorithms.optimizer import adamw_step
from digenrl.algorithms.registry import algorithm_of
from digenrl.algorithms.streaming import Closings, UpdateAccumulator, UpdateState
from digenrl.config import RunConfig
from digenrl.contributions import Contribution, StreamedContribution
from digenrl.gates import ScheduleGate
from digenrl.guard.inspection import Inspector
from digenrl.identity import MicroBatchId
from digenrl.models.base import Embeddings
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.registry import load_model
from digenrl.policy import Policy
from digenrl.rewards.base import PromptRecord
from digenrl.rewards.mix import RewardMix
from digenrl.rollout import RolloutState, advance, finish, rollout_hash, start_rollout
from digenrl.scheduling.messages import (
    AccumulatorRef,
    AdapterRef,
    Outcome,
    Ref,
    RolloutDone,
    Run,
    ScoresDone,
    Trained,
    TrajectoryRef,
    Updated,
)
from digenrl.scheduling.units import RolloutUnit, ScoreUnit, TrainUnit, Unit, UpdateUnit
from digenrl.scoring import score_micro_batch
from digenrl.training import replay_floor, stream_unit, train_unit
from workers.forgetting import Forgetting
from workers.held import (
    FinishedRollout,
    HeldRef,
    Tensors,
    TrainerStateRef,
    pack_rollout,
    unpack_rollout,
)
from workers.previews import previews
from workers.receipts import Assignment, Drops, Receipt, RunSetup
from workers.weights import Weights

logger = logging.getLogger(__name__)


class Replica:
    """The state of one run on one worker.

    Args:
        setup: the run.
        incarnation: of this worker process.
        policy: from `load_policy` with the same configuration, if that has been called already.
    """

    def __init__(self, setup: RunSetup, incarnation: str, policy: Policy | None = None) -> None:
        self.setup = setup
        self.incarnation = incarnation
        self.config = setup.config
        self.shape = runspec.shape(setup.config, setup.held_out, setup.start_iteration)
        self.policy = policy or load_policy(setup.config)
        self.reward = RewardMix.of(setup.config.rewards).load()
        self._inspector = Inspector(setup.config)
        self._embeddings = EmbeddingCache(self.policy.model)
        if setup.texts and self.policy.model.frees_text_encoders:
            self._embeddings.prepare(setup.texts)
        self._weights = Weights(setup.config, self.policy)
        self._rollouts: dict[MicroBatchId, RolloutState] = {}
        self._finished: dict[MicroBatchId, FinishedRollout] = {}
        self._accumulators: dict[int, UpdateAccumulator[TrainUnit]] = {}
        self._receipts: dict[tuple[Unit, int], Receipt] = {}
        self._dropping = threading.Lock()
        self._forgetting = Forgetting()
        self._schedule = ScheduleGate(setup.config, self.shape, self.policy.model)
        self._rounding_known = False

    @property
    def kind(self) -> str:
        """Type of the device."""
        return device_kind(self.config)

    # --- units ---

    def run(self, assignment: Assignment) -> Receipt:
        """Run a unit, or return the receipt it left when it ran here before."""
        self.drop(assignment.drops)
        run = assignment.run
        known = self._receipts.get((run.unit, run.theta))
        if known is not None:
            return known
        started_at, began = time.time(), time.perf_counter()
        match run.unit:
            case RolloutUnit():
                receipt = self._rollout(run.unit, run, assignment.prompts)
            case ScoreUnit():
                receipt = self._score(run.unit, assignment.prompts)
            case TrainUnit():
                receipt = self._probed(self._train(run.unit, assignment), run.unit, assignment)
            case UpdateUnit():
                assert assignment.learning_rate is not None
                receipt = self._update(run.unit, run, assignment.learning_rate)
        receipt = replace(receipt, started_at=started_at, seconds=time.perf_counter() - began)
        with self._dropping:
            if not self._forgetting.voids(assignment):
                self._receipts[(run.unit, run.theta)] = receipt
        return receipt

    def _rollout(self, unit: RolloutUnit, run: Run, prompts: tuple[PromptRecord, ...]) -> Receipt:
        version = run.theta // self.shape.updates
        spec = runspec.rollout_spec(self.config, self.shape, self.policy.model, unit.micro_batch, version)
        find = self._weights.evaluated if unit.micro_batch.phase == "eval" else self._weights.behaviour
        adapter = find(run.theta)
        self.policy.bind(adapter.weights, adapter.tag)
        state = start_rollout(self.policy, spec) if unit.first == 0 else self._rollouts[unit.micro_batch]
        state = advance(self.policy, spec, state, self._encode(prompts), unit.first, unit.last)
        if unit.last < spec.num_steps:
            self._rollouts[unit.micro_batch] = state
            return _receipt(RolloutDone())
        trajectory, images = finish(self.policy, spec, state)
        self._rollouts.pop(unit.micro_batch, None)
        self._finished[unit.micro_batch] = FinishedRollout(trajectory, images)
        return replace(_receipt(RolloutDone()), fingerprint=rollout_hash(trajectory, images))

    def _score(self, unit: ScoreUnit, prompts: tuple[PromptRecord, ...]) -> Receipt:
        done = self._finished[unit.micro_batch]
        scores = score_micro_batch(self.reward, done.trajectory, done.images, prompts)
        receipt = _receipt(ScoresDone(scores))
        if unit.micro_batch.phase == "eval":
            receipt = replace(receipt, previews=previews(done.trajectory.samples, done.images))
        return replace(receipt, inspection=self._inspector(done.trajectory, done.images, prompts))

    def _train(self, unit: TrainUnit, assignment: Assignment) -> Receipt:
        run = assignment.run
        assert run.old_theta is not None
        self._schedule.check(self._finished[unit.micro_batch].trajectory)
        self._accumulator(run.theta + 1).close(run.closings)
        if run.rewards:
            return self._stream(unit, assignment)
        try:
            contribution = self._contribution(unit, run, run.old_theta, assignment.prompts)
        except NonFiniteGradient as error:
            logger.warning("%s: %s; the update will be skipped", unit.label, error)
            self._add(assignment, lambda accumulator: accumulator.spoil(unit))
            return _receipt(Trained((unit,)))
        self._add(assignment, lambda accumulator: accumulator.add(unit, contribution.gradient))
        return replace(_receipt(Trained((unit,))), training=contribution.metrics)

    def _probed(self, receipt: Receipt, unit: TrainUnit, assignment: Assignment) -> Receipt:
        """Of the first unit trained here: with what rounding alone does to its log-probs, which the gate looks at."""
        if self._rounding_known or not receipt.training.pairs:
            return receipt
        run = assignment.run
        assert run.old_theta is not None
        self._rounding_known = True
        floor = replay_floor(
            self.policy,
            self._finished[unit.micro_batch].trajectory,
            self._encode(assignment.prompts),
            unit.steps,
            run.rewards or run.advantages,
            old=self._weights.behaviour(run.old_theta),
            algorithm=self.config.algorithm,
            guidance_scale=self.config.model.guidance_scale,
        )
        if floor is None:
            return receipt
        return replace(receipt, training=replace(receipt.training, logp_floor_max=floor, probed=1))

    def _stream(self, unit: TrainUnit, assignment: Assignment) -> Receipt:
        """Train before the group is complete: its advantages are put in when it is."""
        run, group = assignment.run, self.shape.group_of(unit.micro_batch)
        try:
            contribution = self._streamed(unit, run, assignment.prompts)
        except NonFiniteGradient as error:
            logger.warning("%s: %s; the update will be skipped if its group takes part", unit.label, error)
            final = self.config.algorithm.kl_beta > 0 or algorithm_of(self.config.algorithm).forward
            self._add(assignment, lambda accumulator: accumulator.spoil_open(group, unit, run.baseline, final=final))
            return _receipt(Trained((unit,), streamed=True))
        gradient = contribution.gradient
        assert gradient is not None
        self._add(assignment, lambda accumulator: accumulator.add_open(group, unit, gradient))
        return replace(_receipt(Trained((unit,), streamed=True)), training=contribution.metrics)

    def _add(self, assignment: Assignment, add: Callable[[UpdateAccumulator[TrainUnit]], None]) -> None:
        """Add to the accumulator the unit was sent for, unless that was dropped meanwhile."""
        with self._dropping:
            if not self._forgetting.voids(assignment):
                add(self._accumulator(assignment.run.theta + 1))

    def _streamed(self, unit: TrainUnit, run: Run, prompts: tuple[PromptRecord, ...]) -> StreamedContribution:
        return stream_unit(
            self.policy,
            self._finished[unit.micro_batch].trajectory,
            self._encode(prompts),
            unit.steps,
            run.rewards,
            baseline=run.baseline,
            current=self._weights.trained(run.theta),
            algorithm=self.config.algorithm,
            guidance_scale=self.config.model.guidance_scale,
            normaliser=runspec.normaliser(self.config),
            old=self._weights.behaviour(run.theta),
        )

    def _contribution(
        self, unit: TrainUnit, run: Run, old_theta: int, prompts: tuple[PromptRecord, ...]
    ) -> Contribution:
        return train_unit(
            self.policy,
            self._finished[unit.micro_batch].trajectory,
            self._encode(prompts),
            unit.steps,
            run.advantages,
            current=self._weights.trained(run.theta),
            old=self._weights.behaviour(old_theta),
            algorithm=self.config.algorithm,
            guidance_scale=self.config.model.guidance_scale,
            normaliser=runspec.normaliser(self.config),
            staleness=self.shape.staleness(unit.micro_batch),
        )

    def _update(self, unit: UpdateUnit, run: Run, learning_rate: float) -> Receipt:
        adapter, optimizer = self._weights.trained(unit.theta - 1).weights, self._weights.optimizer(unit.theta - 1)
        accumulator = self._accumulator(unit.theta)
        accumulator.close(run.closings)
        if not accumulator.effective:
            # Every sample of the update is excluded. A step on a zero gradient would still decay the weights.
            fingerprint = self._weights.advance(unit.theta, adapter, optimizer)
            return replace(_receipt(Updated(unit.theta, skipped=True)), grad_norm=0.0, fingerprint=fingerprint)
        result = adamw_step(adapter, accumulator.gradient(), optimizer, self.config.optimizer, learning_rate)
        fingerprint = self._weights.advance(unit.theta, result.weights, result.state)
        outcome = Updated(unit.theta, skipped=result.skipped)
        return replace(_receipt(outcome), grad_norm=result.grad_norm, fingerprint=fingerprint)

    def _encode(self, prompts: tuple[PromptRecord, ...]) -> Embeddings:
        return self._embeddings.encode([prompt.text for prompt in prompts])

    def _accumulator(self, theta: int) -> UpdateAccumulator[TrainUnit]:
        if theta not in self._accumulators:
            self._accumulators[theta] = UpdateAccumulator(self.policy.trainable())
        return self._accumulators[theta]

    # --- what travels ---

    def initialise(self) -> str:
        """Make theta 0 with a fresh optimiser; returns its content hash."""
        return self._weights.begin(self.policy.initial_adapter())

    def holds(self, ref: HeldRef) -> bool:
        """Whether `load` would succeed."""
        match ref:
            case TrajectoryRef():
                return ref.micro_batch in self._finished
            case AccumulatorRef():
                return ref.theta in self._accumulators
            case AdapterRef() | TrainerStateRef():
                return self._weights.holds(ref)

    def load(self, ref: HeldRef) -> tuple[Any, Tensors]:
        """Description and tensors of `ref`, to be sent elsewhere.

        Raises:
            KeyError: it is not here.
        """
        match ref:
            case TrajectoryRef():
                return pack_rollout(self._finished[ref.micro_batch])
            case AccumulatorRef():
                return self._accumulators[ref.theta].state()
            case AdapterRef() | TrainerStateRef():
                return None, self._weights.load(ref)

    def store(self, ref: HeldRef, meta: Any, tensors: Tensors, expected_hash: str) -> None:
        """Keep what arrived.

        Raises:
            ValueError: an adapter is not this policy's, or its hash is not `expected_hash`; nothing is kept.
        """
        match ref:
            case TrajectoryRef():
                self._finished[ref.micro_batch] = unpack_rollout(meta, tensors)
            case AccumulatorRef():
                raise TypeError("accumulators are merged, not stored")
            case AdapterRef() | TrainerStateRef():
                self._weights.store(ref, tensors, expected_hash)

    def merge(
        self,
        theta: int,
        state: UpdateState[TrainUnit],
        tensors: Tensors,
        expected: frozenset[TrainUnit],
        closings: Closings,
    ) -> None:
        """Add another worker's accumulator to this one's, whole or not at all, its closed groups folded.

        Raises:
            ValueError: it does not hold exactly `expected`.
        """
        other = UpdateAccumulator.from_state(state, tensors, device=self.policy.device)
        other.close(closings)
        self._accumulator(theta).merge(other, expected)

    def drop(self, drops: Drops) -> None:
        """Forget things and the receipts of the units that made them."""
        with self._dropping:
            for ref in self._forgetting.new(drops):
                self._drop(ref)

    def _drop(self, ref: Ref) -> None:
        match ref:
            case TrajectoryRef():
                self._rollouts.pop(ref.micro_batch, None)
                self._finished.pop(ref.micro_batch, None)
                self._forget(lambda unit, ref=ref: getattr(unit, "micro_batch", None) == ref.micro_batch)
            case AccumulatorRef():
                self._accumulators.pop(ref.theta, None)
                self._forget(lambda unit, ref=ref: self._makes(unit) == ref.theta)
            case AdapterRef():
                self._weights.drop(ref.theta)

    def _forget(self, matches: Callable[[Unit], bool]) -> None:
        for key in [key for key in self._receipts if matches(key[0])]:
            del self._receipts[key]

    def _makes(self, unit: Unit) -> int | None:
        """The theta a train or update unit works towards."""
        match unit:
            case TrainUnit():
                group = self.shape.group_of(unit.micro_batch)
                return self.shape.update_of_group(unit.micro_batch.iteration, group)
            case UpdateUnit():
                return unit.theta
        return None


def load_policy(config: RunConfig) -> Policy:
    """The model of a run with its LoRA layers, on the run's device."""
    device = config.cluster.device
    model = load_model(config.model, device)
    return Policy(model, config.adapter, seed=runspec.adapter_seed(config), device=device)


def device_kind(config: RunConfig) -> str:
    """Type of the device of this process."""
    return torch.cuda.get_device_name() if config.cluster.device == "cuda" else "cpu"


def _receipt(outcome: Outcome) -> Receipt:
    return Receipt(outcome, started_at=0.0, seconds=0.0)
