"""What a RunConfig means in units, seeds and numbers: the one place where loop and workers read it.

    shape              how the run is cut into units, every `auto` resolved
    geometry           size of the samples
    adapter_seed       seed of the initial adapter
    redraws_of         how often failed samples are drawn again
    normaliser         nominal (sample, step) pairs of one optimiser step
    rollout_spec       the rollout of one micro-batch, for training or evaluation
    prompts_of         the prompt of every sample of a micro-batch
    texts_of           the texts that a run encodes
    group_scores       scores by group, failed samples left out
    advantages_of      advantages of the samples that take part in training
    advantage_rule     the same in the form the scheduler asks for
    behaviour_after    weights that generate samples after an optimiser step, where they are not the trained ones
    learning_rate      of an iteration
    layout_of          roles and order
    scheduler_of       the state machine that drives the run

Nothing here depends on where or when work runs: equal configurations give equal answers in every process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from digenrl.algorithms.advantages import AdvantageRule, Advantages, group_advantages
from digenrl.algorithms.base import Steps
from digenrl.algorithms.mixing import Term, mixed_advantages, summed_advantages
from digenrl.algorithms.nft import old_policy_update
from digenrl.algorithms.optimizer import learning_rate as schedule_learning_rate
from digenrl.algorithms.registry import algorithm_of
from digenrl.algorithms.split import split_advantages
from digenrl.config import RunConfig
from digenrl.config.algorithm import GrpoSection
from digenrl.identity import MicroBatchId, SampleId, seed_of
from digenrl.models.base import FlowModel, Geometry
from digenrl.policy import Adapter
from digenrl.prompts import prompts_of_iteration
from digenrl.rewards.base import PromptRecord, Score, Scored
from digenrl.rollout import RolloutSpec
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.policies import Colocated, Digenrl, Disaggregated, Layout
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.scopes import AdvantageFn, Verdict
from digenrl.scheduling.shape import RunShape

#: Texts of a run up to which `model.text_encoders: auto` encodes them all at the start.
MOST_TEXTS = 2048


def shape(config: RunConfig, num_held_out: int, start_iteration: int = 0) -> RunShape:
    """The shape of a run.

    Args:
        config: the run's configuration.
        num_held_out: held-out prompts there are; an evaluation takes the first `evaluation.prompts` of them.
        start_iteration: first iteration to run, > 0 on resume.
    """
    algorithm, evaluation, iterations = config.algorithm, config.evaluation, config.iterations
    rules = algorithm_of(algorithm)

    def steps_of(iteration: int) -> tuple[int, ...]:
        return rules.steps(config.seed, iteration).trained

    def total_steps(iteration: int) -> int:
        return rules.total_steps(config.seed, iteration)

    def detailed(iteration: int) -> bool:
        observe = config.schedule.observe
        return observe.detail == "unit" or iteration == 0 or (observe.every > 0 and iteration % observe.every == 0)

    def evaluated(version: int) -> bool:
        every = evaluation.every
        return every > 0 and (version % every == 0 or version == iterations)

    return RunShape(
        run_seed=config.seed,
        eval_seed=evaluation.seed,
        start_iteration=start_iteration,
        iterations=iterations,
        groups=algorithm.prompts_per_iteration,
        group_size=algorithm.samples_per_prompt,
        micro_batch=config.micro_batch,
        num_steps=algorithm.num_steps,
        updates=algorithm.updates_per_iteration,
        timestep_batch=_timestep_batch(config),
        trained_steps=steps_of,
        detailed=detailed,
        eval_prompts=min(evaluation.prompts, num_held_out) if evaluation.every > 0 else 0,
        eval_micro_batch=evaluation.micro_batch,
        eval_num_steps=evaluation.num_steps,
        evaluated=evaluated,
        steps_per_unit=None if config.schedule.steps_per_unit == "auto" else config.schedule.steps_per_unit,
        stale_groups=config.stale_groups,
        total_steps=total_steps,
    )


def trained_step_count(config: RunConfig) -> int:
    """K, trained timesteps of each sample."""
    return algorithm_of(config.algorithm).num_trained


def _timestep_batch(config: RunConfig) -> int:
    size = config.schedule.timestep_batch
    return trained_step_count(config) if size == "auto" else min(size, trained_step_count(config))


def geometry(config: RunConfig) -> Geometry:
    """Size of the samples."""
    return Geometry(config.model.height, config.model.width, config.model.frames)


def adapter_seed(config: RunConfig) -> int:
    """Seed of the initial adapter."""
    return seed_of("run", config.seed, "adapter")


def redraws_of(config: RunConfig) -> int:
    """How often samples without a reward are drawn again before they are left out."""
    return config.gates.max_redraws if config.gates.on_failed == "redraw" else 0


def normaliser(config: RunConfig) -> int:
    """groups * G * K of one optimiser step: what its loss is divided by, whatever failed."""
    algorithm = config.algorithm
    groups = algorithm.prompts_per_iteration // algorithm.updates_per_iteration
    return groups * algorithm.samples_per_prompt * trained_step_count(config)


def rollout_spec(
    config: RunConfig, run_shape: RunShape, model: FlowModel, micro_batch: MicroBatchId, version: int
) -> RolloutSpec:
    """The rollout of a micro-batch under weights `version`. Evaluations take nothing but Euler steps."""
    rules, size = algorithm_of(config.algorithm), geometry(config)
    evaluates = micro_batch.phase == "eval"
    if evaluates:
        sigmas, steps = model.sigmas(run_shape.eval_num_steps, size), Steps((), ())
    else:
        own = rules.sigmas(config.seed, micro_batch.iteration)
        sigmas = model.sigmas(run_shape.num_steps, size) if own is None else own
        steps = rules.steps(config.seed, micro_batch.iteration)
    return RolloutSpec(
        micro_batch=micro_batch,
        samples=run_shape.samples(micro_batch),
        version=version,
        sigmas=sigmas,
        stochastic=steps.stochastic,
        steps=steps.trained,
        sampler=rules.sampler,
        noise_level=rules.noise_level,
        guidance_scale=config.model.guidance_scale,
        geometry=size,
        multistep_from=steps.multistep_from,
        keep_clean=rules.forward and not evaluates,
        same_noise=not evaluates and isinstance(config.algorithm, GrpoSection) and config.algorithm.init_same_noise,
    )


def prompts_of(
    run_shape: RunShape, micro_batch: MicroBatchId, prompts: Sequence[PromptRecord], held_out: Sequence[PromptRecord]
) -> list[PromptRecord]:
    """The prompt of each of the B samples of a micro-batch.

    Args:
        run_shape: the run's shape.
        micro_batch: of training or evaluation.
        prompts: all training prompts.
        held_out: all held-out prompts.
    """
    samples = run_shape.samples(micro_batch)
    if micro_batch.phase == "eval":
        return [held_out[sample.group] for sample in samples]
    drawn = prompts_of_iteration(prompts, run_shape.run_seed, micro_batch.iteration, run_shape.groups)
    return [drawn[sample.group] for sample in samples]


def texts_of(
    config: RunConfig, run_shape: RunShape, prompts: Sequence[PromptRecord], held_out: Sequence[PromptRecord]
) -> tuple[str, ...]:
    """Every text that the run will encode, each once, from its first iteration on.

    Empty where text encoders are to stay: they are told to, or are free to and there are more than `MOST_TEXTS`.
    """
    if config.model.text_encoders == "keep":
        return ()
    found = dict.fromkeys(prompt.text for prompt in held_out[: run_shape.eval_prompts])
    seen: set[str] = set()
    for iteration in range(run_shape.start_iteration, run_shape.iterations):
        drawn = prompts_of_iteration(prompts, run_shape.run_seed, iteration, run_shape.groups)
        found |= dict.fromkeys(prompt.text for prompt in drawn)
        seen |= {prompt.uid for prompt in drawn}
        if config.model.text_encoders == "auto" and len(found) > MOST_TEXTS:
            return ()
        if len(seen) == len(prompts):
            break
    return tuple(found)


def group_scores(
    iteration: int, groups: Sequence[int], scores: Mapping[SampleId, Score]
) -> list[dict[SampleId, Scored]]:
    """Scores of some groups of an iteration, per group; samples whose reward failed are left out."""
    of_group: dict[int, dict[SampleId, Scored]] = {group: {} for group in groups}
    for sample, score in scores.items():
        if sample.iteration == iteration and sample.group in of_group and isinstance(score, Scored):
            of_group[sample.group][sample] = score
    return [of_group[group] for group in groups]


def advantages_of(config: RunConfig, groups: Sequence[Mapping[SampleId, Scored]]) -> Advantages[SampleId]:
    """Advantages by the run's rule. With scope `update` or `iteration`, give exactly the groups of that scope.

    Groups of zero variance have no policy gradient. Their samples stay, with advantage 0, only if something else of the
    loss does not vanish with it: a KL term, or all of it on the forward process, where 0 is neither good nor bad.
    """
    found = _mixed(config, groups)
    if config.algorithm.kl_beta > 0 or algorithm_of(config.algorithm).forward:
        return found
    silent = {sample for position in found.zero_variance for sample in groups[position]}
    told = {s: a for s, a in found.split.items() if s not in silent}
    return replace(found, values={s: a for s, a in found.values.items() if s not in silent}, split=told)


def _mixed(config: RunConfig, groups: Sequence[Mapping[SampleId, Scored]]) -> Advantages[SampleId]:
    rule, aggregation = _rule(config), config.algorithm.reward_aggregation
    if aggregation == "rewards" and all(reward.normalise == "none" for reward in config.rewards):
        return group_advantages([{sample: score.value for sample, score in group.items()} for group in groups], rule)
    terms = [Term(reward.called, reward.weight, reward.normalise) for reward in config.rewards]
    parts = [{sample: score.parts for sample, score in group.items()} for group in groups]
    if aggregation == "rewards":
        return summed_advantages(parts, terms, rule)
    found = mixed_advantages(parts, terms, rule)
    if aggregation == "losses":
        apart = split_advantages(parts, terms, rule)
        found = replace(found, split={sample: apart[sample] for sample in found.values})
    return found


def _rule(config: RunConfig) -> AdvantageRule:
    algorithm = config.algorithm
    return AdvantageRule(
        std_scope=algorithm.std_scope,
        ddof=algorithm.std_ddof,
        eps=algorithm.std_eps,
        trimmed_ratio=algorithm.trimmed_ratio,
        best_of_n=algorithm.best_of_n,
        adv_clip_max=algorithm.adv_clip_max,
        zero_variance_tolerance=algorithm.zero_variance_tolerance,
    )


def advantage_rule(config: RunConfig) -> AdvantageFn:
    """`advantages_of` in the form the scheduler asks for: who takes part, who does not and why."""

    def judge(groups: Sequence[Mapping[SampleId, Scored]]) -> Verdict:
        found = advantages_of(config, groups)
        excluded = {
            sample: "not among the best and worst" if sample in found.middling else "zero variance"
            for group in groups
            for sample in group
            if sample not in found.values
        }
        return Verdict(found.told, excluded, found.statistics)

    return judge


def behaviour_after(config: RunConfig, theta: int, old: Adapter, current: Adapter) -> Adapter | None:
    """Weights that generate samples when `theta` is published, where they are not the adapter `theta` itself.

    Within an iteration they stay as they are; they follow the adapter at its end.

    Args:
        config: the run's configuration.
        theta: the optimiser step that was taken, skipped ones included.
        old: the weights that generated samples before it.
        current: the adapter it made.

    Returns:
        None: nothing but adapters generates samples, or from here on it is `current`.
    """
    rules = algorithm_of(config.algorithm)
    if not rules.lags:
        return None
    if theta % config.algorithm.updates_per_iteration:
        return old
    decay = rules.decay_after(theta)
    return old_policy_update(old, current, decay) if decay > 0 else None


def learning_rate(config: RunConfig, iteration: int) -> float:
    """Learning rate of the optimiser steps of one iteration."""
    return schedule_learning_rate(config.optimizer, config.iterations, iteration)


def layout_of(config: RunConfig) -> Layout:
    """Roles and order of the workers."""
    if config.schedule.layout == "colocated":
        return Colocated()
    return (Disaggregated if config.schedule.assist == "off" else Digenrl)(config.cluster.trainers)


def scheduler_of(config: RunConfig, run_shape: RunShape, costs: CostModel | None = None) -> Scheduler:
    """The scheduler of a run, fresh. Whatever drives it, `config` alone decides what it does.

    Args:
        config: the run's configuration.
        run_shape: what `shape` made of it.
        costs: seconds of its units. Without them, trainer_assist=search helps as greedy does.
    """
    schedule = config.schedule
    return Scheduler(
        run_shape,
        layout_of(config),
        advantage_rule(config),
        std_scope=config.algorithm.closing_scope,
        max_failed_share=config.gates.max_failed_share,
        redraws=redraws_of(config),
        max_bad_updates=config.gates.max_bad_updates,
        gap=schedule.gap,
        costs=costs,
        search=schedule.assist == "search" and costs is not None,
        streaming=schedule.streams,
        max_open_groups=schedule.max_open_groups,
    )
