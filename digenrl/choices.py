"""What a configuration leaves open, settled once, before a run starts: `schedule.timestep_batch` and
`schedule.advantage` where they are `auto`, `guard.gold` where it is null.

    needs_profile(config) -> bool              whether anything has to be measured before the run
    settle(config, shape, profiles)            the configuration with all settled, and a sentence on each
    model_of(shape, profiles) -> CostModel     what the profiles tell

What is chosen is written into the run's configuration: units are canonical, so they must not change when a run is
resumed, on whatever machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import ValidationError

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.guard.gold import gold_rewards
from digenrl.profile import Profile, best_timestep_batch
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.predict import predict
from digenrl.scheduling.shape import RunShape

#: Streaming must be predicted to save more than this share of an iteration.
LEAST_GAIN = 0.01


def needs_profile(config: RunConfig) -> bool:
    """Whether something is open that has to be measured, or trainers help and so are weighed from the first bubble on.

    Without help nothing is decided by seconds before the first units have told theirs.
    """
    batches = config.schedule.timestep_batch == "auto" and runspec.trained_step_count(config) > 1
    return batches or may_stream(config) or config.schedule.assist != "off"


def may_stream(config: RunConfig) -> bool:
    """Whether `advantage` is open, and streaming allowed and possibly of use."""
    return config.schedule.advantage == "auto" and not _hindrance(config)


def settle(config: RunConfig, num_held_out: int, profiles: Sequence[Profile]) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with nothing left open.

    Args:
        config: as given.
        num_held_out: held-out prompts there are.
        profiles: one per worker; empty if nothing could be measured.

    Returns:
        The configuration, and why each open value became what it is.
    """
    reasons = []
    if config.schedule.timestep_batch == "auto":
        batch, reason = _timestep_batch(config, profiles)
        config = _with(config, timestep_batch=batch)
        reasons.append(f"schedule.timestep_batch=auto: {batch}; {reason}")
    if config.schedule.advantage == "auto":
        advantage, reason = _advantage(config, num_held_out, profiles)
        config = _with(config, advantage=advantage)
        reasons.append(f"schedule.advantage=auto: {advantage}; {reason}")
    if config.guard.gold is None:
        gold = gold_rewards(config)
        config = config.model_copy(update={"guard": config.guard.model_copy(update={"gold": gold})})
        names = ", ".join(reward.called for reward in gold)
        reasons.append(f"guard.gold: {names or 'none, as there is no second engine for these rewards'}")
    return config, tuple(reasons)


def model_of(run_shape: RunShape, profiles: Sequence[Profile]) -> CostModel:
    """A cost model that knows what was measured: of each kind, on the first worker of it."""
    if not profiles:
        return CostModel.guess(run_shape)
    first = {profile.kind: profile for profile in reversed(profiles)}
    measured = [profile.streamed for profile in profiles if profile.streamed is not None]
    options = {"streamed": max(measured)} if measured else {}
    if any(profile.off_policy for profile in profiles):
        options["replay_share"] = 0.0  # it is in what was measured
    return CostModel(run_shape, {kind: profile.costs for kind, profile in first.items()}, **options)


def _timestep_batch(config: RunConfig, profiles: Sequence[Profile]) -> tuple[int, str]:
    most = runspec.trained_step_count(config)
    if most == 1:
        return 1, "one timestep is trained"
    if not profiles:
        return most, "all of a micro-batch, as nothing was measured"
    # Every worker may have to train.
    batch, slowest = min(((best_timestep_batch(p.costs.train_s), p) for p in profiles), key=lambda found: found[0])
    train_s = slowest.costs.train_s
    measured = ", ".join(f"{b}: {1e3 * train_s[b] / b:.3g} ms" for b in sorted(train_s))
    unfit = [b for b in (most,) if b not in train_s]
    words = f"time per timestep on {slowest.kind} in batches of {measured}"
    return batch, words + (f"; {unfit[0]} do not fit its memory" if unfit else "")


def _advantage(config: RunConfig, num_held_out: int, profiles: Sequence[Profile]) -> tuple[str, str]:
    if hindrance := _hindrance(config):
        return "group", hindrance
    if not profiles:
        return "group", "what streaming would gain is not known, as nothing was measured"
    run_shape = runspec.shape(config, num_held_out)
    model = model_of(run_shape, profiles)
    schedule = config.schedule
    pools = [Pool(kind, count) for kind, count in Counter(profile.kind for profile in profiles).items()]
    group_s, streaming_s = (
        predict(
            model,
            pools,
            runspec.layout_of(config),
            std_scope=config.algorithm.closing_scope,
            gap=schedule.gap,
            search=schedule.assist == "search",
            streaming=streaming,
        ).iteration_s
        for streaming in (False, True)
    )
    gain = 1 - streaming_s / group_s
    words = f"streaming is predicted to save {gain:.1%} of an iteration's {group_s:.3g} s"
    return ("streaming" if gain > LEAST_GAIN else "group"), f"{words}, more than {LEAST_GAIN:.0%} pays"


def _hindrance(config: RunConfig) -> str:
    """Why streaming cannot be had or gains nothing; empty if neither is so."""
    if config.micro_batch == config.algorithm.samples_per_prompt:
        return "a group is one micro-batch, so it is complete as soon as any of it is scored"
    if config.schedule.layout == "colocated":
        return "with layout=colocated nobody trains before everything is generated"
    try:
        _with(config, advantage="streaming")
    except ValidationError as error:
        return str(error.errors()[0]["msg"]).removeprefix("Value error, ")
    return ""


def _with(config: RunConfig, **schedule: object) -> RunConfig:
    """The configuration with some of `schedule` replaced, validated again.

    Raises:
        ValidationError: it contradicts the rest.
    """
    data = config.model_dump(mode="json")
    data["schedule"] |= schedule
    return RunConfig.model_validate(data)
