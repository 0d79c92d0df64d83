"""Everything a run is configured by. Strict: an unknown key is an error.

The order of sections follows the life of a sample: model, data, rewards, algorithm, optimiser, then how and where it
is computed. `digenrl.configure` reads YAML, presets and overrides into a RunConfig and words the errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """Base of every section: unknown keys are refused, values are frozen once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class ModelConfig(Section):
    """Which checkpoint, and what it generates."""

    family: Literal["sd3", "flux", "qwen", "wan", "hunyuan"] = Field("sd3", description="Model family.")
    path: str = Field(
        "package:tiny-sd3",
        description="Diffusers pipeline: a directory, a hub id, package:NAME for one that ships with DigenRL, or "
        "tiny:FAMILY for a tiny random one of a family.",
    )
    height: PositiveInt = Field(12, le=8192, description="Height of generated samples in pixels.")
    width: PositiveInt = Field(24, le=8192, description="Width of generated samples in pixels.")
    frames: PositiveInt = Field(1, le=1025, description="Frames of generated samples; 1 for pictures.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Type of the frozen base weights.")
    guidance_scale: float = Field(
        1.0,
        ge=0,
        description="Guidance in rollout, training and evaluation: classifier-free, where <= 1 turns it off, or the "
        "value that a guidance-distilled model (flux, hunyuan) is given.",
    )
    max_sequence_length: int | None = Field(
        None,
        ge=0,
        le=512,
        description="Tokens of the long part of a prompt; null: as in the family's pipeline, or none if an sd3 "
        "checkpoint has no T5.",
    )
    gradient_checkpointing: bool = Field(False, description="Recompute activations in the backward pass.")


class LoraConfig(Section):
    """The trained adapter."""

    rank: PositiveInt = Field(32, le=1024, description="LoRA rank.")
    alpha: PositiveInt = Field(64, description="LoRA alpha; the update is scaled by alpha / rank.")
    targets: tuple[str, ...] | None = Field(
        None, description="Name suffixes of the adapted layers; null means the family's published list."
    )


class DataConfig(Section):
    """Prompts to train on and to evaluate on."""

    prompts: str = Field(min_length=1, description="JSONL or text file of prompts, or package:NAME.")
    held_out: str | None = Field(None, description="Prompts for evaluation only; must share no id with `prompts`.")


class RewardConfig(Section):
    """One term of the reward."""

    name: str = Field(description="Registered reward.")
    weight: float = Field(1.0, description="Weight in the sum of rewards.")


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


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule, in iterations."""

    learning_rate: float = Field(3e-4, gt=0, description="Peak learning rate.")
    betas: tuple[Decay, Decay] = Field((0.9, 0.999), description="AdamW betas.")
    eps: float = Field(1e-8, gt=0, description="AdamW epsilon.")
    weight_decay: float = Field(1e-4, ge=0, description="AdamW weight decay.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradients are scaled down to this norm.")
    warmup_iterations: int = Field(0, ge=0, description="Iterations of linear warm-up.")
    decay: Literal["constant", "linear"] = Field("constant", description="Learning rate after warm-up.")
    final_fraction: float = Field(0.1, ge=0, le=1, description="Fraction of the peak reached at the end (linear).")


class ObserveConfig(Section):
    """What Prefect shows as task runs."""

    detail: Literal["unit", "microbatch", "iteration", "auto"] = Field(
        "auto",
        description="Task runs outside detailed iterations: per unit, micro-batch or iteration; auto picks.",
    )
    every: int = Field(
        10, ge=0, description="Every n-th iteration is detailed: one task run per timestep (0: only iteration 0)."
    )


class ScheduleConfig(Section):
    """How work is cut and placed."""

    layout: Literal["colocated", "genrl", "disaggregated", "digenrl"] = Field(
        "disaggregated",
        description="colocated: all workers roll out, then all train; genrl: the same with timestep_batch 1; "
        "disaggregated: cluster.trainers train, the others roll out; digenrl: the same, and trainers help.",
    )
    gap: bool = Field(
        True,
        description="Generation-axis pipeline: samples of a group are spread over all rollout workers, groups in "
        "order; false: each group is generated by one worker.",
    )
    trainer_assist: Literal["off", "greedy", "search", "auto"] = Field(
        "auto",
        description="Whether trainers with nothing to train roll out (TAG): off; greedy: whenever they can; search: "
        "when the iteration is predicted to end earlier; auto: search with layout digenrl and gap, else off.",
    )
    micro_batch: int | Literal["auto"] = Field(
        "auto", description="Samples per rollout and train unit; divides samples_per_prompt. auto: the whole group."
    )
    timestep_batch: int | Literal["auto"] = Field(
        "auto",
        description="Trained timesteps per forward and backward pass (TSP). auto: measured on the workers before the "
        "run, the largest that fits their memory and takes the least time per timestep.",
    )
    steps_per_unit: int | Literal["auto"] = Field(
        "auto",
        description="Denoising steps per rollout unit outside detailed iterations. auto: the whole trajectory.",
    )
    stale_fraction: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of an iteration's groups, rounded down, that is generated under the weights of the "
        "iteration before, while that one is still being trained (TCSS). 0 is strictly on-policy.",
    )
    advantage: Literal["group", "streaming", "auto"] = Field(
        "auto",
        description="group: samples are trained when their group is complete; streaming: in an iteration's first "
        "update when they are scored, for the same gradient in two backward passes instead of one; auto: streaming "
        "if it is predicted, from what the workers were measured to take, to save more than 1 % of an iteration.",
    )
    max_open_groups: PositiveInt = Field(
        8, description="Groups that are not complete of which a trainer may hold gradients (advantage=streaming)."
    )
    observe: ObserveConfig = Field(default_factory=ObserveConfig, description="What Prefect shows as task runs.")

    @field_validator("micro_batch", "timestep_batch", "steps_per_unit")
    @classmethod
    def _positive(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 1:
            raise ValueError("must be at least 1, or auto")
        return value

    @model_validator(mode="before")
    @classmethod
    def _genrl(cls, given: Any) -> Any:
        """The alias `genrl` becomes what it stands for."""
        if not isinstance(given, Mapping) or given.get("layout") != "genrl":
            return given
        if given.get("timestep_batch", "auto") not in (1, "auto"):
            raise ValueError(
                f"layout=genrl stands for layout=colocated with timestep_batch=1, but timestep_batch="
                f"{given['timestep_batch']} is set; leave it out, or use layout=colocated"
            )
        return {**given, "layout": "colocated", "timestep_batch": 1}

    @model_validator(mode="after")
    def _assistance(self) -> ScheduleConfig:
        if self.trainer_assist in ("greedy", "search"):
            if self.layout == "colocated":
                raise ValueError(
                    f"trainer_assist={self.trainer_assist} means nothing with layout=colocated, where every worker "
                    f"rolls out; use trainer_assist=off, or layout=digenrl"
                )
            if not self.gap:
                raise ValueError(
                    f"trainer_assist={self.trainer_assist} cannot be combined with gap=false: a trainer that helps "
                    f"would be bound to a whole group; use gap=true or trainer_assist=off"
                )
        return self

    @model_validator(mode="after")
    def _staleness(self) -> ScheduleConfig:
        if self.stale_fraction > 0 and self.layout == "colocated":
            raise ValueError(
                f"stale_fraction={self.stale_fraction:g} gains nothing with layout=colocated, where nobody generates "
                f"while the others train: samples would only get older; use stale_fraction=0, or layout=disaggregated"
            )
        return self

    @property
    def streams(self) -> bool:
        """Whether samples are trained before their group is complete."""
        return self.advantage == "streaming"

    @property
    def assist(self) -> Literal["off", "greedy", "search"]:
        """`trainer_assist` with `auto` resolved."""
        if self.trainer_assist == "auto":
            return "search" if self.layout == "digenrl" and self.gap else "off"
        return self.trainer_assist


class ClusterConfig(Section):
    """Where work runs."""

    address: str = Field("local", description="local, tcp://HOST:PORT or tls://HOST:PORT of a Dask scheduler.")
    workers: PositiveInt = Field(2, description="Worker processes of a local cluster.")
    trainers: PositiveInt = Field(1, description="Workers that train (layouts disaggregated and digenrl).")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Device the workers compute on.")
    worker_ttl_s: float = Field(30.0, ge=5, le=86400, description="A worker silent for longer counts as lost.")


class EvaluationConfig(Section):
    """Held-out evaluation with fixed noise."""

    every: int = Field(10, ge=0, description="Evaluate every n iterations, and at start and end (0: never).")
    prompts: int = Field(200, ge=0, description="Held-out prompts per evaluation (at most as many as there are).")
    num_steps: int = Field(10, ge=1, le=1000, description="Denoising steps, deterministic.")
    seed: int = Field(0, ge=0, description="Seed of the evaluation noise.")
    micro_batch: PositiveInt = Field(25, description="Samples per evaluation unit.")


class CheckpointConfig(Section):
    """When state is saved."""

    every: int = Field(10, ge=0, description="Save every n iterations, and at the end (0: only at the end).")
    keep: PositiveInt = Field(3, description="Keep the newest n checkpoints.")


class GatesConfig(Section):
    """Checks that stop a run which would silently learn nothing or the wrong thing."""

    max_logp_gap: float | None = Field(
        None, gt=0, description="Limit of |log p at training - log p at rollout|; null: five times the profiled floor."
    )
    max_bad_updates: int = Field(3, ge=0, description="Updates skipped for non-finite gradients before the run stops.")
    max_failed_share: float = Field(
        0.5, ge=0, le=1, description="Share of failed samples in one iteration above which the run stops."
    )


class TrackingConfig(Section):
    """MLflow."""

    experiment: str = Field("digenrl", min_length=1, description="MLflow experiment.")
    uri: str = Field(
        "managed", min_length=1, description="managed: DigenRL's own MLflow server; else a tracking URI; none: off."
    )


class RunConfig(Section):
    """One training run."""

    seed: int = Field(0, ge=0, description="Seed of prompts, noise, windows and the adapter's start.")
    iterations: PositiveInt = Field(100, le=1_000_000, description="RL iterations.")
    model: ModelConfig = Field(default_factory=ModelConfig)
    lora: LoraConfig = Field(default_factory=LoraConfig)
    data: DataConfig
    rewards: tuple[RewardConfig, ...] = Field(min_length=1, description="Terms of the reward.")
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    gates: GatesConfig = Field(default_factory=GatesConfig)
    tracking: TrackingConfig = Field(default_factory=TrackingConfig)

    @model_validator(mode="after")
    def _cross(self) -> RunConfig:
        micro = self.micro_batch
        if self.algorithm.samples_per_prompt % micro:
            raise ValueError(
                f"schedule.micro_batch={micro} must divide "
                f"algorithm.samples_per_prompt={self.algorithm.samples_per_prompt}"
            )
        if self.schedule.layout != "colocated" and self.cluster.trainers >= self.cluster.workers:
            raise ValueError(
                f"cluster.trainers={self.cluster.trainers} leaves no rollout worker of "
                f"cluster.workers={self.cluster.workers}; use fewer trainers or schedule.layout=colocated"
            )
        steps = self.schedule.steps_per_unit
        if steps != "auto" and steps > self.algorithm.num_steps:
            raise ValueError(
                f"schedule.steps_per_unit={steps} exceeds algorithm.num_steps={self.algorithm.num_steps}; use at most "
                f"that, or auto for the whole trajectory"
            )
        if self.optimizer.warmup_iterations > self.iterations:
            raise ValueError(
                f"optimizer.warmup_iterations={self.optimizer.warmup_iterations} exceeds iterations={self.iterations}"
            )
        names = [r.name for r in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards: each reward may be named once, got {names}")
        return self

    @model_validator(mode="after")
    def _stale(self) -> RunConfig:
        share, groups = self.schedule.stale_fraction, self.algorithm.prompts_per_iteration
        if share > 0 and not self.stale_groups:
            raise ValueError(
                f"schedule.stale_fraction={share:g} is less than one of algorithm.prompts_per_iteration={groups} "
                f"groups; use at least {-(-1000 // groups) / 1000:g}, or 0 for none"
            )
        return self

    @model_validator(mode="after")
    def _streaming(self) -> RunConfig:
        algorithm = self.algorithm
        if not self.schedule.streams:
            return self
        if algorithm.std_scope != "group":
            raise ValueError(
                f"schedule.advantage=streaming cannot be combined with algorithm.std_scope={algorithm.std_scope}: "
                f"only a group's own standard deviation keeps advantages within adv_clip_max; use std_scope=group, "
                f"or advantage=group"
            )
        # One sample of G against G - 1 equal ones lies sqrt(G - 1) standard deviations from the mean; none lies further
        if math.sqrt(algorithm.samples_per_prompt - 1) > algorithm.adv_clip_max:
            most = int(round(algorithm.adv_clip_max**2, 9)) + 1
            raise ValueError(
                f"schedule.advantage=streaming needs advantages that algorithm.adv_clip_max={algorithm.adv_clip_max:g} "
                f"never clips, but one sample of algorithm.samples_per_prompt={algorithm.samples_per_prompt} can be "
                f"further from the mean; use at most {most} samples, a larger adv_clip_max, or advantage=group"
            )
        first = algorithm.prompts_per_iteration // algorithm.updates_per_iteration
        if self.stale_groups >= first:
            raise ValueError(
                f"schedule.advantage=streaming has nothing to act on: schedule.stale_fraction="
                f"{self.schedule.stale_fraction:g} makes all {first} groups of the first update stale, and only fresh "
                f"ones can be streamed; use a smaller stale_fraction, or advantage=group"
            )
        return self

    @property
    def stale_groups(self) -> int:
        """Groups of an iteration that are generated under the version before."""
        # As the decimal fraction it was written as: 0.29 of 100 groups are 29.
        return int(Decimal(repr(self.schedule.stale_fraction)) * self.algorithm.prompts_per_iteration)

    @property
    def micro_batch(self) -> int:
        """Samples per micro-batch with `auto` resolved."""
        size = self.schedule.micro_batch
        return self.algorithm.samples_per_prompt if size == "auto" else size
