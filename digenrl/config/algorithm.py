"""How samples are drawn and learned from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from digenrl.config.section import PositiveInt, Section


class AlgorithmConfig(Section):
    """FlowGRPO: sampling, advantages and loss."""

    name: Literal["flow_grpo"] = Field("flow_grpo", description="Training algorithm.")
    sampler: Literal["flow_sde", "cps"] = Field("flow_sde", description="How stochastic steps are drawn.")
    noise_level: float = Field(0.7, gt=0, le=2, description="Noise level a of stochastic steps.")
    num_steps: int = Field(10, ge=2, le=1000, description="Denoising steps T of training rollouts.")
    sde_window_size: int = Field(
        0, ge=0, description="Consecutive stochastic, trained steps (Flow-GRPO-Fast); 0 means all but the last step."
    )
    sde_window_range: tuple[int, int] | None = Field(
        None, description="The window lies within steps [lo, hi); null means the first half of the trajectory."
    )
    prompts_per_iteration: PositiveInt = Field(8, description="Prompt groups P per iteration.")
    samples_per_prompt: int = Field(16, ge=2, description="Samples G per group.")
    updates_per_iteration: PositiveInt = Field(
        2, description="Optimiser steps U per iteration; each takes whole groups in order."
    )
    clip_range: float = Field(1e-3, gt=0, lt=1, description="PPO clip range; not portable between models.")
    adv_clip_max: float = Field(5.0, gt=0, description="Advantages are clipped to +- this.")
    std_scope: Literal["group", "update", "iteration"] = Field(
        "group", description="Over which samples the reward's standard deviation is taken."
    )
    zero_variance_tolerance: float = Field(
        1e-8, ge=0, description="A group whose rewards differ by no more has no policy term."
    )
    kl_beta: float = Field(0.0, ge=0, description="Weight of the KL to the base model (adapter off).")

    @model_validator(mode="after")
    def _cross(self) -> AlgorithmConfig:
        if self.prompts_per_iteration % self.updates_per_iteration:
            raise ValueError(
                f"updates_per_iteration={self.updates_per_iteration} must divide "
                f"prompts_per_iteration={self.prompts_per_iteration}: each optimiser step takes whole groups"
            )
        lo, hi = self.window_range
        if not 0 <= lo < hi <= self.num_steps:
            raise ValueError(f"sde_window_range=[{lo}, {hi}] must satisfy 0 <= lo < hi <= num_steps={self.num_steps}")
        if self.sde_window_size > hi - lo:
            raise ValueError(f"sde_window_size={self.sde_window_size} does not fit into sde_window_range=[{lo}, {hi}]")
        return self

    @property
    def window_range(self) -> tuple[int, int]:
        """The range the window is drawn from, with the default filled in."""
        return self.sde_window_range or (0, max(self.num_steps // 2, self.sde_window_size, 1))
