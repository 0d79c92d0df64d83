"""How samples are drawn and learned from: one section for each algorithm, told apart by `name`.

AlgorithmSection    what all algorithms have: the size of an iteration, and from rewards to advantages
GrpoSection         and what those with a policy gradient have: the KL to the base model
WindowedSection     and those that draw a window of consecutive steps
...Config           the algorithms, see `digenrl.algorithms`
AlgorithmConfig     any of them; without a name, flow_grpo
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from digenrl.config.section import PositiveInt, Section

#: Whose keys apply where a configuration does not name its algorithm.
DEFAULT = "flow_grpo"


class AlgorithmSection(Section):
    """What every algorithm has."""

    #: The key that bounds how far one iteration moves the policy, if there is one; it acts from the second update on.
    trust_region: ClassVar[str | None] = "clip_range"

    name: str = Field(description="Training algorithm; which other keys there are depends on it.")
    num_steps: int = Field(10, ge=2, le=1000, description="Denoising steps T of training rollouts.")
    prompts_per_iteration: PositiveInt = Field(8, description="Prompt groups P per iteration.")
    samples_per_prompt: int = Field(16, ge=2, description="Samples G per group.")
    updates_per_iteration: PositiveInt = Field(
        2, description="Optimiser steps U per iteration; each takes whole groups in order."
    )
    adv_clip_max: float | None = Field(5.0, gt=0, description="Advantages are clipped to +- this; null: not at all.")
    std_scope: Literal["group", "update", "iteration", "none"] = Field(
        "group",
        description="Over which samples the reward's standard deviation is taken; none: rewards are only centred "
        "(Dr.GRPO).",
    )
    std_ddof: Literal[0, 1] = Field(0, description="0: population, 1: sample standard deviation.")
    std_eps: float = Field(1e-4, gt=0, description="Added to the standard deviation.")
    trimmed_ratio: float = Field(
        0.0, ge=0, lt=1, description="Share of a group's lowest rewards that mean and standard deviation leave out."
    )
    best_of_n: int | None = Field(
        None,
        ge=2,
        multiple_of=2,
        description="Train on the n/2 samples of a group with the highest and the n/2 with the lowest advantage; null: "
        "on all.",
    )
    reward_aggregation: Literal["rewards", "advantages", "losses"] = Field(
        "rewards",
        description="With several rewards: rewards: the advantage of their weighted sum; advantages: the weighted sum "
        "of their advantages (GDPO); losses: that of their losses, each clipped by itself (DanceGRPO).",
    )
    zero_variance_tolerance: float = Field(
        1e-8, ge=0, description="A group whose rewards differ by no more has no policy term."
    )

    @model_validator(mode="after")
    def _sizes(self) -> AlgorithmSection:
        if self.prompts_per_iteration % self.updates_per_iteration:
            raise ValueError(
                f"updates_per_iteration={self.updates_per_iteration} must divide "
                f"prompts_per_iteration={self.prompts_per_iteration}: each optimiser step takes whole groups"
            )
        if self.best_of_n is not None and self.best_of_n > self.samples_per_prompt:
            raise ValueError(
                f"best_of_n={self.best_of_n} exceeds samples_per_prompt={self.samples_per_prompt}; use an even number "
                f"up to that, or null to train on all"
            )
        return self

    @property
    def closing_scope(self) -> Literal["group", "update", "iteration"]:
        """Which samples must be scored before the advantages of any of them are known."""
        return "group" if self.std_scope == "none" else self.std_scope

    @property
    def largest_advantage(self) -> float:
        """What no advantage exceeds before it is clipped; infinite if that depends on the rewards.

        The extreme is one sample against G - 1 equal ones, sqrt((G - 1)(G - ddof) / G) standard deviations from the
        mean.
        """
        if self.std_scope != "group" or self.trimmed_ratio > 0:
            return math.inf
        return extreme_of(self.samples_per_prompt, self.std_ddof)


class GrpoSection(AlgorithmSection):
    """What algorithms with a policy gradient have."""

    init_same_noise: bool = Field(
        False, description="All samples of a group start from the same noise; they differ by that of their steps."
    )
    kl_beta: float = Field(0.0, ge=0, description="Weight of the KL to the base model (adapter off).")
    kl_convention: Literal["image", "transition"] = Field(
        "image",
        description="Scale of that KL. transition: the standard deviation of the step, which makes it the KL of "
        "Gaussians (published weights of Wan); image: the diffusion rate (published weights of SD3).",
    )


class WindowedSection(GrpoSection):
    """What algorithms have that draw a window of consecutive steps."""

    noise_level: float = Field(
        0.7, gt=0, le=2, description="Noise level a of stochastic steps; for wan_sde a factor, 1 as published."
    )
    sde_window_size: int = Field(
        0, ge=0, description="Consecutive stochastic, trained steps (Flow-GRPO-Fast); 0 means all but the last step."
    )
    sde_window_range: tuple[int, int] | None = Field(
        None, description="The window lies within steps [lo, hi); null means the first half of the trajectory."
    )

    @model_validator(mode="after")
    def _window(self) -> WindowedSection:
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


class FlowGrpoConfig(WindowedSection):
    """Flow-GRPO: SDE steps and the clipped surrogate."""

    name: Literal["flow_grpo"] = Field("flow_grpo", description="Training algorithm.")
    sampler: Literal["flow_sde", "cps", "wan_sde"] = Field("flow_sde", description="How stochastic steps are drawn.")
    clip_range: float = Field(1e-3, gt=0, lt=1, description="PPO clip range; not portable between models.")


class DanceGrpoConfig(GrpoSection):
    """DanceGRPO: all steps but the last are stochastic with a constant rate, a random part of them is trained."""

    name: Literal["dance_grpo"] = Field("dance_grpo", description="Training algorithm.")
    eta: float = Field(0.3, gt=0, le=2, description="Diffusion rate of the stochastic steps.")
    trained_fraction: float = Field(
        0.6, gt=0, le=1, description="Share of the steps but the last that is trained, rounded down, at least one."
    )
    sigma_shift: float | None = Field(
        None,
        gt=0,
        description="Training rollouts follow equal steps shifted by this (published: 3 for images, 5 for "
        "HunyuanVideo); null: the checkpoint's own schedule.",
    )
    clip_range: float = Field(1e-4, gt=0, lt=1, description="PPO clip range; not portable between models.")
    std_ddof: Literal[0, 1] = Field(1, description="0: population, 1: sample standard deviation.")
    std_eps: float = Field(1e-8, gt=0, description="Added to the standard deviation.")

    @property
    def num_trained(self) -> int:
        """K, trained steps of each sample."""
        # 0.6 of 5 steps are 3, although 0.6 is a little less than three fifths.
        return max(1, int((self.num_steps - 1) * self.trained_fraction + 1e-9))


class SlidingWindowConfig(Section):
    """Where MixGRPO's window lies, see `digenrl.algorithms.windows`."""

    size: PositiveInt = Field(4, description="Consecutive stochastic, trained steps; at most num_steps - 2.")
    strategy: Literal["progressive", "decay", "exp_decay", "random"] = Field(
        "progressive",
        description="How long the window stays in one place. progressive: equally long everywhere; decay, exp_decay: "
        "shorter the further it has come; random: it is drawn in each iteration.",
    )
    iterations: PositiveInt = Field(25, description="How long it stays, at most; random does not look at it.")
    stride: PositiveInt = Field(1, description="Steps it moves on by; with the window's size, windows do not overlap.")
    rewind: bool = Field(True, description="After the last place go back to the start; false: stay there.")
    least_iterations: PositiveInt | None = Field(
        None, description="What the stay of decay falls to; null: a quarter of iterations."
    )
    decay_after: int = Field(13, ge=0, description="Start of the window beyond which stays of exp_decay get shorter.")
    decay_rate: float = Field(0.1, ge=0, description="By how much, per step.")


class MixGrpoConfig(GrpoSection):
    """MixGRPO: a window of stochastic, trained steps that slides from noise to image as training goes on."""

    name: Literal["mix_grpo"] = Field("mix_grpo", description="Training algorithm.")
    sampler: Literal["flow_sde", "cps", "wan_sde"] = Field("flow_sde", description="How stochastic steps are drawn.")
    noise_level: float = Field(
        0.7, gt=0, le=2, description="Noise level a of stochastic steps; for wan_sde a factor, 1 as published."
    )
    window: SlidingWindowConfig = Field(
        default_factory=SlidingWindowConfig, description="Which steps are stochastic and trained."
    )
    tail_solver: Literal["euler", "dpm_solver"] = Field(
        "euler",
        description="How the steps after the window are taken; dpm_solver: by second-order DPM-Solver++ (Flash).",
    )
    tail_ratio: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of these steps that is taken, rounded down, at least two (published with Flash: 0.4).",
    )
    sigma_shift: float | None = Field(
        None,
        gt=0,
        description="Training rollouts follow equal steps shifted by this (published: 3 for FLUX); null: the "
        "checkpoint's own schedule.",
    )
    clip_range: float = Field(1e-4, gt=0, lt=1, description="PPO clip range; not portable between models.")
    std_ddof: Literal[0, 1] = Field(1, description="0: population, 1: sample standard deviation.")
    std_eps: float = Field(1e-8, gt=0, description="Added to the standard deviation.")
    reward_aggregation: Literal["rewards", "advantages", "losses"] = Field(
        "advantages",
        description="With several rewards: rewards: the advantage of their weighted sum; advantages: the weighted sum "
        "of their advantages (GDPO); losses: that of their losses, each clipped by itself (DanceGRPO).",
    )

    @model_validator(mode="after")
    def _fits(self) -> MixGrpoConfig:
        if self.window.size > self.num_steps - 2:
            raise ValueError(
                f"window.size={self.window.size} does not fit: the last two of num_steps={self.num_steps} steps are "
                f"never trained"
                + (f"; use at most {self.num_steps - 2}" if self.num_steps > 2 else "; use at least num_steps=3")
            )
        if self.tail_ratio < 1 and self.tail_solver == "euler":
            raise ValueError(
                f"tail_ratio={self.tail_ratio:g} leaves steps out, for which Euler steps are not exact enough; use "
                f"tail_solver=dpm_solver, or tail_ratio=1"
            )
        if self.tail_ratio < 1 and self.sigma_shift is None:
            raise ValueError(
                f"tail_ratio={self.tail_ratio:g} needs to know how the schedule is shifted; set sigma_shift "
                f"(published: 3 for FLUX), or tail_ratio=1"
            )
        return self


class GrpoGuardConfig(WindowedSection):
    """GRPO-Guard: Flow-GRPO with ratios that are centred and of equal scale at all steps."""

    name: Literal["grpo_guard"] = Field("grpo_guard", description="Training algorithm.")
    sampler: Literal["flow_sde", "wan_sde"] = Field("flow_sde", description="How stochastic steps are drawn.")
    clip_range: float = Field(2e-6, gt=0, lt=1, description="Clip range of the normalised ratio.")


class FlowDppoConfig(WindowedSection):
    """Flow-DPPO: no clipping; a sample leaves the update when its transition has moved too far."""

    trust_region: ClassVar[str | None] = "divergence_threshold"

    name: Literal["flow_dppo"] = Field("flow_dppo", description="Training algorithm.")
    sampler: Literal["flow_sde", "wan_sde"] = Field("flow_sde", description="How stochastic steps are drawn.")
    divergence_threshold: float = Field(
        1e-5, gt=0, description="KL, averaged over latent elements, from which on a sample may leave the update."
    )
    adv_clip_max: float | None = Field(None, gt=0, description="Advantages are clipped to +- this; null: not at all.")


class DiffusionNftConfig(AlgorithmSection):
    """DiffusionNFT: no likelihoods; clean latents are noised again, and good ones pull the velocity towards them."""

    trust_region: ClassVar[str | None] = None

    name: Literal["diffusion_nft"] = Field("diffusion_nft", description="Training algorithm.")
    updates_per_iteration: PositiveInt = Field(
        1, description="Optimiser steps U per iteration; each takes whole groups in order."
    )
    nft_beta: float = Field(
        1.0, gt=0, description="How far the implied good and bad policies lie from that which generated the samples."
    )
    adv_mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = Field(
        "all", description="What of the advantages counts: all of it, one side, whether it is positive, or its sign."
    )
    adv_clip_max: float = Field(5.0, gt=0, description="Advantages are clipped to +- this, and scaled by it.")
    std_scope: Literal["group", "update", "iteration", "none"] = Field(
        "iteration",
        description="Over which samples the reward's standard deviation is taken; none: rewards are only centred "
        "(Dr.GRPO).",
    )
    old_policy_decay: Literal[0, 1, 2] = Field(
        1,
        description="How slowly the weights that generate samples follow the trained ones: old = d old + (1 - d) new "
        "after n optimiser steps. 0: d = 0; 1: d = min(0.001 n, 0.5); 2: d = 0 for n < 75, then "
        "min(0.0075 (n - 75), 0.999).",
    )
    timestep_fraction: float = Field(
        0.99, gt=0, le=1, description="Share of the rollout's noise levels that is trained, rounded down, at least one."
    )
    kl_beta: float = Field(1e-4, ge=0, description="Weight of the squared distance to the base model's velocity.")

    @model_validator(mode="after")
    def _one_loss(self) -> DiffusionNftConfig:
        if self.reward_aggregation == "losses":
            raise ValueError(
                "reward_aggregation=losses means nothing with diffusion_nft, whose loss has no ratio to clip; use "
                "advantages"
            )
        return self

    @property
    def num_trained(self) -> int:
        """K, trained noise levels of each sample."""
        return max(1, int(self.num_steps * self.timestep_fraction + 1e-9))


def extreme_of(samples: int, ddof: int) -> float:
    """How many standard deviations one of so many rewards can be from their mean."""
    return math.sqrt((samples - 1) * (samples - ddof) / samples)


def _name_of(given: Any) -> str | None:
    """Which section is meant; None: what was given is none."""
    if isinstance(given, Mapping):
        return str(given.get("name", DEFAULT))
    return getattr(given, "name", None)


AlgorithmConfig = Annotated[
    Annotated[FlowGrpoConfig, Tag("flow_grpo")]
    | Annotated[DanceGrpoConfig, Tag("dance_grpo")]
    | Annotated[GrpoGuardConfig, Tag("grpo_guard")]
    | Annotated[FlowDppoConfig, Tag("flow_dppo")]
    | Annotated[MixGrpoConfig, Tag("mix_grpo")]
    | Annotated[DiffusionNftConfig, Tag("diffusion_nft")],
    Discriminator(_name_of),
]
