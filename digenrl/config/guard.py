"""What watches a run for rewards that are gamed, and from where on it warns or stops."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from digenrl.config.rewards import RewardConfig
from digenrl.config.section import PositiveInt, Section


def _ordered(limits: tuple[float, float]) -> tuple[float, float]:
    warn, stop = limits
    if not 0 <= warn <= stop:
        raise ValueError("must be [warn, stop] with 0 <= warn <= stop")
    return limits


#: Where a check warns, and where it stops the run.
Limits = Annotated[tuple[float, float], AfterValidator(_ordered)]


def _term(given: Any) -> Any:
    return {"name": given} if isinstance(given, str) else given


#: A reward with its settings, or only its name.
Gold = Annotated[RewardConfig, BeforeValidator(_term)]


class GuardConfig(Section):
    """What notices that a reward is gamed. Each check has two limits, [warn, stop]; null: it is left out."""

    mode: Literal["stop", "warn", "off"] = Field(
        "stop",
        description="stop: a run that is stopped ends with the weights of its last good evaluation; warn: it is told "
        "and goes on; off: nothing is watched.",
    )
    gold: tuple[Gold, ...] | None = Field(
        None,
        description="Rewards that are evaluated and never trained on, by name or with settings as in `rewards`; "
        "null: for each trained reward that of another engine, if there is one here; []: none.",
    )
    prompts: PositiveInt = Field(
        48, description="The first n prompts of an evaluation, whose pictures gold rewards and statistics look at."
    )
    patience: PositiveInt = Field(2, description="Evaluations in a row beyond a stop limit before the run stops.")
    release: float = Field(
        0.8, gt=0, le=1, description="A check that warns is ok again below this share of its warn limit."
    )
    confidence: float = Field(
        0.99, gt=0.5, lt=1, description="Level of the bootstrap intervals behind the check `divergence`."
    )
    reference_iterations: PositiveInt = Field(
        10, description="Iterations after the warm-up whose median kl, logp_gap and grad_norm are measured against."
    )
    divergence: Limits | None = Field(
        (0.1, 0.3),
        description="How far a gold reward is surely below its best evaluation while the trained reward is surely "
        "above its start; in standard deviations of the gold reward over the base model's pictures.",
    )
    dark: Limits | None = Field(
        (0.25, 0.6), description="Change of the share of dark pixels (brightness below 0.1), up or down; as a share."
    )
    saturation: Limits | None = Field(
        (0.25, 0.5), description="Change of the mean saturation (largest - smallest channel, in [0, 1]), up or down."
    )
    edges: Limits | None = Field(
        (3.0, 10.0), description="Factor by which the share of pixels on an edge rose or fell; 1 is no change."
    )
    high_frequency: Limits | None = Field(
        (4.0, 16.0), description="Factor by which the spectrum's share of high frequencies rose or fell."
    )
    grid: Limits | None = Field(
        (0.1, 0.3), description="Rise of the share of the spectrum that repeats every 16 pixels or less; as a share."
    )
    diversity: Limits | None = Field(
        (3.0, 10.0), description="Factor by which the distance between pictures of one training group fell."
    )
    zero_variance: Limits | None = Field(
        (0.5, 0.95), description="Share of the groups whose rewards are all equal: nothing is learned from them."
    )
    failed: Limits | None = Field((0.05, 0.3), description="Share of the training samples without a reward.")
    kl: Limits | None = Field(
        (10.0, 1000.0),
        description="Factor by which the change of the policy within an iteration (approx_kl) rose over the reference.",
    )
    logp_gap: Limits | None = Field(
        (3.0, 10.0),
        description="Factor by which |log p at training - log p at rollout| rose over the reference; below 1e-6 it "
        "counts as 1e-6.",
    )
    grad_norm: Limits | None = Field(
        (10.0, 1000.0), description="Factor by which the norm of the gradient rose over the reference."
    )
