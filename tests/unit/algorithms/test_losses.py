"""The clipped surrogate and the KL, against the published values and at their edges."""

import math

import pytest
import torch
from golden_cases import Case, assert_close, golden

from digenrl.algorithms.accumulate import Accumulator
from digenrl.algorithms.losses import (
    KLConvention,
    PolicyTerms,
    clipped_surrogate,
    gaussian_kl,
    likelihood_ratio,
    normalised_loss,
)
from digenrl.algorithms.steps import StepTerms, log_prob, sample_next, step_mean, step_terms


def _terms(g: torch.Tensor, std: torch.Tensor) -> StepTerms:
    return StepTerms(c_x=torch.ones_like(g), c_v=torch.ones_like(g), std=std, g=g)


def _surrogate(new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float) -> PolicyTerms:
    return clipped_surrogate(likelihood_ratio(new, old), advantages, clip, 5.0)


@golden("grpo_loss")
def test_loss_and_gradients_equal_the_published_ones(case: Case) -> None:
    p = case.parameters
    new = case["in_log_prob"].clone().requires_grad_()
    mean = case["in_prev_mean"].clone().requires_grad_()
    ratio = likelihood_ratio(new, case["in_old_log_prob"])
    policy = clipped_surrogate(ratio, case["in_advantages"], p["clip_range"], p["adv_clip_max"])
    assert_close(policy.ratio, case["out_ratio"])
    assert_close(policy.loss.detach().mean(), case["out_policy_loss"])
    assert float(policy.clipped.double().mean()) == pytest.approx(float(case["out_clip_fraction"]), rel=1e-12)

    convention: KLConvention = "transition" if "wan" in case.name else "image"
    terms = _terms(case["in_std_dev_t"], case["in_std_dev_t"] * case["in_sqrt_minus_dt"])
    kl = gaussian_kl(mean, case["in_prev_mean_ref"], terms, convention)
    loss = normalised_loss(policy.loss, p["batch"], kl, p["beta"])
    assert_close(loss.detach(), case["out_loss"])
    by_log_prob, by_mean = torch.autograd.grad(loss, [new, mean])
    assert_close(by_log_prob, case["out_grad_log_prob"])
    if p["beta"]:
        assert_close(kl.detach().mean(), case["out_kl_loss"])
        assert_close(by_mean, case["out_grad_prev_mean"])
    else:
        assert not by_mean.any()


@golden("grpo_loss_verl")
def test_weights_multiply_the_loss_of_their_pair(case: Case) -> None:
    p = case.parameters
    new = case["in_log_prob"].clone().requires_grad_()
    ratio = likelihood_ratio(new, case["in_old_log_prob"])
    policy = clipped_surrogate(ratio, case["in_advantages"], p["clip_ratio"], p["adv_clip_max"])
    loss = normalised_loss(case["in_weights"] * policy.loss, p["batch"])
    assert_close(loss.detach(), case["out_loss"])
    assert_close(torch.autograd.grad(loss, new)[0], case["out_grad_log_prob"])


def _gradient(delta: list[float], advantages: list[float], clip_range: float = 0.125) -> torch.Tensor:
    new = torch.tensor(delta, dtype=torch.float64).requires_grad_()
    policy = _surrogate(new, torch.zeros(len(delta), dtype=torch.float64), torch.tensor(advantages), clip_range)
    (gradient,) = torch.autograd.grad(policy.loss.sum(), new)
    return gradient


def test_only_the_clipped_side_loses_its_gradient() -> None:
    out, in_ = math.log(1.25), math.log(0.75)
    gradient = _gradient([out, out, in_, in_], [1.0, -1.0, 1.0, -1.0])
    torch.testing.assert_close(gradient, torch.tensor([0.0, 1.25, -0.75, 0.0], dtype=torch.float64))


def test_with_every_ratio_out_of_range_only_those_that_come_back_have_a_gradient() -> None:
    far = [math.log(2.0)] * 4 + [math.log(0.5)] * 4
    gradient = _gradient(far, [1.0, 3.0, 1.0, 3.0, -1.0, -3.0, -1.0, -3.0])
    assert not gradient.any()
    assert _gradient(far, [-1.0] * 4 + [1.0] * 4).tolist() == pytest.approx([2.0] * 4 + [-0.5] * 4, rel=1e-15)


@pytest.mark.parametrize(("delta", "advantage"), [(0.1, 2.0), (-0.1, -2.0)])
def test_a_ratio_on_the_boundary_counts_as_inside(delta: float, advantage: float) -> None:
    ratio = float(torch.exp(torch.tensor([delta], dtype=torch.float64)))
    clip_range = abs(ratio - 1)  # exact in floating point, and so is adding 1 back
    assert _gradient([delta], [advantage], clip_range).tolist() == [-advantage * ratio]


def test_the_first_update_has_ratio_one_and_the_log_prob_gradient() -> None:
    new = torch.tensor([-0.3, -1.7, 2.5]).requires_grad_()
    advantages = torch.tensor([1.5, -0.25, 0.0])
    policy = _surrogate(new, new.detach(), advantages, 1e-4)
    assert torch.equal(policy.ratio, torch.ones(3))
    assert not policy.clipped.any()
    (gradient,) = torch.autograd.grad(policy.loss.sum(), new)
    assert torch.equal(gradient, -advantages)


def test_no_gradient_flows_into_the_old_log_prob() -> None:
    old = torch.zeros(1, requires_grad=True)
    new = torch.full((1,), 0.01, requires_grad=True)
    _surrogate(new, old, torch.ones(1), 0.5).loss.sum().backward()
    assert old.grad is None and new.grad is not None


def test_advantages_are_clamped_on_both_sides_unless_there_is_no_bound() -> None:
    assert _gradient([0.0, 0.0], [9.0, -9.0]).tolist() == [-5.0, 5.0]
    free = clipped_surrogate(torch.ones(2), torch.tensor([9.0, -9.0]), 0.1, None)
    assert free.loss.tolist() == [-9.0, 9.0]


@pytest.mark.parametrize("convention", ["image", "transition"])
def test_kl_of_equal_means_is_exactly_zero_with_zero_gradient(convention: KLConvention) -> None:
    mean = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    terms = _terms(torch.tensor([[0.7], [1e-4]]), torch.tensor([[0.2], [1e-6]]))
    kl = gaussian_kl(mean, mean.detach().clone(), terms, convention)
    assert torch.equal(kl.detach(), torch.zeros(2))
    assert torch.equal(torch.autograd.grad(kl.sum(), mean)[0], torch.zeros(2, 3))


def test_kl_of_a_step_without_noise_is_zero_not_nan() -> None:
    sigmas = torch.tensor([0.9, 0.4, 0.0])
    terms = step_terms("cps", sigmas, torch.tensor([1, 0]), 0.8, 2)
    mean = torch.ones(2, 3, requires_grad=True)
    kl = gaussian_kl(mean, torch.zeros(2, 3), terms, "image")
    (gradient,) = torch.autograd.grad(kl.sum(), mean)
    assert kl[0] == 0 and not gradient[0].any()
    assert kl[1] > 0 and bool((gradient[1] > 0).all())


def test_transition_kl_is_the_gaussian_kl_averaged_over_elements() -> None:
    sigmas = torch.tensor([0.9, 0.4, 0.0], dtype=torch.float64)
    terms = step_terms("flow_sde", sigmas, torch.tensor([0, 1]), 0.7, 2)
    generator = torch.Generator().manual_seed(1)
    mean, reference = torch.randn(2, 2, 5, generator=generator, dtype=torch.float64)
    normal = torch.distributions.Normal
    exact = torch.distributions.kl_divergence(normal(mean, terms.std), normal(reference, terms.std)).mean(1)
    kl = gaussian_kl(mean, reference, terms, "transition")
    torch.testing.assert_close(kl, exact, rtol=1e-12, atol=0)
    delta = sigmas[:-1] - sigmas[1:]
    torch.testing.assert_close(gaussian_kl(mean, reference, terms, "image"), exact * delta, rtol=1e-12, atol=0)


def test_an_unknown_kl_convention_is_refused() -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match=r"'wan'.*image or transition"):
        gaussian_kl(one, one, _terms(one, one), "wan")  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_units_sum_to_the_full_batch_gradient(dtype: torch.dtype, tolerance: float) -> None:
    """Cut into units, a batch gives the same gradient: the normaliser belongs to the update, not to the unit."""
    generator = torch.Generator().manual_seed(3)
    batch, width = 12, 4
    x, noise, advantages = (
        torch.randn(batch, width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3)
    )
    weight = torch.randn(width, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    sigmas = torch.tensor([1.0, 0.7, 0.3, 0.0], dtype=dtype)
    index = torch.arange(batch) % 3
    terms = step_terms("flow_sde", sigmas, index, 0.7, 2)
    x_next = sample_next(terms, x, x @ weight.detach() * 1.001, noise)[0]

    def gradient(rows: list[int]) -> torch.Tensor:
        part = step_terms("flow_sde", sigmas, index[rows], 0.7, 2)
        mean = step_mean(part, x[rows], x[rows] @ weight)
        score = log_prob("flow_sde", x_next[rows], mean, part)
        policy = _surrogate(score, score.detach() - 1e-3, advantages[rows, 0], 1e-2)
        kl = gaussian_kl(mean, step_mean(part, x[rows], x[rows]), part, "transition")
        return torch.autograd.grad(normalised_loss(policy.loss, batch, kl, 0.04), weight)[0]

    whole = gradient(list(range(batch)))
    units = [[0, 5, 7], [1], [2, 3, 4, 6, 8, 9, 10, 11]]
    parts = torch.stack([gradient(rows) for rows in units]).sum(0)
    torch.testing.assert_close(parts, whole, rtol=tolerance, atol=tolerance * float(whole.abs().max()))
    if dtype == torch.float32:
        accumulator: Accumulator[int] = Accumulator({"w": weight})
        for key, rows in enumerate(units):
            accumulator.add(key, {"w": gradient(rows)})
        torch.testing.assert_close(
            accumulator.gradient()["w"], whole, rtol=tolerance, atol=tolerance * float(whole.abs().max())
        )
