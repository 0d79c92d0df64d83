"""Train units of DiffusionNFT on the tiny model: the loss, cutting into units, streaming, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.algorithms.accumulate import NonFiniteGradient
from digenrl.algorithms.advantages import AdvantageRule, group_advantages
from digenrl.algorithms.streaming import UpdateAccumulator
from digenrl.config import AlgorithmConfig
from digenrl.contributions import Contribution, StalenessError
from digenrl.identity import SampleId, normal
from digenrl.policy import Adapter, NumberedAdapter, Policy
from digenrl.training import stream_unit, train_unit
from digenrl.trajectory import Trajectory
from tiny_policy import PROMPT, algorithm, moved, roll_out, rollout_spec, tiny_policy

STEPS = (0, 1, 3, 4)
PAIRS = 16
ADVANTAGES = (1.5, -0.5, 0.25, -1.25)
NFT = algorithm(name="diffusion_nft", nft_beta=0.5, kl_beta=0.01)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy()


@pytest.fixture(scope="module")
def adapters(policy: Policy) -> tuple[NumberedAdapter, NumberedAdapter]:
    """What generates samples, and what is trained."""
    return moved(policy, 1), moved(policy, 2, scale=0.06)


@pytest.fixture(scope="module")
def trajectory(policy: Policy, adapters: tuple[NumberedAdapter, NumberedAdapter]) -> Trajectory:
    spec = replace(rollout_spec(policy, steps=()), steps=STEPS, multistep_from=0, keep_clean=True)
    return roll_out(policy, spec, adapters[0])


def _train(
    policy: Policy,
    trajectory: Trajectory,
    current: NumberedAdapter,
    old: NumberedAdapter,
    advantages: dict[SampleId, float] | None = None,
    steps: tuple[int, ...] = STEPS,
    section: AlgorithmConfig = NFT,
    staleness: int = 0,
) -> Contribution:
    return train_unit(
        policy,
        trajectory,
        policy.model.encode([PROMPT] * len(trajectory.samples)),
        steps,
        advantages or dict(zip(trajectory.samples, ADVANTAGES, strict=True)),
        current=current,
        old=old,
        algorithm=section,
        guidance_scale=1.0,
        normaliser=PAIRS,
        staleness=staleness,
    )


def _difference(a: Adapter, b: Adapter) -> float:
    """Relative to the norm of the second."""
    norm = sum(t.double().square().sum() for t in b.values()).sqrt()
    return float(sum((a[n].double() - b[n].double()).square().sum() for n in b).sqrt() / norm)


def test_it_is_the_published_loss(
    policy: Policy, trajectory: Trajectory, adapters: tuple[NumberedAdapter, ...]
) -> None:
    """Written out for one pair: c = 5, r = 1/2 + 1.5 / 10, beta = 1/2."""
    old, new = adapters
    sample, step = trajectory.samples[0], 3
    found = _train(policy, trajectory, new, old, {sample: 1.5}, (step,))
    t, x0 = trajectory.sigmas[step], trajectory.clean[:1]
    noisy = (1 - t) * x0 + t * normal(sample, "forward", step, x0.shape[1:])[None]

    def velocity() -> torch.Tensor:
        return policy.velocity(noisy, t[None], policy.model.encode([PROMPT]), 1.0)

    policy.bind(old.weights, old.tag)
    with torch.no_grad():
        v_old = velocity()
    policy.bind(new.weights, new.tag)
    with policy.reference(), torch.no_grad():
        v_ref = velocity()
    v = velocity()
    losses = []
    for implied in ((v + v_old) / 2, (3 * v_old - v) / 2):
        error = (noisy - t * implied - x0).double()
        losses.append(error.square().mean() / error.detach().abs().mean())
    kl = (v - v_ref).square().mean()
    loss = 5 * (0.65 * losses[0] + 0.35 * losses[1]) / 0.5 + 0.01 * kl
    parameters = policy.trainable()
    wanted = torch.autograd.grad(loss / PAIRS, list(parameters.values()), allow_unused=True, materialize_grads=True)
    assert _difference(found.gradient, dict(zip(parameters, wanted, strict=True))) < 1e-6
    assert found.metrics.loss == pytest.approx(loss.item(), rel=1e-6)
    assert found.metrics.kl == pytest.approx(kl.item(), rel=1e-6)


def test_units_sum_to_the_gradient_of_the_whole(
    policy: Policy, trajectory: Trajectory, adapters: tuple[NumberedAdapter, ...]
) -> None:
    """One pair at a time or all in one batch: noise and loss belong to the pair."""
    old, new = adapters
    whole = _train(policy, trajectory, new, old)
    parts: list[Contribution] = []
    for sample, advantage in zip(trajectory.samples, ADVANTAGES, strict=True):
        parts += [_train(policy, trajectory, new, old, {sample: advantage}, (step,)) for step in STEPS]
    summed = {name: sum(part.gradient[name].double() for part in parts) for name in whole.gradient}
    assert _difference(summed, whole.gradient) < 2e-6
    metrics = sum((part.metrics for part in parts[1:]), parts[0].metrics)
    assert metrics.pairs == whole.metrics.pairs == PAIRS
    assert metrics.loss == pytest.approx(whole.metrics.loss, rel=1e-6)


def test_on_policy_it_is_linear_in_the_advantages(
    policy: Policy, trajectory: Trajectory, adapters: tuple[NumberedAdapter, ...]
) -> None:
    """A policy gradient: none for a sample that is as good as its group, twice that of half the advantage."""
    adapter, section = adapters[0], algorithm(name="diffusion_nft", kl_beta=0)
    one, two, none = (
        _train(
            policy,
            trajectory,
            adapter,
            adapter,
            {s: f * a for s, a in zip(trajectory.samples, ADVANTAGES, strict=True)},
            section=section,
        )
        for f in (1, 2, 0)
    )
    assert _difference({name: 2 * g for name, g in one.gradient.items()}, two.gradient) < 2e-6
    assert not any(bool(gradient.any()) for gradient in none.gradient.values())


def test_the_same_weights_under_another_name_make_no_difference(
    policy: Policy, trajectory: Trajectory, adapters: tuple[NumberedAdapter, ...]
) -> None:
    """A forward pass of its own gives what the detached one is."""
    adapter = adapters[0]
    detached = _train(policy, trajectory, adapter, adapter)
    apart = _train(policy, trajectory, adapter, replace(adapter, role="behaviour"))
    assert policy.bound == adapter.tag
    assert all(torch.equal(apart.gradient[name], gradient) for name, gradient in detached.gradient.items())


@pytest.mark.parametrize("rewards", [(0.3, 0.9, 0.1, 0.35), (0.5, 0.5, 0.5, 0.5)], ids=["varied", "all-equal"])
@pytest.mark.parametrize("lagging", [False, True])
def test_streaming_gives_the_ordinary_gradient(
    policy: Policy,
    trajectory: Trajectory,
    adapters: tuple[NumberedAdapter, ...],
    rewards: tuple[float, ...],
    lagging: bool,
) -> None:
    """Also where samples come from other weights, and of a group that says nothing: what holds it back is final."""
    old, new = adapters if lagging else adapters[:1] * 2
    given = dict(zip(trajectory.samples, rewards, strict=True))
    found = group_advantages([given], AdvantageRule())
    accumulator: UpdateAccumulator[int] = UpdateAccumulator(policy.trainable())
    for unit, steps in enumerate((STEPS[:3], STEPS[3:])):
        streamed = stream_unit(
            policy,
            trajectory,
            policy.model.encode([PROMPT] * 4),
            steps,
            given,
            baseline=0.4,
            current=new,
            old=replace(old, role="behaviour" if lagging else "adapter"),
            algorithm=NFT,
            guidance_scale=1.0,
            normaliser=PAIRS,
        )
        assert streamed.gradient is not None and streamed.metrics.forward == 4 * len(steps)
        accumulator.add_open(0, unit, streamed.gradient)
    accumulator.close({0: found.statistics[0]})
    ordinary = _train(policy, trajectory, new, old, found.values)
    assert _difference(accumulator.gradient(), ordinary.gradient) < 2e-6


def test_metrics_leave_out_what_has_no_meaning_without_likelihoods(
    policy: Policy, trajectory: Trajectory, adapters: tuple[NumberedAdapter, ...]
) -> None:
    metrics = _train(policy, trajectory, adapters[1], adapters[0]).metrics
    assert metrics.means().keys() == {"pairs", "loss", "kl", "stale"}
    assert metrics.means()["kl"] > 0 and metrics.staleness == {0: PAIRS, 1: 0}


def test_samples_without_an_advantage_take_no_part(
    policy: Policy, trajectory: Trajectory, adapters: tuple[NumberedAdapter, ...]
) -> None:
    """Their latents may be anything; where they do take part, nothing is added."""
    broken = replace(trajectory, clean=trajectory.clean.clone())
    broken.clean[1] = float("nan")
    first, second, *_ = trajectory.samples
    kept = _train(policy, broken, adapters[0], adapters[0], {first: 1.0})
    assert kept.metrics.pairs == 4
    with pytest.raises(NonFiniteGradient, match=r"the loss of 4 of 8 .* not finite, the first at step 0 of"):
        _train(policy, broken, adapters[0], adapters[0], {first: 1.0, second: 1.0})
    nobody = _train(policy, trajectory, adapters[0], adapters[0], {SampleId(7, 0, 9, 9): 1.0})
    assert nobody.metrics.pairs == 0 and not any(bool(g.any()) for g in nobody.gradient.values())


def test_steps_schedule_and_age_are_checked(
    policy: Policy, trajectory: Trajectory, adapters: tuple[NumberedAdapter, ...]
) -> None:
    adapter = adapters[0]
    with pytest.raises(ValueError, match=r"step 2 of i0 m0 is not one of the trained steps \(0, 1, 3, 4\)"):
        _train(policy, trajectory, adapter, adapter, steps=(2,))
    with pytest.raises(ValueError, match="this run trains on 11"):
        _train(policy, trajectory, adapter, adapter, section=algorithm(name="diffusion_nft", num_steps=10))
    with pytest.raises(StalenessError, match="it is 0 versions old; it must be 1"):
        _train(policy, trajectory, adapter, adapter, staleness=1)
