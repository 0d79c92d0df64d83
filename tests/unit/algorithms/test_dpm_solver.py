"""DPM-Solver++: published trajectories, diffusers' scheduler, exact identities, order of convergence, the edges."""

import math
import warnings
from typing import Literal, get_args

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from golden_cases import Case, assert_close, golden

from digenrl.algorithms.dpm_solver import (
    SolverType,
    compress_tail,
    compressed_steps,
    predict_clean,
    solver_sample,
    solver_step,
    solver_terms,
)
from digenrl.algorithms.steps import euler_step

SOLVERS = get_args(SolverType)
#: SD3's table of 4 steps, shift 3 applied twice.
SIGMAS = torch.tensor([1.0, 0.858138, 0.601734, 0.00892857, 0.0], dtype=torch.float64)
SHAPE = (2, 3, 4)


def _normal(seed: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _shifted(times: torch.Tensor, shift: float) -> torch.Tensor:
    return shift * times / (1 + (shift - 1) * times)


def _table(steps: int, shift: float = 3.0) -> torch.Tensor:
    return _shifted(torch.linspace(1, 0, steps + 1, dtype=torch.float64), shift)


def _at(step: int, batch: int = 2) -> torch.Tensor:
    return torch.full((batch,), step)


@golden("mix_dpm")
def test_flash_steps_from_the_middle_of_a_trajectory(case: Case) -> None:
    p, x, before = case.parameters, case["in_x_start"], None
    for i in range(p["count"]):
        index = _at(p["start"] + i, len(x))
        terms = solver_terms(case["in_sigmas"], index, x.ndim, solver=p["solver_type"], stochastic=p["sde"])
        clean = predict_clean(case["in_sigmas"], index, x, case["in_model_outputs"][i])
        x = solver_sample(terms, x, clean, before, case["in_noise"][i])[0]
        before = clean if p["order"] == 2 else None
        assert_close(clean, case["out_pred_x0"][i])
        assert_close(x, case["out_x"][i])


@golden("nft_solver")
def test_rollout_of_diffusion_nft(case: Case) -> None:
    sigmas, target, x = case["in_sigmas"], case["in_target"], case["in_x_start"]
    before, latents = None, [x]
    for step in range(case.parameters["num_steps"]):
        index = _at(step, len(x))
        v = 0.8 * (x - target) + 0.1 * sigmas[step] * torch.tanh(x)
        clean = predict_clean(sigmas, index, x, v)
        x = solver_step(solver_terms(sigmas, index, x.ndim), x, clean, before)
        before = clean if case.parameters["solver"] == "dpm2" else None
        latents.append(x)
    assert_close(torch.stack(latents), case["out_latents"])


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("steps", [10, 20])
def test_steps_are_those_of_diffusers(steps: int, solver: SolverType, stochastic: bool, order: Literal[1, 2]) -> None:
    scheduler = DPMSolverMultistepScheduler(
        solver_order=order,
        prediction_type="flow_prediction",
        algorithm_type="sde-dpmsolver++" if stochastic else "dpmsolver++",
        solver_type=solver,
        use_flow_sigmas=True,
        flow_shift=3.0,
    )
    with warnings.catch_warnings():  # of a schedule that flow sigmas do not use
        warnings.simplefilter("ignore", DeprecationWarning)
        scheduler.set_timesteps(steps)
    sigmas = scheduler.sigmas
    scheduler.sigmas = sigmas.double()  # else its coefficients are differences of nearly equal float32 logarithms
    x, target, before = _normal(1).float(), _normal(2).float(), None
    theirs = x
    for step, timestep in enumerate(scheduler.timesteps):
        noise = _normal(100 + step).float()
        v = 0.8 * (x - target) + 0.1 * sigmas[step] * torch.tanh(x)
        theirs = scheduler.step(v, timestep, theirs, variance_noise=noise).prev_sample
        index = _at(step)
        terms = solver_terms(sigmas, index, x.ndim, solver=solver, stochastic=stochastic)
        clean = predict_clean(sigmas, index, x, v)
        x = solver_sample(terms, x, clean, before, noise)[0]
        before = clean if order == 2 else None
        torch.testing.assert_close(x, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("step", range(4))
def test_the_first_order_ode_step_is_the_euler_step(step: int) -> None:
    x, v, index = _normal(1), _normal(2), _at(step)
    x_next = solver_step(solver_terms(SIGMAS, index, 3), x, predict_clean(SIGMAS, index, x, v))
    torch.testing.assert_close(x_next, euler_step(SIGMAS, index, x, v), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_known_clean_latent_keeps_the_distribution_of_the_forward_process(
    solver: SolverType, stochastic: bool
) -> None:
    """x ~ N(alpha x0, sigma^2) becomes N(alpha' x0, sigma'^2), whatever the step."""
    for step in range(4):
        terms = solver_terms(SIGMAS, _at(step), 3, solver=solver, stochastic=stochastic)
        sigma, sigma_next = SIGMAS[step], SIGMAS[step + 1]
        mean = terms.c_x * (1 - sigma) + terms.c_clean
        variance = (terms.c_x * sigma).square() + terms.std.square()
        torch.testing.assert_close(mean, (1 - sigma_next).expand(2, 1, 1), rtol=1e-13, atol=0)
        torch.testing.assert_close(variance, sigma_next.square().expand(2, 1, 1), rtol=1e-13, atol=0)


def _error(steps: int, order: int, solver: SolverType) -> float:
    """Distance from the exact solution for data ~ N(0, s^2), whose velocity is known; sigma 0.95 to 0.05."""
    spread, x = 0.3, torch.ones(1, 1, dtype=torch.float64)
    sigmas = torch.cat([torch.linspace(0.95, 0.05, steps + 1, dtype=torch.float64), torch.zeros(1)])
    deviation = ((1 - sigmas) ** 2 * spread**2 + sigmas**2).sqrt()
    before = None
    for step in range(steps):
        clean = (1 - sigmas[step]) * spread**2 / deviation[step] ** 2 * x
        x = solver_step(solver_terms(sigmas, _at(step, 1), 2, solver=solver), x, clean, before)
        before = clean if order == 2 else None
    return abs(float(x - deviation[steps] / deviation[0]))


@pytest.mark.parametrize("solver", SOLVERS)
def test_errors_fall_with_the_order_of_the_solver(solver: SolverType) -> None:
    assert math.log2(_error(64, 1, solver) / _error(128, 1, solver)) == pytest.approx(1, abs=0.15)
    assert math.log2(_error(64, 2, solver) / _error(128, 2, solver)) == pytest.approx(2, abs=0.15)
    assert _error(64, 2, solver) < 0.2 * _error(64, 1, solver)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_every_step_is_finite_and_the_first_two_and_the_last_are_of_first_order(
    solver: SolverType, stochastic: bool, dtype: torch.dtype
) -> None:
    """h is infinite on the first and the last step, and h_ on the second."""
    for step in range(4):
        terms = solver_terms(SIGMAS.to(dtype), _at(step), 3, solver=solver, stochastic=stochastic)
        for term in (terms.c_x, terms.c_clean, terms.c_change, terms.std):
            assert term.dtype == dtype and bool(term.isfinite().all())
        assert bool((terms.c_change != 0).all()) is (step == 2)
        assert bool((terms.std > 0).all()) is (stochastic and step < 3)


@pytest.mark.parametrize("stochastic", [False, True])
def test_the_last_step_returns_the_prediction_of_the_clean_latent(stochastic: bool) -> None:
    x, clean = _normal(1), _normal(2)
    terms = solver_terms(SIGMAS, _at(3), 3, stochastic=stochastic)
    assert torch.equal(solver_sample(terms, x, clean, _normal(3), _normal(4))[0], clean)


def test_the_stochastic_step_from_pure_noise_forgets_it() -> None:
    terms = solver_terms(SIGMAS, _at(0), 3, stochastic=True)
    x_next, mean = solver_sample(terms, _normal(1), _normal(2), None, _normal(3))
    assert torch.equal(mean, (1 - SIGMAS[1]) * _normal(2))
    assert torch.equal(x_next, mean + SIGMAS[1] * _normal(3))


def test_a_table_that_begins_just_below_one_is_of_second_order_from_its_second_step() -> None:
    near = SIGMAS.clone()
    near[0] = 1 - 1e-6
    exact, almost = (solver_terms(table, _at(1), 3).c_change for table in (SIGMAS, near))
    assert bool((almost > 0).all()) and bool((exact == 0).all())


def test_without_a_prediction_before_a_step_is_of_first_order() -> None:
    terms = solver_terms(SIGMAS, _at(2), 3)
    x, clean = _normal(1), _normal(2)
    assert torch.equal(solver_step(terms, x, clean), solver_step(terms, x, clean, clean))
    assert not torch.equal(solver_step(terms, x, clean), solver_step(terms, x, clean, _normal(3)))


def test_neighbours_at_different_steps_are_computed_as_if_alone() -> None:
    x, clean, before, noise, index = _normal(1), _normal(2), _normal(3), _normal(4), torch.tensor([2, 0])
    together = solver_sample(solver_terms(SIGMAS, index, 3, stochastic=True), x, clean, before, noise)[0]
    for i in range(2):
        one = slice(i, i + 1)
        terms = solver_terms(SIGMAS, index[one], 3, stochastic=True)
        assert torch.equal(solver_sample(terms, x[one], clean[one], before[one], noise[one])[0], together[one])


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_before_any_arithmetic(narrow: torch.dtype) -> None:
    x, v, before = (_normal(i).to(narrow) for i in range(3))
    sigmas, index = SIGMAS.float(), _at(2)
    terms = solver_terms(sigmas, index, 3)
    clean = predict_clean(sigmas, index, x, v)
    assert torch.equal(clean, predict_clean(sigmas, index, x.float(), v.float()))
    assert torch.equal(solver_step(terms, x, clean, before), solver_step(terms, x.float(), clean, before.float()))


@pytest.mark.parametrize("index", [-1, 4])
def test_a_step_outside_the_table_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 4\)"):
        solver_terms(SIGMAS, torch.tensor([0, index]), 3)
    with pytest.raises(ValueError, match=r"outside \[0, 4\)"):
        predict_clean(SIGMAS, torch.tensor([0, index]), _normal(1), _normal(2))


def test_an_unknown_solver_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'dpm2'.*midpoint, heun"):
        solver_terms(SIGMAS, _at(1), 3, solver="dpm2")  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [0, 3, 12, 19])
def test_the_compressed_tail_has_the_published_noise_levels(last: int) -> None:
    """For the published schedule, whose time before the shift is 1 - step / N."""
    sigmas = _table(25)
    points = int((25 - last) * 0.4)
    expected = _shifted(torch.linspace(1 - (last + 1) / 25, 0, points, dtype=torch.float64), 3.0)
    compressed = compress_tail(sigmas, last, 0.4, 3.0)
    torch.testing.assert_close(compressed[last + 1 :], expected, rtol=1e-12, atol=1e-15)
    assert torch.equal(compressed[: last + 2], sigmas[: last + 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", range(25))
def test_a_compressed_table_decreases_to_zero_and_is_not_longer(last: int, dtype: torch.dtype) -> None:
    sigmas = _table(25).to(dtype)
    compressed = compress_tail(sigmas, last, 0.4, 3.0)
    assert compressed.dtype == dtype
    assert compressed[-1] == 0 and bool((compressed.diff() < 0).all())
    assert len(compressed) == compressed_steps(25, last, 0.4) + 1 <= len(sigmas)
    assert torch.equal(compressed[: last + 2], sigmas[: last + 2])


@pytest.mark.parametrize("last", range(10))
def test_a_ratio_of_one_changes_nothing(last: int) -> None:
    torch.testing.assert_close(compress_tail(_table(10), last, 1.0, 3.0), _table(10), rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("last", "ratio", "message"), [(-1, 0.4, "last=-1"), (10, 0.4, "last=10"), (3, 0.0, "ratio=0")]
)
def test_a_tail_that_cannot_be_is_refused(last: int, ratio: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compress_tail(_table(10), last, ratio, 3.0)
