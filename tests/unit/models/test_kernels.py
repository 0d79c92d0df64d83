"""Attention kernels and compiled rollout: what is refused, and that the rest computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry
from pydantic import ValidationError

from digenrl.config import LoraConfig, ModelConfig
from digenrl.models.base import Geometry
from digenrl.models.blank import blank_model
from digenrl.models.checkpoint import CheckpointError
from digenrl.models.pipeline import PipelineModel
from digenrl.models.verify import relative, rollout_of
from digenrl.policy import Policy
from digenrl.rollout import advance, start_rollout

FLUX = ModelConfig(family="flux", path="tiny:flux", height=32, width=32, max_sequence_length=8)


def _model(**changes: object) -> PipelineModel:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return blank_model(FLUX.model_copy(update=changes))


def _velocity(model: PipelineModel) -> torch.Tensor:
    latents = torch.linspace(-1, 1, 2 * 16 * 16).reshape(2, 16, 4, 4)
    with torch.no_grad():
        return model.velocity(latents, torch.tensor([0.9, 0.3]), model.blank_embeddings(2), 3.5)


def test_another_kernel_computes_the_same_and_stays_with_its_model() -> None:
    before = Registry.get_active_backend()
    plain, math = _velocity(_model()), _velocity(_model(attention="_native_math"))
    assert relative(math, plain) < 1e-5
    assert Registry.get_active_backend() == before


@pytest.mark.parametrize("name", ["flash", "_native_cudnn", "xformers"])
def test_a_kernel_that_does_not_run_here_is_refused(name: str) -> None:
    before = Registry.get_active_backend()
    with pytest.raises(
        CheckpointError, match=rf"model.attention='{name}' does not run on cpu in torch.float32: .*auto"
    ):
        _model(attention=name)
    assert Registry.get_active_backend() == before


def test_sd3_takes_no_other_kernel() -> None:
    blank_model(ModelConfig(attention="native"))
    with pytest.raises(CheckpointError, match="SD3Transformer2DModel takes no other kernel"):
        blank_model(ModelConfig(attention="_native_math"))


def test_a_kernel_without_a_backward_pass_is_no_choice() -> None:
    with pytest.raises(ValidationError):
        ModelConfig(attention="sage")


def _compiling_to(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
    """Compilation takes half a minute: stand in for what it would make."""
    calls: list[int] = []

    def compiled(transformer: Any) -> Callable[..., Any]:
        def run(**inputs: Any) -> tuple[torch.Tensor]:
            calls.append(1)
            return (change(transformer(**inputs)[0]),)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    return calls


def test_only_rollouts_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = _compiling_to(monkeypatch, lambda output: output * (1 + 5e-5))
    model = _model(compile=True)
    policy = Policy(model, LoraConfig(rank=2, alpha=2), seed=0)
    policy.bind(policy.initial_adapter(), 0)
    _velocity(model)
    assert not calls
    spec = rollout_of(policy, Geometry(32, 32), 2, (0,), 3.5)
    advance(policy, spec, start_rollout(policy, spec), model.blank_embeddings(2), 0, 4)
    assert len(calls) == 4
    _velocity(model)
    assert len(calls) == 4


def test_a_compiled_transformer_that_computes_something_else_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    _compiling_to(monkeypatch, lambda output: output * (1 + 5e-4))
    model = _model(compile=True)
    with (
        model.rollout(),
        pytest.raises(CheckpointError, match=r"differs by 0.0005 of its norm.*write model.compile=false"),
    ):
        _velocity(model)
