"""Sampler steps equal the published implementations: values, re-scored log-probs and their gradients."""

import pytest
import torch
from golden_cases import Case, assert_close, golden

from digenrl.algorithms.steps import Sampler, euler_step, log_prob, sample_next, step_mean, step_terms


def _check_flowgrpo(case: Case, sampler: Sampler, noise_level: float) -> None:
    # Gradients come back in the type of the model's output, so those of bfloat16 cases are rounded to it.
    given = torch.bfloat16 if case.parameters.get("inputs_bf16") else case["in_sample"].dtype
    x, v, noise = case["in_sample"].to(given), case["in_model_output"].to(given), case["in_noise"]
    terms = step_terms(sampler, case["in_sigmas"], case["in_step_index"], noise_level, x.ndim)
    x_next, mean = sample_next(terms, x, v, noise)
    assert_close(mean, case["out_prev_mean"])
    assert_close(x_next, case["out_prev_sample"])
    assert_close(terms.g, case["out_std_dev_t"])
    assert_close(log_prob(sampler, x_next, mean, terms), case["out_log_prob"])

    v_new = case["in_model_output_new"].to(given, copy=True).requires_grad_()
    mean_new = step_mean(terms, x, v_new)
    rescored = log_prob(sampler, case["out_prev_sample"], mean_new, terms)
    assert_close(mean_new.detach(), case["out_prev_mean_new"])
    assert_close(rescored.detach(), case["out_log_prob_new"])
    if "in_grad_weights" in case:
        (gradient,) = torch.autograd.grad((case["in_grad_weights"] * rescored).sum(), v_new)
        assert_close(gradient.to(x_next.dtype), case["out_grad_model_output_new"])


@golden("flowgrpo_sde")
def test_flow_sde(case: Case) -> None:
    _check_flowgrpo(case, "flow_sde", case.parameters["noise_level"])


@golden("flowgrpo_cps")
def test_cps(case: Case) -> None:
    _check_flowgrpo(case, "cps", case.parameters["noise_level"])


@golden("flowgrpo_wan")
def test_wan_sde(case: Case) -> None:
    _check_flowgrpo(case, "wan_sde", 1.0)
    terms = step_terms("wan_sde", case["in_sigmas"], case["in_step_index"], 1.0, case["in_sample"].ndim)
    assert_close(terms.std, case["out_total_std"])


@golden("flowgrpo_rollout")
def test_trajectory_with_a_stochastic_window(case: Case) -> None:
    sigmas, noise, target = case["in_sigmas"], case["in_noise"], case["in_target"]
    sampler: Sampler = "flow_sde" if case.parameters["sde_type"] == "sde" else "cps"
    first, last = case.parameters["sde_window"]
    x = case["in_x_start"]
    latents, log_probs = [x], []
    for step in range(len(sigmas) - 1):
        index = torch.full((len(x),), step)
        v = 0.8 * (x - target) + 0.1 * sigmas[step] * torch.tanh(x)
        if first <= step < last:
            terms = step_terms(sampler, sigmas, index, case.parameters["noise_level"], x.ndim)
            x, mean = sample_next(terms, x, v, noise[step])
            log_probs.append(log_prob(sampler, x, mean, terms))
        else:
            x = euler_step(sigmas, index, x, v)
        latents.append(x)
    assert_close(torch.stack(latents), case["out_latents"])
    assert_close(torch.stack(log_probs, dim=1), case["out_log_probs"])


def _dance(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sigmas, latents and per-sample indices of a case with one scalar index."""
    x = case["in_latents"]
    return case["in_sigmas"], x, case["in_index"].expand(len(x))


@golden("dance_step")
def test_dance_sde(case: Case) -> None:
    sigmas, x, index = _dance(case)
    v = case["in_model_output"]
    terms = step_terms("dance_sde", sigmas, index, case.parameters["eta"], x.ndim)
    mean = step_mean(terms, x, v)
    if case.parameters["model_output_bf16"]:
        # The reference multiplies in bfloat16; everything here is float32, so only its rounding error separates them.
        torch.testing.assert_close(mean, case["out_prev_mean"], rtol=0, atol=2e-2)
        return
    assert_close(mean, case["out_prev_mean"])
    if not case.parameters["grpo"]:
        return
    x_next, _ = sample_next(terms, x, v, case["in_noise"])
    assert_close(x_next, case["out_prev_sample"])
    assert_close(log_prob("dance_sde", x_next, mean, terms), case["out_log_prob"])
    v = v.clone().requires_grad_()
    rescored = log_prob("dance_sde", case["out_prev_sample"], step_mean(terms, x, 1.01 * v), terms)
    (gradient,) = torch.autograd.grad((case["in_grad_weights"] * rescored).sum(), v)
    assert_close(rescored.detach(), case["out_log_prob_rescored"])
    assert_close(gradient, case["out_grad_model_output"])


@golden("mix_flow_step")
def test_mixgrpo_uses_the_flow_sde_and_euler_steps(case: Case) -> None:
    sigmas, x, index = _dance(case)
    v = case["in_model_output"]
    terms = step_terms("flow_sde", sigmas, index, case.parameters["eta"], x.ndim)
    x_next, mean = sample_next(terms, x, v, case["in_noise"])
    if case.parameters["deterministic"]:
        x_next = euler_step(sigmas, index, x, v)
    assert_close(mean, case["out_prev_mean"])
    assert_close(x_next, case["out_prev_sample"])
    assert_close(terms.std.flatten()[0], case["out_total_std"])
    assert_close(log_prob("flow_sde", x_next, mean, terms), case["out_log_prob"])


@golden("mix_dance_step")
def test_mixgrpo_dance_step_differs_by_the_normaliser_alone(case: Case) -> None:
    sigmas, x, index = _dance(case)
    terms = step_terms("dance_sde", sigmas, index, case.parameters["eta"], x.ndim)
    x_next, mean = sample_next(terms, x, case["in_model_output"], case["in_noise"])
    assert_close(x_next, case["out_prev_sample"])
    normaliser = terms.std.flatten().log() + 0.5 * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64)).to(
        x.dtype
    )
    assert_close(log_prob("dance_sde", x_next, mean, terms) + normaliser, case["out_log_prob"])


@golden("flowgrpo_sde")
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_widened_before_any_arithmetic(case: Case, narrow: torch.dtype) -> None:
    x, v = case["in_sample"].to(narrow), case["in_model_output"].to(narrow)
    terms = step_terms("flow_sde", case["in_sigmas"], case["in_step_index"], 0.7, x.ndim)
    wide = case["in_sigmas"].dtype
    assert torch.equal(step_mean(terms, x, v), step_mean(terms, x.to(wide), v.to(wide)))
