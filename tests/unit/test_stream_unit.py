"""A train unit before the advantages are known, against the ordinary one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from diffusers.models.normalization import RMSNorm

from digenrl.algorithms.accumulate import NonFiniteGradient
from digenrl.algorithms.advantages import AdvantageRule, group_advantages
from digenrl.algorithms.streaming import UpdateAccumulator
from digenrl.contributions import StalenessError, StreamedContribution, UnitMetrics
from digenrl.identity import MicroBatchId, SampleId
from digenrl.policy import NumberedAdapter, Policy
from digenrl.training import stream_unit, train_unit
from digenrl.trajectory import Trajectory
from tiny_policy import PROMPT, algorithm, moved, roll_out, rollout_spec, tiny_policy, widened

REWARDS = (0.3, 0.9, 0.1, 0.35)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def _float64_policy() -> Policy:
    """Diffusers' RMS norm computes its variance in float32 whatever the model's type; here it must not."""
    policy = tiny_policy(torch.float64)
    for parent in list(policy.model.transformer.modules()):
        for name, module in parent.named_children():
            if isinstance(module, RMSNorm):
                norm = torch.nn.RMSNorm(module.dim, eps=module.eps, dtype=torch.float64)
                norm.weight = module.weight
                setattr(parent, name, norm)
    return policy


def _rewards(trajectory: Trajectory) -> dict[SampleId, float]:
    return dict(zip(trajectory.samples, REWARDS, strict=True))


def _common(policy: Policy, trajectory: Trajectory, guidance_scale: float = 1.0, **changes: object) -> dict:
    return {
        "embeddings": policy.model.encode([PROMPT] * len(trajectory.samples)),
        "algorithm": algorithm(**changes),
        "guidance_scale": guidance_scale,
        "normaliser": 12,
    }


def _stream(
    policy: Policy,
    trajectory: Trajectory,
    steps: tuple[int, ...],
    adapter: NumberedAdapter,
    rewards: dict[SampleId, float],
    baseline: float = 0.4,
    **changes: object,
) -> StreamedContribution:
    common = _common(policy, trajectory, **changes)  # type: ignore[arg-type]
    return stream_unit(policy, trajectory, steps=steps, rewards=rewards, baseline=baseline, current=adapter, **common)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("changes", [{}, {"kl_beta": 0.1}, {"sampler": "cps"}, {"guidance_scale": 3.0}])
def test_closed_group_has_the_ordinary_gradient(dtype: torch.dtype, limit: float, changes: dict) -> None:
    """Three of four samples have a reward; one timestep streamed alone, two together."""
    policy = _float64_policy() if dtype == torch.float64 else tiny_policy()
    adapter = moved(policy, 1)
    spec = rollout_spec(policy, **{k: v for k, v in changes.items() if k != "kl_beta"})
    trajectory = roll_out(policy, spec, adapter)
    if dtype == torch.float64:
        trajectory = widened(trajectory)
    rewards = dict(list(_rewards(trajectory).items())[1:])
    found = group_advantages([rewards], AdvantageRule())
    accumulator: UpdateAccumulator[tuple[int, ...]] = UpdateAccumulator(policy.trainable())
    metrics = UnitMetrics()
    for steps in ((0,), (1, 2)):
        contribution = _stream(policy, trajectory, steps, adapter, rewards, **changes)
        assert contribution.gradient is not None
        accumulator.add_open(0, steps, contribution.gradient)
        metrics += contribution.metrics
    accumulator.close({0: found.statistics[0]})
    ordinary = train_unit(
        policy,
        trajectory,
        steps=(0, 1, 2),
        advantages=found.values,
        current=adapter,
        old=adapter,
        **_common(policy, trajectory, **changes),
    )
    ours, theirs = accumulator.sums(), ordinary.gradient
    norm = torch.stack([t.double().square().sum() for t in theirs.values()]).sum().sqrt()
    difference = torch.stack([(ours[n].double() - theirs[n].double()).square().sum() for n in theirs]).sum().sqrt()
    assert float(difference / norm) < limit
    wanted = ordinary.metrics
    assert metrics.pairs == wanted.pairs == 9 and metrics.ratio == 9 and metrics.clipped == 0 and metrics.approx_kl == 0
    assert metrics.loss == pytest.approx(wanted.loss, abs=1e-5) and metrics.kl == pytest.approx(wanted.kl, rel=1e-4)
    assert metrics.logp_gap_max < 1e-6 and metrics.staleness == {0: 9, 1: 0}


def test_gradient_checkpointing_runs_the_forward_again_for_every_sum() -> None:
    policy = tiny_policy()
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    plain = _stream(policy, trajectory, (0, 1), adapter, _rewards(trajectory), kl_beta=0.1).gradient
    policy.model.transformer.enable_gradient_checkpointing()
    again = _stream(policy, trajectory, (0, 1), adapter, _rewards(trajectory), kl_beta=0.1).gradient
    assert plain is not None and again is not None and plain.final is not None and again.final is not None
    for ours, theirs in (
        (again.plain, plain.plain),
        (again.weighted, plain.weighted),
        (again.final, plain.final),
    ):
        assert all(torch.allclose(ours[n], theirs[n], rtol=1e-5, atol=1e-8) for n in ours)
        assert any(bool(t.any()) for t in ours.values())


def test_sample_without_reward_takes_no_part(policy: Policy) -> None:
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    rewards = dict(list(_rewards(trajectory).items())[1:])
    broken = replace(trajectory, latents=trajectory.latents.clone())
    broken.latents[:, 0] = float("nan")
    ours, theirs = (_stream(policy, t, (0, 1), adapter, rewards).gradient for t in (broken, trajectory))
    assert ours is not None and theirs is not None
    assert all(torch.equal(ours.weighted[n], theirs.weighted[n]) for n in theirs.weighted)
    nobody = _stream(policy, trajectory, (0, 1), adapter, {})
    assert nobody.gradient is None and nobody.metrics == UnitMetrics()


def test_non_finite_log_prob_is_refused_with_its_name(policy: Policy) -> None:
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    broken = replace(trajectory, latents=trajectory.latents.clone())
    broken.latents[1, 2, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteGradient, match=r"loss of 1 of 8 .* of i0 m0 .* first at step 1 of .*generation=2"):
        _stream(policy, broken, (0, 1), adapter, _rewards(trajectory))


def test_stale_samples_are_refused(policy: Policy) -> None:
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    stale = replace(trajectory, micro_batch=MicroBatchId("train", 1, 0))
    with pytest.raises(StalenessError, match=r"it is 1 versions old; it must be 0"):
        _stream(policy, stale, (0, 1), adapter, _rewards(trajectory))
