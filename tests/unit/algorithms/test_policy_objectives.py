"""What the algorithms make of replayed transitions: published values, and what sets each of them apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from golden_cases import Case, assert_close, golden

from digenrl.algorithms.base import Replay
from digenrl.algorithms.flow_dppo import masked_surrogate
from digenrl.algorithms.grpo_guard import drift, guarded_ratio
from digenrl.algorithms.losses import clipped_surrogate, likelihood_ratio
from digenrl.algorithms.registry import algorithm_of
from digenrl.algorithms.steps import Sampler, StepTerms, log_prob, step_terms
from digenrl.config import AlgorithmConfig, DanceGrpoConfig, FlowDppoConfig, FlowGrpoConfig, GrpoGuardConfig

SECTIONS = [FlowGrpoConfig(), DanceGrpoConfig(), GrpoGuardConfig(), FlowDppoConfig()]


def _replay(case: Case) -> Replay:
    """A golden case: log-probs and means are independent inputs there."""
    shape = case["in_std_dev_t"].shape
    g = case["in_std_dev_t"]
    std = g * case["in_sqrt_minus_dt"].reshape(shape)
    one = torch.ones_like(g)
    return Replay(
        mean=case["in_prev_mean"].clone().requires_grad_(),
        log_prob=case["in_log_prob"].clone().requires_grad_(),
        old_mean=case["in_prev_mean_old"],
        old_log_prob=case["in_old_log_prob"],
        terms=StepTerms(one, one, std, g),
    )


@golden("grpo_guard_verl")
def test_guard_equals_the_published_one_where_the_step_is_shared(case: Case) -> None:
    p, replay = case.parameters, _replay(case)
    guard = algorithm_of(GrpoGuardConfig(clip_range=p["clip_ratio"], adv_clip_max=p["adv_clip_max"]))
    terms = guard.surrogate(guard.ratio(replay), case["in_advantages"], replay)
    loss = (guard.weight(replay) * terms.loss).mean()
    assert_close(loss.detach(), case["out_loss"])
    by_log_prob, by_mean = torch.autograd.grad(loss, [replay.log_prob, replay.mean])
    assert_close(by_log_prob, case["out_grad_log_prob"])
    assert_close(by_mean, case["out_grad_prev_mean"])


@golden("grpo_guard_flowgrpo")
def test_guard_equals_the_first_one_with_the_drift_of_the_micro_batch(case: Case) -> None:
    """The first implementation averages the drift over whatever is batched together; all else is the same."""
    p, replay = case.parameters, _replay(case)
    ratio = guarded_ratio(replay, drift(replay).mean())
    terms = clipped_surrogate(ratio, case["in_advantages"], p["clip_range"], p["adv_clip_max"])
    assert_close(terms.ratio, case["out_ratio"])
    loss = (algorithm_of(GrpoGuardConfig()).weight(replay) * terms.loss).mean()
    assert_close(loss.detach(), case["out_policy_loss"])
    by_log_prob, by_mean = torch.autograd.grad(loss, [replay.log_prob, replay.mean])
    assert_close(by_log_prob, case["out_grad_log_prob"])
    assert_close(by_mean, case["out_grad_prev_mean"])
    assert float(terms.clipped.double().mean()) == float(case["out_clip_fraction"])


@golden("flow_dppo_verl")
def test_dppo_equals_the_published_one(case: Case) -> None:
    replay = _replay(case)
    ratio = likelihood_ratio(replay.log_prob, replay.old_log_prob)
    threshold = case.parameters["kl_mask_threshold"]
    terms = masked_surrogate(ratio, case["in_advantages"], drift(replay), threshold, None)
    loss = terms.loss.mean()
    assert_close(loss.detach(), case["out_loss"])
    assert_close(torch.autograd.grad(loss, replay.log_prob)[0], case["out_grad_log_prob"])
    assert 0 < int(terms.clipped.sum()) < len(ratio)


def _drawn(
    offset: float, steps: tuple[int, ...] = (0, 1, 2, 3), first: float = 1.0, sampler: Sampler = "flow_sde"
) -> Replay:
    """Transitions drawn at some steps of a schedule; the mean has moved by `offset` standard deviations."""
    generator, width = torch.Generator().manual_seed(0), 4096
    sigmas = torch.tensor([first, 0.9, 0.7, 0.4, 0.2, 0.0], dtype=torch.float64)
    terms = step_terms(sampler, sigmas, torch.tensor(steps), 0.7, 2)
    old = torch.randn(len(steps), width, generator=generator, dtype=torch.float64)
    x_next = old + terms.std * torch.randn(old.shape, generator=generator, dtype=torch.float64)
    direction = torch.randn(old.shape, generator=generator, dtype=torch.float64)
    mean = (old + offset * terms.std * direction).requires_grad_()
    return Replay(mean, log_prob(sampler, x_next, mean, terms), old, log_prob(sampler, x_next, old, terms), terms)


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_on_policy_the_ratio_is_one_and_the_surrogate_linear_in_the_advantage(section: AlgorithmConfig) -> None:
    """What streaming relies on."""
    algorithm, moved = algorithm_of(section), _drawn(0.0)
    replay = replace(moved, old_mean=moved.mean.detach(), old_log_prob=moved.log_prob.detach())
    ratio = algorithm.ratio(replay)
    assert torch.equal(ratio, torch.ones_like(ratio))
    advantages = torch.tensor([1.5, -0.25, 0.0, 3.0], dtype=torch.float64)
    terms = algorithm.surrogate(ratio, advantages, replay)
    weights = algorithm.weight(replay)
    ours, linear = (
        torch.autograd.grad(loss.sum(), replay.mean, retain_graph=True)[0]
        for loss in (weights * terms.loss, -weights * advantages * ratio)
    )
    torch.testing.assert_close(ours, linear, rtol=1e-15, atol=0)
    assert not terms.clipped.any()


@pytest.mark.parametrize("first", [1.0, 1 - 1e-6])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_the_first_and_the_last_step_are_finite(section: AlgorithmConfig, first: float) -> None:
    algorithm = algorithm_of(section)
    replay = _drawn(0.01, (0, 4, 0, 4), first, algorithm.sampler)
    ratio = algorithm.ratio(replay)
    terms = algorithm.surrogate(ratio, torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64), replay)
    loss = algorithm.weight(replay) * terms.loss
    (gradient,) = torch.autograd.grad(loss.sum(), replay.mean)
    assert all(bool(found.isfinite().all()) for found in (ratio, loss, gradient))
    assert bool(((ratio - 1).abs() < 0.1).all())


def test_guard_centres_what_the_likelihood_ratio_has_below_one() -> None:
    """Equal steps of the mean, in standard deviations: the plain log-ratio is negative, the guarded one is not."""
    replay = _drawn(0.3)
    plain = likelihood_ratio(replay.log_prob, replay.old_log_prob).log()
    guarded = algorithm_of(GrpoGuardConfig()).ratio(replay).log() / replay.terms.std.flatten()
    assert bool((plain < -0.03).all())
    assert bool((guarded.abs() < 0.02).all())


def test_guard_weights_every_step_by_itself() -> None:
    """A pair's loss does not depend on what it is batched with."""
    guard = algorithm_of(GrpoGuardConfig())

    def losses(replay: Replay) -> torch.Tensor:
        terms = guard.surrogate(guard.ratio(replay), torch.ones(len(replay.log_prob), dtype=torch.float64), replay)
        return guard.weight(replay) * terms.loss

    together = losses(_drawn(0.1))
    replay = _drawn(0.1)
    for i in range(4):
        rows = slice(i, i + 1)
        terms = StepTerms(
            *(term[rows] for term in (replay.terms.c_x, replay.terms.c_v, replay.terms.std, replay.terms.g))
        )
        single = Replay(
            replay.mean[rows], replay.log_prob[rows], replay.old_mean[rows], replay.old_log_prob[rows], terms
        )
        torch.testing.assert_close(losses(single), together[rows], rtol=1e-14, atol=0)
    sigmas = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.2], dtype=torch.float64)
    torch.testing.assert_close(guard.weight(replay), 1 / -sigmas.diff(), rtol=1e-13, atol=0)


def test_dppo_leaves_out_only_what_is_far_and_moves_further() -> None:
    ratio = torch.tensor([2.0, 2.0, 0.5, 0.5, 2.0, 1.0], requires_grad=True)
    advantages = torch.tensor([9.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    divergence = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.1, 1.0])
    terms = masked_surrogate(ratio, advantages, divergence, 1.0, None)
    assert terms.clipped.tolist() == [True, False, False, True, False, False]
    (gradient,) = torch.autograd.grad(terms.loss.sum(), ratio)
    assert gradient.tolist() == [0.0, 1.0, -1.0, 0.0, -1.0, -1.0]
    assert masked_surrogate(ratio, advantages, divergence, 1e9, 5.0).loss[0] == -10.0


def test_drift_is_the_gaussian_kl_averaged_over_elements() -> None:
    replay, normal = _drawn(0.2), torch.distributions.Normal
    exact = torch.distributions.kl_divergence(
        normal(replay.old_mean, replay.terms.std), normal(replay.mean, replay.terms.std)
    )
    torch.testing.assert_close(drift(replay), exact.mean(1), rtol=1e-12, atol=0)
    assert float(drift(replay).detach().mean()) == pytest.approx(0.2**2 / 2, rel=0.05)
