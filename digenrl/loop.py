"""The plain algorithm in one process: FlowGRPO as a loop. Read this first.

    result = train(config)

Every iteration: P prompt groups, G samples of each by T denoising steps; score them; turn rewards into advantages
within the groups; take U optimiser steps, each on whole groups, on K of the T steps of every sample. An orchestrated
run calls the same unit functions, in whatever order and place; its samples and weights are compared with these.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from digenrl import runspec
from digenrl.algorithms.accumulate import Accumulator, NonFiniteGradient
from digenrl.algorithms.optimizer import OptimizerState, adamw_step
from digenrl.config import RunConfig
from digenrl.identity import MicroBatchId, SampleId
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.registry import load_model
from digenrl.policy import Adapter, NumberedAdapter, Policy
from digenrl.prompts import load_prompts
from digenrl.rewards.base import Failed, PromptRecord, Score
from digenrl.rewards.mix import RewardMix
from digenrl.rollout import advance, finish, rollout_hash, start_rollout
from digenrl.scheduling.units import TrainUnit
from digenrl.scoring import score_micro_batch
from digenrl.training import UnitMetrics, train_unit
from digenrl.trajectory import Trajectory


@dataclass(frozen=True)
class UpdateResult:
    """One optimiser step. `skipped` says why a gradient was not used; one without any (0 pairs) is not skipped."""

    theta: int
    metrics: UnitMetrics
    grad_norm: float
    skipped: str | None


@dataclass
class IterationResult:
    """One iteration. Equal hashes mean bit-equal samples; `seconds` are those of rollout, score and train."""

    iteration: int
    scores: dict[SampleId, Score] = field(default_factory=dict)
    hashes: dict[MicroBatchId, str] = field(default_factory=dict)
    updates: list[UpdateResult] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("rollout", "score", "train"), 0.0))


@dataclass
class LoopResult:
    """The run so far: the adapter, its optimiser state, every iteration, and the held-out scores by version."""

    adapter: NumberedAdapter
    optimizer: OptimizerState
    iterations: list[IterationResult] = field(default_factory=list)
    evaluations: dict[int, dict[SampleId, Score]] = field(default_factory=dict)


def train(config: RunConfig, *, on_iteration: Callable[[LoopResult], None] | None = None) -> LoopResult:
    """Run a configuration in this process; where and how work is placed is not looked at.

    Args:
        config: what to run.
        on_iteration: called after the evaluation of version 0 and after every iteration with its evaluation.

    Raises:
        ConfigError, PromptError: something named in the configuration cannot be used.
        RuntimeError: a gate stopped the run.
    """
    run = _Run(config)
    weights = run.policy.initial_adapter()
    result = LoopResult(NumberedAdapter(0, weights), OptimizerState.initial(weights))
    for version in range(config.iterations + 1):
        if version > 0:
            result.iterations.append(run.iterate(result, version - 1))
        if run.shape.evaluated(version):
            result.evaluations[version] = run.evaluate(version, result.adapter)
        if on_iteration:
            on_iteration(result)
    return result


class _Run:
    """What is loaded once, and the steps of an iteration."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.prompts = load_prompts(config.data.prompts)
        self.held_out: Sequence[PromptRecord] = load_prompts(config.data.held_out) if config.data.held_out else ()
        self.shape = runspec.shape(config, len(self.held_out))
        self.reward = RewardMix.of({reward.name: reward.weight for reward in config.rewards})
        self.reward.validate([*self.prompts, *self.held_out])
        model = load_model(config.model, config.cluster.device)
        self.embeddings = EmbeddingCache(model)
        self.policy = Policy(model, config.lora, seed=runspec.adapter_seed(config), device=config.cluster.device)

    def iterate(self, result: LoopResult, iteration: int) -> IterationResult:
        published = result.adapter  # everything in this iteration is generated with it
        done = IterationResult(iteration)
        trajectories: dict[MicroBatchId, Trajectory] = {}
        for micro_batch in self.shape.micro_batches(iteration):
            started = time.perf_counter()
            trajectory, images = self.roll_out(micro_batch, iteration, published)
            done.seconds["rollout"] += time.perf_counter() - started
            started = time.perf_counter()
            done.scores |= self.score(trajectory, images)
            done.seconds["score"] += time.perf_counter() - started
            done.hashes[micro_batch] = rollout_hash(trajectory, images)
            trajectories[micro_batch] = trajectory
        self._check_failures(done)
        started = time.perf_counter()
        first = self.shape.theta_of_version(iteration) + 1
        for theta in range(first, first + self.shape.updates):
            done.updates.append(self.update(result, theta, published, trajectories, done.scores))
            self._check_updates([*result.iterations, done])
        done.seconds["train"] = time.perf_counter() - started
        return done

    def evaluate(self, version: int, adapter: NumberedAdapter) -> dict[SampleId, Score]:
        scores: dict[SampleId, Score] = {}
        for micro_batch in self.shape.eval_micro_batches(version):
            scores |= self.score(*self.roll_out(micro_batch, version, adapter))
        return scores

    def roll_out(
        self, micro_batch: MicroBatchId, version: int, adapter: NumberedAdapter
    ) -> tuple[Trajectory, NDArray[np.uint8]]:
        spec = runspec.rollout_spec(self.config, self.shape, self.policy.model, micro_batch, version)
        embeddings = self.embeddings.encode([prompt.text for prompt in self.prompts_of(micro_batch)])
        self.policy.bind(adapter.weights, adapter.theta)
        state = start_rollout(self.policy, spec)
        return finish(self.policy, spec, advance(self.policy, spec, state, embeddings, 0, spec.num_steps))

    def score(self, trajectory: Trajectory, images: NDArray[np.uint8]) -> dict[SampleId, Score]:
        return score_micro_batch(self.reward, trajectory, images, self.prompts_of(trajectory.micro_batch))

    def update(
        self,
        result: LoopResult,
        theta: int,
        published: NumberedAdapter,
        trajectories: Mapping[MicroBatchId, Trajectory],
        scores: Mapping[SampleId, Score],
    ) -> UpdateResult:
        """The optimiser step that makes `theta`; the result's adapter and optimiser state are replaced."""
        try:
            gradient, metrics = self.gradient(result.adapter, theta, published, trajectories, scores)
        except NonFiniteGradient as error:
            result.adapter = NumberedAdapter(theta, result.adapter.weights)
            return UpdateResult(theta, UnitMetrics(), float("nan"), skipped=str(error))
        if not metrics.pairs:  # a step on a zero gradient would still decay the weights and move by momentum
            result.adapter = NumberedAdapter(theta, result.adapter.weights)
            return UpdateResult(theta, metrics, 0.0, skipped=None)
        iteration, _ = self.shape.groups_of_update(theta)
        learning_rate = runspec.learning_rate(self.config, iteration)
        step = adamw_step(result.adapter.weights, gradient, result.optimizer, self.config.optimizer, learning_rate)
        result.adapter, result.optimizer = NumberedAdapter(theta, step.weights), step.state
        skipped = f"the norm of the gradient is {step.grad_norm}" if step.skipped else None
        return UpdateResult(theta, metrics, step.grad_norm, skipped)

    def gradient(
        self,
        current: NumberedAdapter,
        theta: int,
        published: NumberedAdapter,
        trajectories: Mapping[MicroBatchId, Trajectory],
        scores: Mapping[SampleId, Score],
    ) -> tuple[Adapter, UnitMetrics]:
        """Gradient of the step that makes `theta`, over its whole groups in order."""
        iteration, groups = self.shape.groups_of_update(theta)
        scope = range(self.shape.groups) if self.config.algorithm.std_scope == "iteration" else groups
        advantages = runspec.advantages_of(self.config, runspec.group_rewards(iteration, scope, scores)).values
        accumulator: Accumulator[TrainUnit] = Accumulator(current.weights)
        metrics = UnitMetrics()
        for micro_batch in (m for m in trajectories if self.shape.group_of(m) in groups):
            embeddings = self.embeddings.encode([prompt.text for prompt in self.prompts_of(micro_batch)])
            for unit in self.shape.train_units(micro_batch):
                contribution = train_unit(
                    self.policy,
                    trajectories[micro_batch],
                    embeddings,
                    unit.steps,
                    advantages,
                    current=current,
                    old=published,
                    algorithm=self.config.algorithm,
                    guidance_scale=self.config.model.guidance_scale,
                    normaliser=runspec.normaliser(self.config),
                )
                accumulator.add(unit, contribution.gradient)
                metrics += contribution.metrics
        return accumulator.gradient(), metrics

    def prompts_of(self, micro_batch: MicroBatchId) -> list[PromptRecord]:
        return runspec.prompts_of(self.shape, micro_batch, self.prompts, self.held_out)

    def _check_failures(self, done: IterationResult) -> None:
        failed = [score for score in done.scores.values() if isinstance(score, Failed)]
        allowed = self.config.gates.max_failed_share
        if len(failed) > allowed * len(done.scores):
            raise RuntimeError(
                f"iteration {done.iteration}: {len(failed)} of {len(done.scores)} samples have no reward, more than "
                f"gates.max_failed_share={allowed}; the first: {failed[0].reason}"
            )

    def _check_updates(self, iterations: Sequence[IterationResult]) -> None:
        skipped = [u for iteration in iterations for u in iteration.updates if u.skipped]
        if len(skipped) > self.config.gates.max_bad_updates:
            raise RuntimeError(
                f"{len(skipped)} updates were skipped, more than gates.max_bad_updates="
                f"{self.config.gates.max_bad_updates}; the last, theta {skipped[-1].theta}: {skipped[-1].skipped}"
            )
