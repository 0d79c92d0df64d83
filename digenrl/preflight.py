"""What can be checked before a server or worker starts: prompts, rewards, model, cluster address, device, home.

    check(config, home) -> list[str]     notes; raises ConfigError with everything that is wrong

No weights are loaded, nothing is downloaded, and torch is imported only to look for a CUDA device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from digenrl.config import ClusterConfig, RewardConfig, RunConfig, TrackingConfig
from digenrl.config_errors import ConfigError, did_you_mean, nearest, shown
from digenrl.preflight_model import check_model
from digenrl.prompts import PromptError, load_prompts
from digenrl.rewards.base import PromptRecord
from digenrl.rewards.registry import make_reward, reward_names

_ADDRESS = re.compile(r"(?:tcp|tls)://(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_TRACKING = ("managed", "none")


def check(config: RunConfig, home: Path | None = None) -> list[str]:
    """Check everything that needs files but no server.

    Args:
        config: as read.
        home: where the run's state will be written; None skips that check.

    Returns:
        Notes for the user: legal, but perhaps not what was meant.

    Raises:
        ConfigError: everything that is wrong.
    """
    problems: list[str] = []
    notes: list[str] = []
    _check_prompts(config, problems, notes)
    check_model(config.model, config.lora, problems, notes)
    problems += _cluster_problems(config.cluster)
    problems += _tracking_problems(config.tracking)
    problems += _home_problems(home) if home is not None else []
    if problems:
        raise ConfigError(*problems)
    return notes


def _check_prompts(config: RunConfig, problems: list[str], notes: list[str]) -> None:
    train = _load("data.prompts", config.data.prompts, problems)
    held_out = _load("data.held_out", config.data.held_out, problems) if config.data.held_out is not None else None
    for reward in config.rewards:
        problems += _reward_problems(reward, {"data.prompts": train, "data.held_out": held_out})
    wanted = config.algorithm.prompts_per_iteration
    if train is not None and len(train) < wanted:
        notes.append(
            f"algorithm.prompts_per_iteration={wanted} exceeds the {len(train)} prompts of "
            f"data.prompts={config.data.prompts}: some are drawn more than once in an iteration"
        )
    if train is not None and held_out is not None:
        shared = {record.uid for record in train} & {record.uid for record in held_out}
        if shared:
            problems.append(
                f"data.held_out={config.data.held_out} must share no id with data.prompts={config.data.prompts}, "
                f"but {len(shared)} are in both, such as {shown(min(shared))}"
            )
    notes += _evaluation_notes(config, held_out)


def _evaluation_notes(config: RunConfig, held_out: Sequence[PromptRecord] | None) -> list[str]:
    wanted = config.evaluation.prompts
    if config.evaluation.every == 0 or wanted == 0:
        return []
    if config.data.held_out is None:
        return ["data.held_out is not set: nothing is evaluated on prompts the model was not trained on"]
    if held_out is not None and len(held_out) < wanted:
        return [f"evaluation.prompts={wanted} exceeds the {len(held_out)} held-out prompts: all of them are used"]
    return []


def _load(field: str, path: str, problems: list[str]) -> Sequence[PromptRecord] | None:
    try:
        return load_prompts(path)
    except PromptError as error:
        problems.append(f"{field}: {error}")
        return None


def _reward_problems(reward: RewardConfig, prompts: dict[str, Sequence[PromptRecord] | None]) -> list[str]:
    if reward.name not in reward_names():
        hint = did_you_mean(reward.name, reward_names(), "rewards")
        return [f"rewards: {shown(reward.name)} is not a registered reward{hint}"]
    problems = []
    scorer = make_reward(reward.name)
    for field, records in prompts.items():
        try:
            scorer.validate(records or ())
        except ValueError as error:
            problems.append(f"{field} lacks what the reward {reward.name} needs: {error}")
    return problems


def _cluster_problems(cluster: ClusterConfig) -> list[str]:
    problems = []
    match = _ADDRESS.fullmatch(cluster.address)
    if cluster.address != "local" and (match is None or not 0 < int(match[1]) < 65536):
        close = nearest(cluster.address, ["local"])
        problems.append(
            f"cluster.address must be local, tcp://HOST:PORT or tls://HOST:PORT with a port from 1 to 65535, "
            f"got {shown(cluster.address)}" + (f"; did you mean {close}?" if close else "")
        )
    if cluster.device == "cuda" and cluster.address == "local":
        import torch

        if not torch.cuda.is_available():
            problems.append("cluster.device must be cpu on this machine, got cuda: torch finds no CUDA device here")
    return problems


def _tracking_problems(tracking: TrackingConfig) -> list[str]:
    close = nearest(tracking.uri, _TRACKING)
    if tracking.uri in _TRACKING or close is None or re.search("[:/]", tracking.uri):
        return []
    return [f"tracking.uri must be managed, none or a tracking URI, got {shown(tracking.uri)}; did you mean {close}?"]


def _home_problems(home: Path) -> list[str]:
    existing = next(path for path in (home, *home.parents) if path.exists())
    if not existing.is_dir():
        return [f"DIGENRL_HOME={home} must be a directory, but {existing} is a file"]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"DIGENRL_HOME={home} must be writable, but {existing} is not; set DIGENRL_HOME to another directory"]
    return []
