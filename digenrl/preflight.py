"""What can be checked before a server or worker starts: prompts, rewards, model, cluster address, device, home.

    check(config, home) -> list[str]     notes; raises ConfigError with everything that is wrong
    check_prompts(config) -> list[str]   prompts and rewards alone
    check_home(home)                     the home alone

No weights are loaded, nothing is downloaded, and torch is imported only to look for a CUDA device.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from digenrl.config import ClusterConfig, DataConfig, RewardConfig, RunConfig, TrackingConfig
from digenrl.config.data import described
from digenrl.config.errors import ConfigError, nearest, shown
from digenrl.preflight_model import check_model
from digenrl.prompts import PromptError, PromptSet, load_data, load_held_out, load_prompts
from digenrl.rewards.base import PromptRecord, Reward
from digenrl.rewards.mix import RewardMix
from digenrl.rewards.registry import make_reward

#: What a worker process holds before it has loaded a model: Python with torch and diffusers.
WORKER_GIB = 0.7
#: Local worker processes per core from which on a note says so.
WORKERS_PER_CORE = 4
#: Shared prompts among which an example is chosen.
_MOST_COMPARED = 1000

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


def check_prompts(config: RunConfig) -> list[str]:
    """Check that the prompts are there and have what the rewards need.

    Returns:
        Notes for the user.

    Raises:
        ConfigError: everything that is wrong.
    """
    problems: list[str] = []
    notes: list[str] = []
    _check_prompts(config, problems, notes)
    if problems:
        raise ConfigError(*problems)
    return notes


def _check_prompts(config: RunConfig, problems: list[str], notes: list[str]) -> None:
    data, here = config.data, config.cluster.address == "local"
    unusable: list[str] = []
    for index, term in enumerate(config.rewards):
        _check_reward(f"rewards.{index}", term, unusable, notes, here=here)
    # What prompts need to say depends on the rewards: without those, only their form can be checked.
    train, held_out, idle = _load(data, problems, None if unusable else _RewardCheck(config))
    for term in config.guard.gold or ():
        if (reward := _check_reward("guard.gold", term, unusable, notes, here=here)) is not None:
            unusable += _gold_problems(reward, held_out)
    problems += unusable
    wanted = config.algorithm.prompts_per_iteration
    if train is not None and len(train) < wanted:
        notes.append(
            f"algorithm.prompts_per_iteration={wanted} exceeds the {len(train)} prompts of "
            f"data.prompts={described(data.prompts)}: some are drawn more than once in an iteration"
        )
    notes += [f"rewards: no training prompt names {name!r}: nothing is trained on it" for name in idle]
    if train is not None and isinstance(held_out, PromptSet) and data.held_out is not None:
        problems += _overlap_problems(data, train, held_out)
    notes += _evaluation_notes(config, held_out)


class _RewardCheck:
    """Asks the run's rewards about prompts, and remembers which of them a prompt has named."""

    def __init__(self, config: RunConfig) -> None:
        self._mix = RewardMix.of(config.rewards)
        self.idle = [reward.called for reward in config.rewards]

    def __call__(self, prompt: PromptRecord) -> None:
        self._mix.check(prompt)
        if self.idle:
            self.idle = [name for name in self.idle if not prompt.scored_by(name)]


def _load(
    data: DataConfig, problems: list[str], check: _RewardCheck | None
) -> tuple[PromptSet | None, Sequence[PromptRecord] | None, list[str]]:
    """Prompts to train on and to evaluate on, None where they cannot be read; rewards that no training prompt names."""
    train: PromptSet | None = None
    held_out: Sequence[PromptRecord] | None = None
    idle: list[str] = []
    try:
        if data.held_out_share > 0:
            both = load_data(data, check)
            train, held_out = both.train, both.held_out
        else:
            train = load_prompts(data.prompts, check)
        idle = check.idle if check is not None else []
    except PromptError as error:
        problems.append(f"data.prompts: {error}")
    if data.held_out is not None:
        try:
            held_out = load_held_out(data, check)
        except PromptError as error:
            problems.append(f"data.held_out: {error}")
    return train, held_out, idle


def _overlap_problems(data: DataConfig, train: PromptSet, held_out: PromptSet) -> list[str]:
    assert data.held_out is not None
    shared = train.shared_with(held_out)
    if not shared:
        return []
    example, (here, there) = min((train[here].uid, (here, there)) for here, there in shared[:_MOST_COMPARED])
    return [
        f"data.held_out={described(data.held_out)} must share no id with data.prompts={described(data.prompts)}, but "
        f"{len(shared)} are in both, such as {shown(example)} ({train.place(here)} and {held_out.place(there)})"
    ]


def _evaluation_notes(config: RunConfig, held_out: Sequence[PromptRecord] | None) -> list[str]:
    wanted = config.evaluation.prompts
    if config.evaluation.every == 0 or wanted == 0:
        return []
    if not config.data.holds_out:
        watching = "" if config.guard.mode == "off" else ", and the guard sees nothing"
        return [f"data.held_out is not set: nothing is evaluated on prompts the model was not trained on{watching}"]
    if held_out is not None and len(held_out) < wanted:
        return [f"evaluation.prompts={wanted} exceeds the {len(held_out)} held-out prompts: all of them are used"]
    return []


def _check_reward(key: str, term: RewardConfig, problems: list[str], notes: list[str], *, here: bool) -> Reward | None:
    """The reward, if it can be used. What workers elsewhere may reach is only noted unless they are `here`."""
    try:
        reward = make_reward(term)
    except ValueError as error:
        problems.append(f"{key}: {error}")
        return None
    if (problem := reward.problem()) is not None:
        (problems if here else notes).append(f"{key}: {problem}")
        return None if here else reward
    return reward


def _gold_problems(reward: Reward, held_out: Sequence[PromptRecord] | None) -> list[str]:
    """Held-out prompts that a gold reward could not score."""
    try:
        reward.validate(held_out or ())
    except ValueError as error:
        return [f"data.held_out lacks what guard.gold needs: {error}"]
    return []


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
