"""The memory model against the allocator, on a size that takes a second."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.memory import Case
from benchmarks.sides import peak_bytes
from digenrl.config import LoraConfig, ModelConfig
from digenrl.config.load import load_config
from digenrl.memory import LiveBytes, Need, capabilities, need_of, rollout_pass, trace, train_pass
from digenrl.models.base import Geometry
from digenrl.models.blank import blank_model
from digenrl.policy import Policy

LORA = LoraConfig(rank=8, alpha=8)
WIDE = Case(
    ModelConfig(family="wan", path="tiny:wan", height=128, width=128, frames=5, max_sequence_length=16),
    {"num_layers": 3, "attention_head_dim": 32, "num_attention_heads": 8, "ffn_dim": 512},
    2,
)


def test_views_count_once_and_what_is_gone_not_at_all() -> None:
    weight = torch.ones(1000)
    live = LiveBytes()
    with live:
        doubled = weight * 2
        doubled.reshape(10, 100).T.sum()
        del doubled
        again = weight[:500] + 1
    assert live.peak == 4000 + 4 and live.now == 2000 and again.nbytes == 2000


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_trace_is_what_the_allocator_gives(checkpointing: bool) -> None:
    config = WIDE.model.model_copy(update={"gradient_checkpointing": checkpointing})
    move = nn.Module._apply
    traced = trace(config, LORA, WIDE.micro_batch, transformer=WIDE.transformer)
    assert nn.Module._apply is move
    model = blank_model(config, transformer=WIDE.transformer)
    policy = Policy(model, LORA, seed=0)
    policy.bind(policy.initial_adapter(), 0)
    assert traced.adapter == sum(p.nbytes for p in policy.trainable().values())
    assert traced.base + traced.adapter == sum(p.nbytes for p in model.transformer.parameters())
    shape = model.latent_shape(Geometry(128, 128, 5))
    size = WIDE.micro_batch
    measured = peak_bytes(lambda: train_pass(policy, config, 3 * size, shape), "cpu")
    assert traced.train_fixed + 3 * traced.train_timestep == pytest.approx(measured, rel=0.15)
    measured = peak_bytes(lambda: rollout_pass(policy, config, size, shape), "cpu")
    assert traced.rollout == pytest.approx(measured, rel=0.15)
    if checkpointing:
        kept = trace(WIDE.model, LORA, size, transformer=WIDE.transformer)  # auto: it is a small model
        assert traced.train_timestep < 0.6 * kept.train_timestep


def test_a_worker_holds_what_its_run_says() -> None:
    plain = need_of(load_config("tiny-smoke", []))
    assert plain is not None
    doubled = need_of(load_config("tiny-smoke", ["lora.rank=32"]))
    averaged = need_of(load_config("tiny-smoke", ["optimizer.ema_decay=0.9"]))
    assert doubled is not None and averaged is not None
    assert doubled.states == pytest.approx(2 * plain.states) and doubled.base == plain.base
    assert plain.states < averaged.states < 1.5 * plain.states
    # 32 samples on 2 workers, 3 steps: entered and left latents of 4 x 6 x 12 float32.
    assert plain.trajectories == 8 * 2 * 3 * 4 * 6 * 12 * 4
    assert need_of(load_config("tiny-smoke", ["model.path=somebody/elses"])) is None


def test_capabilities_are_what_fits() -> None:
    need = Need(base=10.0, states=5.0, trajectories=1.0, rollout=4.0, fixed=1.0, timestep=2.0)
    assert capabilities(need, 3, 23.0) == {"rollout", "train", "score"}
    assert capabilities(need, 3, 22.9) == {"rollout", "score"}
    assert capabilities(need, 3, 14.0) == {"score"}
    assert capabilities(None, 3, 1.0) == capabilities(need, 3, None) == {"rollout", "train", "score"}
