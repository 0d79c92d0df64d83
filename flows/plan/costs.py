"""What units cost, and where that is known from: a profile, an earlier run, or FLOPs and bytes.

    costs_of(subject, profile) -> Known      the first of: the file; the newest run that costs the same; derivation
    for_fleet(known, members)                the same for the kinds of a fleet file

A run writes what it measured to its directory. It is evidence for another run if model, adapter, sampler, rewards,
device and KL term are the same; costs are in proportion to the samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from digenrl.config import RunConfig
from digenrl.config import yaml as config_yaml
from digenrl.config.errors import ConfigError, did_you_mean, shown
from digenrl.profile import best_timestep_batch
from digenrl.scheduling.costs import GUESSED, CostModel, KindCosts
from flows.plan.fleet import Member
from flows.plan.subject import Subject
from storage.home import home
from storage.runs import RunDirectory, run_names

#: Time a lane stands still between two units where nobody measured it: docs/performance.md.
GAP_S = 0.005


@dataclass(frozen=True)
class Known:
    """What is known of a subject.

    Attributes:
        model: costs.
        source: where they are from, in words.
        timestep_batch: what `auto` comes to with these costs; None: all trained timesteps.
    """

    model: CostModel
    source: str
    timestep_batch: int | None = None


def costs_of(subject: Subject, profile: Path | None) -> Known:
    """The costs of a subject's units.

    Raises:
        ConfigError: the profile is not one, or nothing is known.
    """
    if profile is not None:
        model = _read_profile(subject, profile)
        train_s = model.of_kind(model.kinds[0]).train_s
        return Known(model, f"profile {profile}", best_timestep_batch(train_s) if train_s else None)
    workload = subject.workload
    # The configuration of a workload that was asked for by name has its sizes, but not its model.
    own = workload is None or workload.checkpoint.repository == subject.config.model.path
    for name in run_names(home()) if own else ():
        known = _measured(subject, home() / name)
        if known is not None:
            return known
    if workload is not None:
        model, device = workload.cost_model(subject.shape, GAP_S), workload.device.name
        return Known(model, f"derived from FLOPs and bytes for {device}, {GAP_S * 1e3:g} ms between units")
    raise ConfigError(
        f"nobody has measured what {subject.name} costs: no run in {home()} has the same model, adapter, rewards and "
        f"device; train it once, such as `digenrl train {subject.name} iterations=3`, or give --profile FILE"
    )


def _read_profile(subject: Subject, path: Path) -> CostModel:
    """From CostModel.to_json, or from kinds of worker with their costs."""
    try:
        value = config_yaml.read(path.read_bytes(), str(path)).value
    except OSError as error:
        raise ConfigError(f"the profile {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{path} must map kinds of worker to their costs, got {shown(value)}")
    try:
        return _model(subject, value)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _model(subject: Subject, data: Mapping[str, Any]) -> CostModel:
    kinds = data.get("kinds", data)
    for kind, costs in kinds.items():
        if not isinstance(costs, dict):
            raise ValueError(f"{kind} must map costs such as rollout_step_s to seconds, got {shown(costs)}")
    options = {name: data[name] for name in ("replay_share", "streamed", "weight") if "kinds" in data and name in data}
    measured = {kind: costs for kind, costs in kinds.items() if kind != GUESSED} or kinds
    return CostModel.from_profile(subject.shape, measured, **options)


def _measured(subject: Subject, run: Path) -> Known | None:
    """What a run measured, if it is evidence."""
    directory = RunDirectory(run)
    path = directory.profile_path
    if not path.is_file():
        return None
    try:
        config = directory.read_config()
        if _priced(config) != _priced(subject.config):
            return None
        model = _model(subject, config_yaml.read(path.read_bytes(), str(path)).value)
    except (ConfigError, ValueError):  # of another version, or written halfway
        return None
    source, chosen = f"measured by the run {run.name}", config.schedule.timestep_batch
    batch = None if chosen == "auto" else chosen
    share = subject.config.micro_batch / config.micro_batch
    if share == 1:
        return Known(model, source, batch)
    source += f", scaled from micro-batches of {config.micro_batch} to {subject.config.micro_batch}"
    scaled = {kind: _scaled(model.of_kind(kind), share) for kind in model.kinds}
    return Known(_with_kinds(model, scaled), source, batch)


def _priced(config: RunConfig) -> tuple[object, ...]:
    """What the costs of units depend on, apart from the sizes of units."""
    algorithm = config.algorithm
    rewards = tuple((term.name, term.path, term.url, term.model, term.frames) for term in config.rewards)
    return (config.model, config.adapter, rewards, config.cluster.device, algorithm.name, algorithm.kl_beta > 0)


def for_fleet(known: Known, members: Sequence[Member]) -> CostModel:
    """The costs of a fleet's kinds, in its order.

    Raises:
        ConfigError: the speed of a kind is not known.
    """
    model = known.model
    kinds = {}
    for member in members:
        name = member.profile or member.kind
        if member.rate is not None:
            kinds[member.kind] = _scaled(model.of_kind(model.kinds[0]), 1 / member.rate)
        elif name in model.kinds:
            kinds[member.kind] = model.of_kind(name)
        elif member.profile is not None:
            hint = did_you_mean(name, model.kinds, "kinds in the profile")
            raise ConfigError(f"fleet: profile={shown(name)} of kind {shown(member.kind)} is not known{hint}")
        else:
            raise ConfigError(
                f"fleet: how fast is kind {shown(name)}? Give rate (its speed relative to {model.kinds[0]}) or "
                f"profile (a kind in the costs: {', '.join(model.kinds)})"
            )
    return _with_kinds(model, kinds)


def _with_kinds(model: CostModel, kinds: Mapping[str, KindCosts]) -> CostModel:
    data = model.to_json()
    return CostModel.from_json(model.shape, data | {"kinds": {k: asdict(costs) for k, costs in kinds.items()}})


def _scaled(costs: KindCosts, factor: float) -> KindCosts:
    """Computing takes `factor` times as long; moving, switching, gathering and orchestration do not change."""
    return replace(
        costs,
        rollout_step_s=(costs.rollout_step_s or 0.0) * factor,
        decode_s=(costs.decode_s or 0.0) * factor,
        train_s={batch: seconds * factor for batch, seconds in costs.train_s.items()},
        score_s=(costs.score_s or 0.0) * factor,
        update_s=(costs.update_s or 0.0) * factor,
    )
