"""Train units of every algorithm on the tiny model: replay, cutting into units, streaming."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.algorithms.advantages import AdvantageRule, group_advantages
from digenrl.algorithms.registry import algorithm_of
from digenrl.algorithms.streaming import UpdateAccumulator
from digenrl.config import AlgorithmConfig
from digenrl.contributions import Contribution
from digenrl.identity import SampleId
from digenrl.policy import Adapter, NumberedAdapter, Policy
from digenrl.training import stream_unit, train_unit
from digenrl.trajectory import Trajectory
from tiny_policy import PROMPT, algorithm, moved, roll_out, rollout_spec, tiny_policy

#: Bounds wide enough that an adapter which moved a little has pairs on both sides of them.
ALGORITHMS = [
    pytest.param(algorithm(clip_range=1e-3), id="flow_grpo"),
    pytest.param(algorithm(sampler="cps", clip_range=1e-4), id="cps"),
    pytest.param(algorithm(sampler="wan_sde", clip_range=1e-3), id="wan_sde"),
    pytest.param(algorithm(kl_beta=0.1, kl_convention="transition", clip_range=1e-3), id="transition-kl"),
    pytest.param(algorithm(name="dance_grpo", eta=0.7, clip_range=1e-3), id="dance_grpo"),
    pytest.param(algorithm(name="grpo_guard", clip_range=1e-3), id="grpo_guard"),
    pytest.param(algorithm(name="flow_dppo", divergence_threshold=2e-4), id="flow_dppo"),
    pytest.param(algorithm(name="mix_grpo", clip_range=1e-3), id="mix_grpo"),
]
STEPS = (0, 1, 2)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def _trajectory(policy: Policy, section: AlgorithmConfig, adapter: NumberedAdapter) -> Trajectory:
    return roll_out(policy, rollout_spec(policy, steps=STEPS, sampler=algorithm_of(section).sampler), adapter)


def _train(
    policy: Policy,
    section: AlgorithmConfig,
    trajectory: Trajectory,
    current: NumberedAdapter,
    old: NumberedAdapter,
    advantages: dict[SampleId, float] | None = None,
    steps: tuple[int, ...] = STEPS,
) -> Contribution:
    return train_unit(
        policy,
        trajectory,
        policy.model.encode([PROMPT] * len(trajectory.samples)),
        steps,
        advantages or dict(zip(trajectory.samples, (1.5, -0.5, 0.25, -1.25), strict=True)),
        current=current,
        old=old,
        algorithm=section,
        guidance_scale=1.0,
        normaliser=12,
    )


def _difference(a: Adapter, b: Adapter) -> float:
    """Relative to the norm of the second."""
    norm = sum(t.double().square().sum() for t in b.values()).sqrt()
    return float(sum((a[n].double() - b[n].double()).square().sum() for n in b).sqrt() / norm)


@pytest.mark.parametrize("section", ALGORITHMS)
def test_replay_under_the_rollouts_weights_has_ratio_one(policy: Policy, section: AlgorithmConfig) -> None:
    adapter = moved(policy, 1)
    metrics = _train(policy, section, _trajectory(policy, section, adapter), adapter, adapter).metrics
    assert metrics.pairs == metrics.ratio == 12 and metrics.ratio_max == 1 and metrics.clipped == 0
    assert metrics.logp_gap_max < 1e-6
    assert (metrics.kl > 0) is (section.kl_beta > 0)


@pytest.mark.parametrize("section", ALGORITHMS)
def test_units_sum_to_the_gradient_of_the_whole(policy: Policy, section: AlgorithmConfig) -> None:
    """Off policy, one pair at a time or all in one batch: nothing depends on what is batched together."""
    old, new = moved(policy, 1), moved(policy, 2, scale=0.0501)
    trajectory = _trajectory(policy, section, old)
    whole = _train(policy, section, trajectory, new, old)
    assert 0 < whole.metrics.clipped < 12
    parts: list[Contribution] = []
    for sample, advantage in zip(trajectory.samples, (1.5, -0.5, 0.25, -1.25), strict=True):
        parts += [_train(policy, section, trajectory, new, old, {sample: advantage}, (step,)) for step in STEPS]
    summed = {name: sum(part.gradient[name].double() for part in parts) for name in whole.gradient}
    assert _difference(summed, whole.gradient) < 2e-6
    assert sum((part.metrics for part in parts[1:]), parts[0].metrics).clipped == whole.metrics.clipped


@pytest.mark.parametrize("section", ALGORITHMS)
def test_streaming_gives_the_ordinary_gradient(policy: Policy, section: AlgorithmConfig) -> None:
    adapter = moved(policy, 1)
    trajectory = _trajectory(policy, section, adapter)
    rewards = dict(zip(trajectory.samples, (0.3, 0.9, 0.1, 0.35), strict=True))
    found = group_advantages([rewards], AdvantageRule())
    accumulator: UpdateAccumulator[int] = UpdateAccumulator(policy.trainable())
    streamed = stream_unit(
        policy,
        trajectory,
        policy.model.encode([PROMPT] * 4),
        STEPS,
        rewards,
        baseline=0.4,
        current=adapter,
        algorithm=section,
        guidance_scale=1.0,
        normaliser=12,
    )
    assert streamed.gradient is not None
    accumulator.add_open(0, 0, streamed.gradient)
    accumulator.close({0: found.statistics[0]})
    ordinary = _train(policy, section, trajectory, adapter, adapter, found.values)
    assert _difference(accumulator.gradient(), ordinary.gradient) < 2e-6


def test_the_conventions_of_the_kl_differ_by_the_length_of_the_step(policy: Policy) -> None:
    adapter = moved(policy, 1)
    sections = [algorithm(kl_beta=0.1, kl_convention=convention) for convention in ("image", "transition")]
    trajectory = _trajectory(policy, sections[0], adapter)
    for step in STEPS:
        image, transition = (
            _train(policy, section, trajectory, adapter, adapter, steps=(step,)).metrics.kl for section in sections
        )
        length = float(trajectory.sigmas[step] - trajectory.sigmas[step + 1])
        assert image == pytest.approx(transition * length, rel=1e-5)


def test_steps_that_are_drawn_but_not_trained_leave_nothing_behind(policy: Policy) -> None:
    """The noise is the same as if they were kept; the trajectory is a part of the longer one."""
    adapter = moved(policy, 1)
    everything = rollout_spec(policy, steps=(0, 1, 2, 3, 4), sampler="dance_sde")
    whole = roll_out(policy, everything, adapter)
    part = roll_out(policy, replace(everything, steps=(1, 3)), adapter)
    assert part.steps == (1, 3) and len(part.latents) == len(part.log_probs) == 2
    for name in ("latents", "next_latents", "log_probs"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[[1, 3]])
