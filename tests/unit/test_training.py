"""One train unit: ratio, gradient, what is left out, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.algorithms.accumulate import NonFiniteGradient
from digenrl.config.load import load_config
from digenrl.contributions import Contribution, StalenessError, UnitMetrics
from digenrl.gates import ReferenceGate
from digenrl.identity import MicroBatchId
from digenrl.policy import NumberedAdapter, Policy
from digenrl.scheduling.units import TrainUnit
from digenrl.training import replay_floor, train_unit
from digenrl.trajectory import Trajectory
from tiny_policy import PROMPT, algorithm, moved, roll_out, rollout_spec, tiny_policy, widened

ADVANTAGES = (1.5, -0.5, 0.25, -1.25)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


def _train(
    policy: Policy,
    trajectory: Trajectory,
    steps: tuple[int, ...],
    current: NumberedAdapter,
    old: NumberedAdapter,
    advantages: dict | None = None,
    guidance_scale: float = 1.0,
    staleness: int = 0,
    **changes: object,
) -> Contribution:
    if advantages is None:
        advantages = dict(zip(trajectory.samples, ADVANTAGES, strict=True))
    return train_unit(
        policy,
        trajectory,
        policy.model.encode([PROMPT] * len(trajectory.samples)),
        steps,
        advantages,
        current=current,
        old=old,
        algorithm=algorithm(**changes),
        guidance_scale=guidance_scale,
        normaliser=12,
        staleness=staleness,
    )


def _added(contributions: list[Contribution]) -> dict[str, torch.Tensor]:
    return {name: sum(c.gradient[name].double() for c in contributions) for name in contributions[0].gradient}


def _difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative to the norm of the whole gradient."""
    norm = sum(t.double().square().sum() for t in b.values()).sqrt()
    return float(sum((a[n].double() - b[n].double()).square().sum() for n in b).sqrt() / norm)


@pytest.mark.parametrize("sampler", ["flow_sde", "cps"])
@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_replay_gives_ratio_one(policy: Policy, sampler: str, guidance_scale: float) -> None:
    """All steps but the last; the forward runs at another batch size than the rollout's."""
    adapter = moved(policy, 1)
    steps = (0, 1, 2, 3, 4)
    spec = rollout_spec(policy, steps=steps, sampler=sampler, guidance_scale=guidance_scale)
    trajectory = roll_out(policy, spec, adapter)
    metrics = _train(
        policy, trajectory, steps, adapter, adapter, guidance_scale=guidance_scale, sampler=sampler
    ).metrics
    assert metrics.pairs == 20 and metrics.ratio == 20 and metrics.ratio_max == 1 and metrics.clipped == 0
    assert metrics.approx_kl == 0
    assert metrics.logp_gap_max < 1e-6


def test_replay_of_a_bfloat16_base_gives_ratio_one() -> None:
    policy = tiny_policy(torch.bfloat16)
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    contribution = _train(policy, trajectory, (0, 1, 2), adapter, adapter)
    assert contribution.metrics.ratio == 12 and contribution.metrics.ratio_max == 1
    assert contribution.metrics.logp_gap_max < 1e-2
    assert all(t.dtype == torch.float32 for t in contribution.gradient.values())
    assert trajectory.latents.dtype == torch.float32


def test_replay_notices_latents_stored_in_bfloat16(policy: Policy) -> None:
    """Scoring the float32 latent and storing a narrower one is the classic mistake; the gap must show it."""
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    right = _train(policy, trajectory, (0, 1, 2), adapter, adapter).metrics
    narrowed = trajectory.next_latents.bfloat16().float()
    wrong = _train(policy, replace(trajectory, next_latents=narrowed), (0, 1, 2), adapter, adapter).metrics
    assert right.logp_gap_max < 1e-6
    assert wrong.logp_gap_max > 1e-5


def test_ratio_moves_once_the_weights_do(policy: Policy) -> None:
    old, new = moved(policy, 1), moved(policy, 2)
    trajectory = roll_out(policy, rollout_spec(policy), old)
    metrics = _train(policy, trajectory, (0, 1, 2), new, old).metrics
    assert metrics.ratio_max != 1 and metrics.approx_kl > 0
    assert metrics.logp_gap_max < 1e-6  # the old log-prob is still that of the rollout's weights
    assert policy.bound == new.theta


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_timesteps_in_one_batch_give_the_gradient_of_one_at_a_time(
    dtype: torch.dtype, limit: float, kl_beta: float
) -> None:
    policy = tiny_policy(dtype)
    old, new = moved(policy, 1), moved(policy, 2, scale=0.0501)
    trajectory = roll_out(policy, rollout_spec(policy), old)
    if dtype == torch.float64:
        trajectory = widened(trajectory)
    for current in (old, new):
        arguments = {"kl_beta": kl_beta, "clip_range": 0.5}
        together = _train(policy, trajectory, (0, 1, 2), current, old, **arguments)
        single = [_train(policy, trajectory, (step,), current, old, **arguments) for step in (0, 1, 2)]
        assert _difference(together.gradient, _added(single)) < limit
        summed = single[0].metrics + single[1].metrics + single[2].metrics
        assert together.metrics.pairs == summed.pairs == 12
        assert together.metrics.loss == pytest.approx(summed.loss, rel=1e-4, abs=1e-5)
        assert all(bool(t.any()) for name, t in together.gradient.items() if "attn.to_q" in name)


def test_gradient_checkpointing_differentiates_the_bound_adapter() -> None:
    policy = tiny_policy()
    old, new = moved(policy, 1), moved(policy, 2)
    trajectory = roll_out(policy, rollout_spec(policy), old)
    plain = _train(policy, trajectory, (0, 1, 2), new, old, kl_beta=0.1)
    policy.model.transformer.enable_gradient_checkpointing()
    checkpointed = _train(policy, trajectory, (0, 1, 2), new, old, kl_beta=0.1)
    assert _difference(checkpointed.gradient, plain.gradient) < 1e-6


def test_gradient_is_the_derivative_of_the_loss() -> None:
    """Against finite differences along one random direction, clipping inactive.

    The transformer's norms compute in float32 even in a float64 model, so the difference is good to four digits.
    """
    policy = tiny_policy(torch.float64)
    old, new = moved(policy, 1), moved(policy, 2, scale=0.0501)
    trajectory = widened(roll_out(policy, rollout_spec(policy), old))
    arguments = {"clip_range": 0.9, "kl_beta": 0.5}
    contribution = _train(policy, trajectory, (0, 1, 2), new, old, **arguments)
    direction = moved(policy, 3, scale=1.0).weights

    def loss(step: float, theta: int) -> float:
        weights = {n: w + step * direction[n] for n, w in new.weights.items()}
        return _train(policy, trajectory, (0, 1, 2), NumberedAdapter(theta, weights), old, **arguments).metrics.loss

    numeric = (loss(1e-4, 10) - loss(-1e-4, 11)) / 2e-4 / 12
    analytic = float(sum((contribution.gradient[n] * direction[n]).sum() for n in direction))
    assert numeric == pytest.approx(analytic, rel=2e-4)


def test_samples_without_advantage_take_no_part(policy: Policy) -> None:
    """A failed sample's latents may be NaN: 0 * NaN is NaN, so it must not enter the forward pass."""
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    kept = dict(list(zip(trajectory.samples, ADVANTAGES, strict=True))[1:])
    clean = _train(policy, trajectory, (0, 1), adapter, adapter, kept)
    broken = replace(trajectory, latents=trajectory.latents.clone())
    broken.latents[:, 0] = float("nan")
    contribution = _train(policy, broken, (0, 1), adapter, adapter, kept)
    assert contribution.metrics.pairs == 6
    assert all(torch.equal(contribution.gradient[n], clean.gradient[n]) for n in clean.gradient)


def test_nobody_left_is_a_zero_contribution(policy: Policy) -> None:
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    contribution = _train(policy, trajectory, (0, 1), adapter, adapter, {})
    assert contribution.metrics == UnitMetrics() and contribution.metrics.means() == {}
    assert contribution.gradient.keys() == policy.trainable().keys()
    assert not any(bool(t.any()) for t in contribution.gradient.values())


def test_zero_advantage_keeps_the_kl(policy: Policy) -> None:
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    zeros = dict.fromkeys(trajectory.samples, 0.0)
    with_kl = _train(policy, trajectory, (0, 1), adapter, adapter, zeros, kl_beta=0.1)
    assert with_kl.metrics.kl > 0 and with_kl.metrics.loss == pytest.approx(0.1 * with_kl.metrics.kl, rel=1e-5)
    assert any(bool(t.any()) for t in with_kl.gradient.values())
    without = _train(policy, trajectory, (0, 1), adapter, adapter, zeros)
    assert without.metrics.kl == 0 and not any(bool(t.any()) for t in without.gradient.values())


def test_kl_of_the_base_itself_is_zero(policy: Policy) -> None:
    start = NumberedAdapter(0, policy.initial_adapter())
    trajectory = roll_out(policy, rollout_spec(policy), start)
    same = _train(policy, trajectory, (0, 1), start, start, kl_beta=0.1).metrics
    assert same.kl == 0
    watch = ReferenceGate(load_config("tiny-smoke", ["algorithm.kl_beta=0.1"]))
    unit = TrainUnit(trajectory.micro_batch, (0, 1))
    assert watch.violation(unit, 0, "here", same) is None
    away = moved(policy, 1)
    other = _train(policy, trajectory, (0, 1), away, away, kl_beta=0.1)
    assert "before anything was trained" in (watch.violation(unit, 0, "here", other.metrics) or "")


def test_non_finite_loss_is_refused_with_its_name(policy: Policy) -> None:
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    broken = replace(trajectory, latents=trajectory.latents.clone())
    broken.latents[1, 2, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteGradient, match=r"loss of 1 of 8 .* of i0 m0 .* first at step 1 of .*generation=2"):
        _train(policy, broken, (0, 1), adapter, adapter)


def test_steps_that_were_not_sampled_are_refused(policy: Policy) -> None:
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    with pytest.raises(ValueError, match=r"step 4 of i0 m0 is not one of the trained steps \(0, 1, 2\)"):
        _train(policy, trajectory, (0, 4), adapter, adapter)


def _of(trajectory: Trajectory, iteration: int, version: int) -> Trajectory:
    return replace(trajectory, micro_batch=MicroBatchId("train", iteration, 0), version=version)


def test_stale_samples_are_counted(policy: Policy) -> None:
    old, new = moved(policy, 1), moved(policy, 2)
    trajectory = _of(roll_out(policy, rollout_spec(policy), old), iteration=4, version=3)
    stale = _train(policy, trajectory, (0, 1), new, old, staleness=1).metrics
    fresh = _train(policy, _of(trajectory, 4, 4), (0, 1), new, old).metrics
    assert (stale.staleness, fresh.staleness) == ({0: 0, 1: 8}, {0: 8, 1: 0})
    assert (stale + fresh).means()["stale"] == 0.5
    assert replace(stale, stale=0) == fresh


@pytest.mark.parametrize(("iteration", "version", "staleness"), [(4, 3, 0), (4, 4, 1), (4, 2, 1), (4, 2, 2), (4, 5, 0)])
def test_other_staleness_than_the_runs_rule_is_refused(
    policy: Policy, iteration: int, version: int, staleness: int
) -> None:
    adapter = moved(policy, 1)
    trajectory = _of(roll_out(policy, rollout_spec(policy), adapter), iteration, version)
    with pytest.raises(StalenessError, match=rf"i4 m0 was generated under version {version}, so it is {4 - version}"):
        _train(policy, trajectory, (0, 1), adapter, adapter, staleness=staleness)


def test_base_weights_stay_as_they_are(policy: Policy) -> None:
    base = {n: t.clone() for n, t in policy.model.transformer.state_dict().items() if "lora_" not in n}
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)
    _train(policy, trajectory, (0, 1, 2), adapter, adapter, kl_beta=0.1)
    after = policy.model.transformer.state_dict()
    assert all(torch.equal(after[n], t) for n, t in base.items())
    assert all(p.grad is None for p in policy.model.transformer.parameters())


@pytest.mark.parametrize(("dtype", "low", "high"), [(torch.float32, 0.0, 1e-6), (torch.bfloat16, 1e-5, 1e-1)])
def test_how_far_rounding_alone_moves_a_log_prob(dtype: torch.dtype, low: float, high: float) -> None:
    """Of the size of the gap that an honest replay shows; what is not rounding does not enter it."""
    policy = tiny_policy(dtype)
    adapter = moved(policy, 1)
    trajectory = roll_out(policy, rollout_spec(policy), adapter)

    def floor(trajectory: Trajectory) -> float:
        found = replay_floor(
            policy,
            trajectory,
            policy.model.encode([PROMPT] * len(trajectory.samples)),
            (0, 1, 2),
            trajectory.samples[:2],
            old=adapter,
            algorithm=algorithm(),
            guidance_scale=1.0,
        )
        assert found is not None
        return found

    assert low <= floor(trajectory) < high
    gap = _train(policy, trajectory, (0, 1, 2), adapter, adapter).metrics.logp_gap_max
    assert gap <= max(1e-6, 5 * floor(trajectory))
    narrowed = replace(trajectory, next_latents=trajectory.next_latents.bfloat16().float())
    spoilt = _train(policy, narrowed, (0, 1, 2), adapter, adapter).metrics.logp_gap_max
    if dtype == torch.float32:
        assert spoilt > 5 * max(1e-6, floor(narrowed))
