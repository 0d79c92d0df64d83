"""A whole run: its sections, and what they must agree on."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from pydantic import Field, model_validator

from digenrl.config.algorithm import AlgorithmConfig, FlowGrpoConfig
from digenrl.config.data import DataConfig
from digenrl.config.errors import did_you_mean, shown
from digenrl.config.full import hindrances
from digenrl.config.guard import GuardConfig
from digenrl.config.model import LoraConfig, ModelConfig
from digenrl.config.optimizer import OptimizerConfig
from digenrl.config.rewards import RewardConfig
from digenrl.config.schedule import ScheduleConfig
from digenrl.config.section import PositiveInt, Section
from digenrl.config.streaming import hindrance
from digenrl.config.surroundings import (
    CheckpointConfig,
    ClusterConfig,
    EvaluationConfig,
    GatesConfig,
    TrackingConfig,
)


class RunConfig(Section):
    """One training run."""

    seed: int = Field(0, ge=0, description="Seed of prompts, noise, windows and the adapter's start.")
    iterations: PositiveInt = Field(100, le=1_000_000, description="RL iterations.")
    model: ModelConfig = Field(default_factory=ModelConfig)
    method: Literal["lora", "full"] = Field(
        "lora",
        description="What is trained: lora: an adapter, see `lora`; full: all weights of the transformer, in float32, "
        "on trainers that hold all of it.",
    )
    lora: LoraConfig = Field(default_factory=LoraConfig, description="The trained adapter; for method=lora.")
    data: DataConfig
    rewards: tuple[RewardConfig, ...] = Field(min_length=1, description="Terms of the reward.")
    algorithm: AlgorithmConfig = Field(default_factory=FlowGrpoConfig, description="How samples are learned from.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    gates: GatesConfig = Field(default_factory=GatesConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
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
        names = [reward.called for reward in self.rewards]
        if len(set(names)) != len(names):
            raise ValueError(f"rewards: each may be named once, got {names}; give each a label of its own")
        for source in self.data.all_sources:
            for name in source.rewards or ():
                if name not in names:
                    raise ValueError(
                        f"data: the source {source.path} names the reward {shown(name)}, which is not among the run's "
                        f"rewards{did_you_mean(name, names, 'those are')}"
                    )
        weights = [r.weight for r in self.rewards]
        if self.algorithm.reward_aggregation == "losses" and min(weights) < 0:
            raise ValueError(
                f"rewards: with algorithm.reward_aggregation=losses no weight may be negative, got {weights}: a "
                f"loss of negative weight would not be clipped but let go"
            )
        return self

    @model_validator(mode="after")
    def _gold(self) -> RunConfig:
        terms = self.guard.gold or ()
        gold = [reward.called for reward in terms]
        if trained := [r.called for r in self.rewards if r.called in gold or any(map(r.same_values, terms))]:
            raise ValueError(
                f"guard.gold names {', '.join(trained)}, which rewards trains on: a gold reward is one that training "
                f"does not see; take it out of one of them, or name the same by another engine"
            )
        if len(set(gold)) != len(gold):
            raise ValueError(f"guard.gold: each reward may be named once, got {gold}")
        return self

    @model_validator(mode="after")
    def _full(self) -> RunConfig:
        if self.method == "full" and (found := hindrances(self.algorithm, self.schedule)):
            raise ValueError(f"method=full cannot be combined with {'; nor with '.join(found)}")
        return self

    @model_validator(mode="after")
    def _best(self) -> RunConfig:
        if self.checkpoint.keep.best and not self.evaluates:
            raise ValueError(
                f"checkpoint.keep.best={self.checkpoint.keep.best} needs held-out rewards: set evaluation.every, "
                f"evaluation.prompts and data.held_out, or use checkpoint.keep.last and checkpoint.keep.every alone"
            )
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
        if problem := hindrance(algorithm, self.rewards):
            raise ValueError(f"schedule.advantage=streaming {problem}, or advantage=group")
        first = algorithm.prompts_per_iteration // algorithm.updates_per_iteration
        if self.stale_groups >= first:
            raise ValueError(
                f"schedule.advantage=streaming has nothing to act on: schedule.stale_fraction="
                f"{self.schedule.stale_fraction:g} makes all {first} groups of the first update stale, and only fresh "
                f"ones can be streamed; use a smaller stale_fraction, or advantage=group"
            )
        return self

    @property
    def adapter(self) -> LoraConfig | None:
        """The LoRA that is trained; None: all weights of the transformer are."""
        return self.lora if self.method == "lora" else None

    @property
    def evaluates(self) -> bool:
        """Whether held-out prompts are scored as it goes."""
        return self.evaluation.every > 0 and self.evaluation.prompts > 0 and self.data.holds_out

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
