"""AdamW equals torch.optim.AdamW; a bad gradient changes nothing; the learning rate follows its schedule."""

import pytest
import torch

from digenrl.algorithms.optimizer import OptimizerState, adamw_step, evaluated, gradient_norm, learning_rate
from digenrl.config import OptimizerConfig

SHAPES = {"a.lora_A.weight": (3, 5), "a.lora_B.weight": (7, 3), "b.lora_A.weight": (11,)}


def _tensors(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def _torch_adamw(config: OptimizerConfig, scale: float, steps: int) -> dict[str, torch.Tensor]:
    weights = {name: torch.nn.Parameter(w) for name, w in _tensors(0).items()}
    adamw = torch.optim.AdamW(
        weights.values(),
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        foreach=False,
    )
    for step in range(steps):
        for name, gradient in _tensors(1 + step, scale).items():
            weights[name].grad = gradient
        torch.nn.utils.clip_grad_norm_(weights.values(), config.max_grad_norm)
        adamw.step()
    return {name: w.detach() for name, w in weights.items()}


def _ours(config: OptimizerConfig, scale: float, steps: int) -> dict[str, torch.Tensor]:
    weights = _tensors(0)
    state = OptimizerState.initial(weights)
    for step in range(steps):
        result = adamw_step(weights, _tensors(1 + step, scale), state, config, config.learning_rate)
        weights, state = result.weights, result.state
    assert state.step == steps
    return weights


CONFIGS = [
    OptimizerConfig(),
    OptimizerConfig(learning_rate=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    OptimizerConfig(weight_decay=0.0),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_equal_to_torch_to_the_bit_where_the_norm_is_not_clipped(config: OptimizerConfig) -> None:
    expected, actual = _torch_adamw(config, 1e-3, 20), _ours(config, 1e-3, 20)
    assert all(torch.equal(actual[name], expected[name]) for name in SHAPES)


@pytest.mark.parametrize("config", CONFIGS)
def test_equal_to_torch_where_the_norm_is_clipped(config: OptimizerConfig) -> None:
    expected, actual = _torch_adamw(config, 10.0, 20), _ours(config, 10.0, 20)
    for name in SHAPES:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-6, atol=1e-7)


def test_reports_the_norm_before_clipping_and_changes_nothing_in_place() -> None:
    weights, gradient = _tensors(0), _tensors(1, 100.0)
    state = OptimizerState.initial(weights)
    result = adamw_step(weights, gradient, state, OptimizerConfig(), 1e-3)
    norm = torch.cat([g.flatten() for g in gradient.values()]).double().norm()
    assert result.grad_norm == gradient_norm(gradient) == pytest.approx(float(norm), rel=1e-12)
    assert result.grad_norm > 100 and not result.skipped
    assert all(torch.equal(weights[name], _tensors(0)[name]) for name in SHAPES)
    assert all(not moment.any() for moment in state.exp_avg.values())
    assert all(not torch.equal(result.weights[name], weights[name]) for name in SHAPES)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_skips_the_step(bad: float) -> None:
    weights, gradient = _tensors(0), _tensors(1)
    gradient["a.lora_B.weight"][2, 1] = bad
    state = OptimizerState.initial(weights)
    result = adamw_step(weights, gradient, state, OptimizerConfig(), 1e-3)
    assert result.skipped
    assert result.state is state and state.step == 0
    assert all(torch.equal(result.weights[name], _tensors(0)[name]) for name in SHAPES)


def test_large_finite_gradients_do_not_overflow_their_norm() -> None:
    gradient = {"w": torch.full((4,), 1e30)}
    result = adamw_step({"w": torch.zeros(4)}, gradient, OptimizerState.initial(gradient), OptimizerConfig(), 1e-3)
    assert not result.skipped and result.grad_norm == pytest.approx(2e30)


def test_state_survives_the_flat_form() -> None:
    weights = _tensors(0)
    state = adamw_step(weights, _tensors(1), OptimizerState.initial(weights), OptimizerConfig(), 1e-3).state
    back = OptimizerState.from_tensors(state.to_tensors())
    assert back.step == 1
    for name in SHAPES:
        assert torch.equal(back.exp_avg[name], state.exp_avg[name])
        assert torch.equal(back.exp_avg_sq[name], state.exp_avg_sq[name])


def test_the_average_follows_the_weights_and_survives_the_flat_form() -> None:
    """At every second step; the first moves it by nine tenths of the way, the third by what the bound allows."""
    config = OptimizerConfig(ema_decay=0.25, ema_every=2)
    weights, state = _tensors(0), OptimizerState.initial(_tensors(0), averaged=True)
    average = {name: w.double() for name, w in weights.items()}
    for step in range(4):
        result = adamw_step(weights, _tensors(step + 1), state, config, 1e-2)
        weights, state = result.weights, OptimizerState.from_tensors(result.state.to_tensors())
        if step % 2:
            rate = 1 - min((1 + step) / (10 + step), 0.25)
            average = {name: old + rate * (weights[name].double() - old) for name, old in average.items()}
        for name in SHAPES:
            torch.testing.assert_close(state.average[name].double(), average[name], rtol=1e-6, atol=1e-7)
    assert evaluated(weights, state.to_tensors()).keys() == weights.keys()
    assert all(evaluated(weights, state.to_tensors())[name] is state.average[name] for name in SHAPES)


def test_without_an_average_the_weights_themselves_are_evaluated() -> None:
    weights = _tensors(0)
    state = adamw_step(weights, _tensors(1), OptimizerState.initial(weights), OptimizerConfig(), 1e-3).state
    assert not state.average and not any(name.startswith("average") for name in state.to_tensors())
    assert evaluated(weights, state.to_tensors()) == weights


def test_a_skipped_step_leaves_the_average_alone() -> None:
    weights = _tensors(0)
    state = OptimizerState.initial(weights, averaged=True)
    broken = {name: torch.full_like(w, float("nan")) for name, w in weights.items()}
    assert adamw_step(weights, broken, state, OptimizerConfig(ema_decay=0.9, ema_every=1), 1e-3).state is state


@pytest.mark.parametrize("damage", ["step", "exp_avg.a.lora_A.weight", "exp_avg_sq.b.lora_A.weight"])
def test_an_incomplete_flat_state_is_refused(damage: str) -> None:
    tensors = OptimizerState.initial(_tensors(0)).to_tensors()
    del tensors[damage]
    with pytest.raises(ValueError, match=r"optimiser state has no|names of the exp_avg_sq"):
        OptimizerState.from_tensors(tensors)


def test_foreign_entries_in_a_flat_state_are_refused() -> None:
    with pytest.raises(ValueError, match=r"holds 'momentum\.w'"):
        OptimizerState.from_tensors({"step": torch.tensor(0), "momentum.w": torch.zeros(1)})


def test_different_names_are_refused() -> None:
    weights = _tensors(0)
    state = OptimizerState.initial(weights)
    with pytest.raises(ValueError, match=r"gradient differ.*missing \['b.lora_A.weight'\]"):
        adamw_step(weights, {n: w for n, w in weights.items() if n != "b.lora_A.weight"}, state, OptimizerConfig(), 1.0)


def _rates(iterations: int, **options: object) -> list[float]:
    config = OptimizerConfig(learning_rate=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(config, iterations, i) for i in range(iterations)]


def test_constant_rate() -> None:
    assert _rates(4) == [1.0] * 4


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    assert _rates(6, warmup_iterations=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_decay_reaches_its_end_at_the_last_iteration() -> None:
    assert _rates(5, decay="linear", final_fraction=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert _rates(6, decay="linear", final_fraction=0.0, warmup_iterations=2) == pytest.approx(
        [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]
    )


@pytest.mark.parametrize(("iterations", "warmup"), [(1, 0), (1, 1), (3, 3)])
def test_a_run_with_no_room_to_decay_ends_at_the_peak(iterations: int, warmup: int) -> None:
    assert _rates(iterations, decay="linear", warmup_iterations=warmup)[-1] == 1.0
