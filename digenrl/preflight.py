"""What can be checked before a server or worker starts: prompts, rewards, model, cluster address, device, home.

    check(config, home) -> list[str]     notes; raises ConfigError with everything that is wrong
    check_home(home)                     the last of it alone

No weights are loaded, nothing is downloaded, and torch is imported only to look for a CUDA device.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from digenrl.config import ClusterConfig, RewardConfig, RunConfig, TrackingConfig
from digenrl.config.errors import ConfigError, did_you_mean, nearest, shown
from digenrl.preflight_model import check_model
from digenrl.prompts import PromptError, load_prompts
from digenrl.rewards.base import PromptRecord
from digenrl.rewards.registry import make_reward, reward_names

#: What a worker process holds before it has loaded a model: Python with torch and diffusers.
WORKER_GIB = 0.7
#: Local worker processes per core from which on a note says so.
WORKERS_PER_CORE = 4

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
    check_model(config.model, config.adapter, problems, notes, here=config.cluster.address == "local")
    problems += _cluster_problems(config.cluster)
    if config.cluster.address == "local":
        _check_room(config.cluster.workers, problems, notes)
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


def _check_room(workers: int, problems: list[str], notes: list[str]) -> None:
    """Has this machine room for so many worker processes? Memory decides; more than its cores can serve are slow."""
    memory_gib, cores = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, os.cpu_count() or 1
    if workers * WORKER_GIB > memory_gib:
        problems.append(
            f"cluster.workers must be at most {max(int(memory_gib / WORKER_GIB), 1)} on this machine, got {workers}: "
            f"a worker process takes at least {WORKER_GIB} GiB, and there are {memory_gib:.1f} GiB of memory"
        )
    elif workers > WORKERS_PER_CORE * cores:
        notes.append(f"cluster.workers={workers} share {cores} cores of this machine: fewer are likely to be faster")


def _tracking_problems(tracking: TrackingConfig) -> list[str]:
    close = nearest(tracking.uri, _TRACKING)
    if tracking.uri in _TRACKING or close is None or re.search("[:/]", tracking.uri):
        return []
    return [f"tracking.uri must be managed, none or a tracking URI, got {shown(tracking.uri)}; did you mean {close}?"]


def check_home(home: Path) -> None:
    """Refuse a DIGENRL_HOME that nothing can be written to. Raises ConfigError."""
    if problems := _home_problems(home):
        raise ConfigError(*problems)


def _home_problems(home: Path) -> list[str]:
    existing = next(path for path in (home, *home.parents) if path.exists())
    if not existing.is_dir():
        return [f"DIGENRL_HOME={home} must be a directory, but {existing} is a file"]
    try:
        # Permissions do not tell: a file system may be read-only, or have directories of its own kind, as /proc.
        Path(tempfile.mkdtemp(prefix=".digenrl-", dir=existing)).rmdir()
    except OSError as error:
        return [
            f"DIGENRL_HOME={home} must be writable, but {existing} is not ({error.strerror}); set DIGENRL_HOME to "
            f"another directory"
        ]
    return []
