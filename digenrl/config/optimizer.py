"""The optimiser."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from digenrl.config.section import Decay, PositiveInt, Section


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule, in iterations."""

    learning_rate: float = Field(3e-4, gt=0, description="Peak learning rate.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(1e-4, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    warmup_iterations: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    ema_decay: Decay | None = Field(
        None,
        description="Evaluate, sample and export a moving average of the weights, which forgets at most this share of "
        "itself at a step (published: 0.9); null: the weights themselves.",
    )
    ema_every: PositiveInt = Field(8, description="The average moves at every n-th optimiser step.")
    decay: Literal["constant", "linear"] = Field("constant", description="Learning rate after warm-up.")
    final_fraction: float = Field(0.1, ge=0, le=1, description="Fraction of the peak reached at the end (linear).")
