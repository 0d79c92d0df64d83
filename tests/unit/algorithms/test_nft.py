"""DiffusionNFT: published losses and schedules, the policy gradient hidden in it, sums over open groups, the edges."""

import math

import pytest
import torch
from golden_cases import Case, Sequence, assert_close, golden, golden_sequence

from digenrl.algorithms.advantages import AdvantageRule, group_advantages
from digenrl.algorithms.losses import normalised_loss
from digenrl.algorithms.nft import (
    LEAST_WEIGHT,
    OLD_POLICY_DECAYS,
    AdvantageMode,
    NFTTerms,
    forward_steps,
    nft_loss_terms,
    noised,
    old_policy_update,
    optimality,
    velocity_kl,
)
from digenrl.algorithms.streaming import StreamedGradient, UpdateAccumulator

SHAPE = (4, 3, 5)


def _normal(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@golden("nft_loss")
def test_loss_and_gradient_equal_the_published_ones(case: Case) -> None:
    p = case.parameters
    v = case["in_pred"].clone().requires_grad_()
    r = optimality(case["in_advantages"], p["adv_clip_max"], p["adv_mode"])
    terms = nft_loss_terms(
        v,
        case["in_old_pred"],
        case["in_x0"],
        case["in_xt"],
        case["in_t"],
        r,
        beta=p["beta"],
        adv_clip_max=p["adv_clip_max"],
    )
    kl = velocity_kl(v, case["in_ref_pred"])
    loss = normalised_loss(terms.loss, p["batch"], kl, p["kl_beta"])
    (gradient,) = torch.autograd.grad(loss, v)
    assert_close(r, case["out_r"])
    # Losses are float64 in the float32 case too, where their digits are those of float32.
    narrow = case["in_x0"].dtype
    assert_close(
        terms.loss.detach().mean().to(narrow) / p["adv_clip_max"], case["out_unweighted_policy_loss"].to(narrow)
    )
    assert_close(loss.detach().to(narrow), case["out_loss"].to(narrow))
    assert_close(kl.detach().mean(), case["out_kl"])
    assert_close(gradient, case["out_grad_pred"])


@golden_sequence("nft_old_policy_decay")
def test_the_behaviour_policy_follows_as_published(case: Sequence) -> None:
    for number, expected in case.data.items():
        decay = OLD_POLICY_DECAYS[int(number)]
        assert [decay.at(step) for step in case.parameters["steps"]] == pytest.approx(expected, rel=1e-12, abs=0)
    assert set(map(int, case.data)) == OLD_POLICY_DECAYS.keys()


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0.0, 0.0, 0.4, 0.5, 0.7, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.5, 0.7, 1.0]),
        ("negative_only", [0.0, 0.0, 0.4, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_optimality_of_each_mode(mode: AdvantageMode, expected: list[float]) -> None:
    advantages = torch.tensor([-9.0, -5.0, -1.0, 0.0, 2.0, 7.0], dtype=torch.float64)
    torch.testing.assert_close(optimality(advantages, 5.0, mode), torch.tensor(expected, dtype=torch.float64))


def test_optimality_stays_within_its_bounds_where_samples_are_counted_and_the_clip_is_small() -> None:
    assert optimality(torch.tensor([-3.0, 3.0]), 0.25, "binary").tolist() == [0.0, 1.0]


def test_an_unknown_mode_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'some'.*all, positive_only"):
        optimality(torch.zeros(1), 5.0, "some")  # type: ignore[arg-type]


def test_noised_is_the_sample_at_zero_and_the_noise_at_one() -> None:
    clean, noise = _normal(1), _normal(2)
    t = torch.tensor([0.0, 1.0, 0.25, 0.25], dtype=torch.float64)
    noisy = noised(clean, noise, t)
    assert torch.equal(noisy[0], clean[0]) and torch.equal(noisy[1], noise[1])
    torch.testing.assert_close(noisy[2], 0.75 * clean[2] + 0.25 * noise[2], rtol=1e-15, atol=0)


def _loss(
    v: torch.Tensor, old: torch.Tensor, r: torch.Tensor, t: torch.Tensor, beta: float, adv_clip_max: float = 5.0
) -> NFTTerms:
    clean = _normal(11)
    return nft_loss_terms(v, old, clean, noised(clean, _normal(12), t), t, r, beta=beta, adv_clip_max=adv_clip_max)


@pytest.mark.parametrize("beta", [0.1, 0.5, 1.0])
def test_at_the_behaviour_policy_the_gradient_is_that_of_a_policy_gradient(beta: float) -> None:
    """c (2r - 1) (-2 t) (x0_predicted - x0) / (D w): proportional to 2r - 1 = A / c, and beta does not matter."""
    t = torch.tensor([0.2, 0.4, 0.6, 1.0], dtype=torch.float64)
    r = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
    v = _normal(1).requires_grad_()
    terms = _loss(v, v.detach(), r, t, beta)
    assert torch.equal(terms.positive, terms.negative)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), v)
    clean, level = _normal(11), t.reshape(-1, 1, 1)
    error = noised(clean, _normal(12), t) - level * v.detach() - clean
    weight = error.abs().mean((1, 2), keepdim=True)
    closed = 5.0 * (2 * r - 1).reshape(-1, 1, 1) * (-2 * level) * error / (math.prod(SHAPE[1:]) * weight)
    torch.testing.assert_close(gradient, closed, rtol=1e-12, atol=1e-15)
    assert not gradient[2].any()


def test_good_samples_attract_and_bad_ones_repel() -> None:
    """From the behaviour policy, a step against the gradient brings the predicted clean latent nearer, or further."""
    t = torch.full((4,), 0.5, dtype=torch.float64)
    v = _normal(1).requires_grad_()
    (gradient,) = torch.autograd.grad(_loss(v, v.detach(), torch.tensor([1.0, 1.0, 0.0, 0.0]), t, 1.0).loss.sum(), v)
    exact = _normal(12) - _normal(11)
    before, after = ((step - exact).square().flatten(1).mean(1) for step in (v.detach(), v.detach() - 0.1 * gradient))
    assert (after < before).tolist() == [True, True, False, False]


def test_no_gradient_flows_into_the_weights_or_the_behaviour_policy() -> None:
    t = torch.full((4,), 0.5, dtype=torch.float64)
    v, old = _normal(1).requires_grad_(), _normal(2).requires_grad_()
    terms = _loss(v, old, torch.ones(4), t, 1.0)
    gradient, none = torch.autograd.grad(terms.positive.sum(), [v, old], allow_unused=True)
    clean = _normal(11)
    error = noised(clean, _normal(12), t) - 0.5 * v.detach() - clean
    closed = -2 * 0.5 * error / (math.prod(SHAPE[1:]) * error.abs().mean((1, 2), keepdim=True))
    assert none is None
    torch.testing.assert_close(gradient, closed, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("level", [0.0, 1.0])
def test_both_ends_are_finite(level: float) -> None:
    """At t = 0 nothing is noised, and the prediction is right whatever the velocity: its weight is the least."""
    v = _normal(1).requires_grad_()
    terms = _loss(v, _normal(2), torch.full((4,), 0.3), torch.full((4,), level, dtype=torch.float64), 1.0)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), v)
    assert bool(terms.loss.isfinite().all()) and bool(gradient.isfinite().all())
    assert bool(gradient.any()) is (level > 0)


def test_a_prediction_that_is_nearly_right_is_divided_by_the_least_weight() -> None:
    clean, t = _normal(11), torch.ones(4, dtype=torch.float64)
    noisy = _normal(12)
    v = noisy - clean + 1e-7
    terms = nft_loss_terms(v, v, clean, noisy, t, torch.ones(4), beta=1.0, adv_clip_max=5.0)
    torch.testing.assert_close(terms.positive, torch.full((4,), 1e-14 / LEAST_WEIGHT).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_velocities_are_widened_and_losses_are_float64(narrow: torch.dtype) -> None:
    v, old, t = _normal(1).to(narrow), _normal(2).to(narrow), torch.full((4,), 0.5)
    clean, noisy, r = _normal(11).float(), _normal(12).float(), torch.full((4,), 0.7)
    terms = nft_loss_terms(v, old, clean, noisy, t, r, beta=0.1, adv_clip_max=5.0)
    wide = nft_loss_terms(v.float(), old.float(), clean, noisy, t, r, beta=0.1, adv_clip_max=5.0)
    assert terms.loss.dtype == torch.float64 and torch.equal(terms.loss, wide.loss)
    assert torch.equal(velocity_kl(v, old), velocity_kl(v.float(), old.float()))


@pytest.mark.parametrize("beta", [0.1, 1.0])
@pytest.mark.parametrize("rewards", [[0.9, 0.1, 0.35, 0.6], [1.0, 0.0, 0.0, 0.0]])
def test_gradients_summed_before_advantages_are_known_are_the_ordinary_ones(rewards: list[float], beta: float) -> None:
    """The sums of streaming with h = - grad (l+ - l-) / 2 beta; what does not depend on the advantage is final."""
    clip, t = 5.0, torch.tensor([0.9, 0.7, 0.4, 0.2], dtype=torch.float64)
    of_sample = dict(enumerate(rewards))
    found = group_advantages([of_sample], AdvantageRule(adv_clip_max=clip))
    weight, features, old = _normal(3, (5, 5)).requires_grad_(), _normal(4), _normal(5)
    r = optimality(torch.tensor(list(found.values.values()), dtype=torch.float64), clip)
    terms = _loss(features @ weight, old, r, t, beta, clip)
    (ordinary,) = torch.autograd.grad(terms.loss.sum() / 4, weight)

    baseline, accumulator = 0.25, UpdateAccumulator[int]({"w": weight})
    for i, reward in of_sample.items():
        terms = _loss(features @ weight, old, torch.zeros(4), t, beta, clip)
        carried = -(terms.positive - terms.negative)[i] / (2 * beta)
        fixed = clip * (terms.positive + terms.negative)[i] / (2 * beta)
        (h,) = torch.autograd.grad(carried / 4, weight, retain_graph=True)
        (final,) = torch.autograd.grad(fixed / 4, weight)
        accumulator.add_open(0, i, StreamedGradient({"w": h}, {"w": (reward - baseline) * h}, baseline, {"w": final}))
    accumulator.close({0: found.statistics[0]})
    scale = float(ordinary.abs().max())
    torch.testing.assert_close(accumulator.sums()["w"], ordinary, rtol=1e-12, atol=1e-12 * scale)


def test_the_kl_of_equal_velocities_is_zero_and_no_gradient_flows_into_the_reference() -> None:
    v, reference = _normal(1).requires_grad_(), _normal(1).requires_grad_()
    kl = velocity_kl(v, reference)
    assert torch.equal(kl.detach(), torch.zeros(4, dtype=torch.float64))
    gradient, none = torch.autograd.grad(velocity_kl(v, reference + 1).sum(), [v, reference], allow_unused=True)
    assert none is None
    torch.testing.assert_close(gradient, torch.full(SHAPE, -2 / 15, dtype=torch.float64))


def test_steps_of_an_iteration_follow_from_seed_and_iteration_and_all_are_used_in_turn() -> None:
    steps = [forward_steps(10, 9, 3, iteration) for iteration in range(60)]
    assert all(len(set(chosen)) == 9 and list(chosen) == sorted(chosen) for chosen in steps)
    assert {step for chosen in steps for step in set(range(10)) - set(chosen)} == set(range(10))
    assert steps == [forward_steps(10, 9, 3, iteration) for iteration in range(60)]
    assert steps != [forward_steps(10, 9, 4, iteration) for iteration in range(60)]
    assert forward_steps(10, 10, 3, 0) == tuple(range(10))


@pytest.mark.parametrize("count", [0, 11, -1])
def test_more_steps_than_there_are_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count={count} of num_steps=10"):
        forward_steps(10, count, 0, 0)


def test_following_without_delay_is_a_copy_to_the_bit() -> None:
    old, current = {"w": torch.tensor([float("nan"), 3.0])}, {"w": torch.tensor([-0.0, 1.5])}
    followed = old_policy_update(old, current, 0.0)
    assert followed["w"].view(torch.int32).tolist() == current["w"].view(torch.int32).tolist()
    assert followed["w"] is not current["w"]


def test_following_mixes_old_and_current() -> None:
    old, current = {"w": torch.tensor([0.0, 4.0])}, {"w": torch.tensor([1.0, 2.0])}
    assert old_policy_update(old, current, 0.75)["w"].tolist() == [0.25, 3.5]
    assert torch.equal(old_policy_update(old, current, 1.0)["w"], old["w"])
    assert old["w"].tolist() == [0.0, 4.0]


def test_following_other_weights_is_refused() -> None:
    with pytest.raises(ValueError, match="different names"):
        old_policy_update({"w": torch.zeros(1)}, {"u": torch.zeros(1)}, 0.5)
