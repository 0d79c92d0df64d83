"""Sampler steps at the edges: sigma 1, the last step, no noise, mixed batches."""

import math
from typing import get_args

import pytest
import torch

from digenrl.algorithms.steps import Sampler, euler_step, log_prob, sample_next, step_mean, step_terms

SAMPLERS = get_args(Sampler)
#: SD3's table of 4 steps, shift 3 applied twice.
SIGMAS = torch.tensor([1.0, 0.858138, 0.601734, 0.00892857, 0.0])
SHAPE = (2, 3, 4)


def _normal(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _at(step: int) -> torch.Tensor:
    return torch.full((SHAPE[0],), step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_noise_every_sampler_takes_the_euler_step(sampler: Sampler, dtype: torch.dtype) -> None:
    x, v = _normal(1, dtype), _normal(2, dtype)
    for step in range(4):
        terms = step_terms(sampler, SIGMAS.to(dtype), _at(step), 0.0, 3)
        x_next, _ = sample_next(terms, x, v, _normal(3, dtype))
        tolerance = torch.finfo(dtype).eps
        torch.testing.assert_close(
            x_next, euler_step(SIGMAS.to(dtype), _at(step), x, v), rtol=4 * tolerance, atol=4 * tolerance
        )
        assert not terms.std.any()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_all_steps_are_finite_first_and_last_included(sampler: Sampler, step: int) -> None:
    terms = step_terms(sampler, SIGMAS, _at(step), 0.7, 3)
    v = _normal(2).requires_grad_()
    x_next, mean = sample_next(terms, _normal(1), v, _normal(3))
    score = log_prob(sampler, x_next, mean, terms)
    (gradient,) = torch.autograd.grad(score.sum(), v)
    assert torch.isfinite(x_next).all() and torch.isfinite(score).all() and torch.isfinite(gradient).all()


def test_flow_sde_rate_at_sigma_one_uses_the_second_sigma() -> None:
    terms = step_terms("flow_sde", SIGMAS.double(), _at(0), 0.7, 3)
    expected = 0.7 / math.sqrt(1 - float(SIGMAS[1]))
    torch.testing.assert_close(terms.g, torch.full((2, 1, 1), expected, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("first", [1 - 1e-6, 1 - 1e-4])
def test_flow_sde_rate_does_not_explode_just_below_sigma_one(first: float) -> None:
    near = SIGMAS.double()
    near[0] = first
    rate = step_terms("flow_sde", near, _at(0), 0.7, 3).g
    torch.testing.assert_close(rate, step_terms("flow_sde", SIGMAS.double(), _at(0), 0.7, 3).g, rtol=1e-4, atol=0)


def test_flow_sde_rate_below_the_guard_is_the_formula() -> None:
    table = torch.tensor([0.999, 0.5, 0.0], dtype=torch.float64)
    rate = step_terms("flow_sde", table, torch.tensor([0]), 0.7, 1).g
    assert float(rate) == pytest.approx(0.7 * math.sqrt(0.999 / 0.001), rel=1e-12)


def test_cps_log_prob_of_the_last_step_is_exactly_zero_at_rollout() -> None:
    terms = step_terms("cps", SIGMAS, _at(3), 0.8, 3)
    x_next, mean = sample_next(terms, _normal(1), _normal(2), _normal(3))
    assert not terms.std.any()
    assert torch.equal(x_next, mean)
    assert torch.equal(log_prob("cps", x_next, mean, terms), torch.zeros(2))


def test_cps_at_noise_level_one_renoises_completely() -> None:
    """sqrt(sigma'^2 - s^2) is 0: nothing of the old noise is kept, and no NaN from a tiny negative root."""
    sigmas = SIGMAS.double()
    x, v = _normal(1, torch.float64), _normal(2, torch.float64)
    terms = step_terms("cps", sigmas, _at(1), 1.0, 3)
    torch.testing.assert_close(step_mean(terms, x, v), (1 - sigmas[2]) * (x - sigmas[1] * v), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("sampler", ["flow_sde", "wan_sde", "dance_sde"])
def test_log_prob_is_the_mean_of_a_normal_log_density(sampler: Sampler) -> None:
    terms = step_terms(sampler, SIGMAS.double(), torch.tensor([1, 3]), 0.7, 3)
    mean, x_next = _normal(1, torch.float64), _normal(4, torch.float64)
    expected = torch.distributions.Normal(mean, terms.std.expand(SHAPE)).log_prob(x_next).flatten(1).mean(1)
    torch.testing.assert_close(log_prob(sampler, x_next, mean, terms), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("sampler", ["flow_sde", "wan_sde", "dance_sde"])
def test_log_prob_of_a_deterministic_step_is_refused(sampler: Sampler) -> None:
    terms = step_terms(sampler, SIGMAS, _at(1), 0.0, 3)
    with pytest.raises(ValueError, match="deterministic step"):
        log_prob(sampler, _normal(1), _normal(1), terms)


def test_log_prob_gradient_has_the_closed_form_and_none_flows_into_the_outcome() -> None:
    terms = step_terms("flow_sde", SIGMAS.double(), torch.tensor([0, 2]), 0.7, 3)
    x, v = _normal(1, torch.float64), _normal(2, torch.float64).requires_grad_()
    x_next, mean = sample_next(terms, x, v, _normal(3, torch.float64))
    (gradient,) = torch.autograd.grad(log_prob("flow_sde", x_next, mean, terms).sum(), v)
    elements = math.prod(SHAPE[1:])
    closed = terms.c_v * (x_next - mean) / (elements * terms.std.square())
    torch.testing.assert_close(gradient, closed.detach(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_neighbours_at_different_steps_are_computed_as_if_alone(sampler: Sampler) -> None:
    x, v, noise = _normal(1), _normal(2), _normal(3)
    index = torch.tensor([3, 0])
    terms = step_terms(sampler, SIGMAS, index, 0.7, 3)
    together, mean = sample_next(terms, x, v, noise)
    scores = log_prob(sampler, together, mean, terms)
    for i in range(2):
        one = slice(i, i + 1)
        terms = step_terms(sampler, SIGMAS, index[one], 0.7, 3)
        alone, mean = sample_next(terms, x[one], v[one], noise[one])
        assert torch.equal(alone, together[one])
        assert torch.equal(log_prob(sampler, alone, mean, terms), scores[one])
    euler = euler_step(SIGMAS, index, x, v)
    assert torch.equal(euler[1:], euler_step(SIGMAS, index[1:], x[1:], v[1:]))


@pytest.mark.parametrize("index", [-1, 4])
def test_a_step_outside_the_table_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 4\)"):
        step_terms("flow_sde", SIGMAS, torch.tensor([0, index]), 0.7, 3)
    with pytest.raises(ValueError, match=r"outside \[0, 4\)"):
        euler_step(SIGMAS, torch.tensor([0, index]), _normal(1), _normal(2))


def test_an_unknown_sampler_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'sde'.*flow_sde, cps"):
        step_terms("sde", SIGMAS, _at(0), 0.7, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_cast_to_the_type_of_the_sigma_table(sampler: Sampler) -> None:
    for sigma_type, computed in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        terms = step_terms(sampler, SIGMAS.to(sigma_type), _at(1), 0.7, 3)
        x_next, _ = sample_next(terms, _normal(1).bfloat16(), _normal(2).bfloat16(), _normal(3))
        assert terms.c_x.dtype == terms.std.dtype == x_next.dtype == computed
