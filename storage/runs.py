"""The directory of one run: `<home>/<run>/`.

    RunDirectory.create(home, preset, config, name)   claims a name; two processes never get the same one
    RunDirectory.open(home, name)                     an existing run
    run_names(home)                                   runs that exist

    config.yaml     the configuration as resolved
    summary.json    how the run stands; replaced whole
    timeline.json   what ran where and when, in the last attempt; timeline.png shows the end of it
    profile.json    seconds of its units by kind of worker, as measured
    log.txt         the run's log
    lock            held by the process that trains the run, which it names
    checkpoints/    see storage.checkpoints; unless checkpoint.url says they go elsewhere
    pictures/       sample grids by iteration

A run's identity is its name. The claim is the creation of the directory, which the file system does for one process
only.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from digenrl.config import PromptSource, RunConfig
from digenrl.config.errors import ConfigError, did_you_mean
from digenrl.config.load import load_config, show
from storage.atomic import write_atomically

LONGEST_NAME = 64
#: How long a lock may be held without meaning anything.
LOOK_S = 0.3
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CONFIG = "config.yaml"
#: Room for `-` and the number behind the name of a preset.
_LONGEST_STEM = LONGEST_NAME - 10


@dataclass(frozen=True)
class RunDirectory:
    """Paths and small files of one run."""

    path: Path

    @classmethod
    def create(
        cls, home: Path, preset: str, config: RunConfig, name: str | None = None, *, taken: Collection[str] = ()
    ) -> RunDirectory:
        """Claim a directory and write the configuration into it.

        Args:
            home: where runs live; created if absent.
            preset: name or path the configuration came from; the run becomes `<preset>-<n>`, n the next free number.
            config: as resolved. Relative paths in it are written as absolute ones, so that the run can be resumed
                from any directory.
            name: the run's name instead.
            taken: names that runs elsewhere have taken; they are passed over when a number is chosen.

        Raises:
            ConfigError: the name is taken or not a possible name. An attempt that ended before its first iteration does
                not take it: its directory is replaced.
        """
        if name is not None:
            check_name(name)  # before anything is created
        home.mkdir(parents=True, exist_ok=True)
        run = cls(_claim_named(home, name) if name is not None else _claim_next(home, _stem(preset), taken))
        run.write_config(_with_absolute_paths(config))
        return run

    @classmethod
    def open(cls, home: Path, name: str) -> RunDirectory:
        """A run that exists.

        Raises:
            ConfigError: there is no such run; names the nearest one. Or it never got as far as its configuration.
        """
        check_name(name)
        run = cls(home / name)
        if run.config_path.is_file():
            return run
        if run.path.is_dir():
            raise ConfigError(f"{run.path} is not a run: it has no {_CONFIG}; remove it and train again")
        hint = did_you_mean(name, run_names(home), "runs") or "; there are no runs yet"
        raise ConfigError(f"there is no run {name!r} in {home}{hint}")

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def config_path(self) -> Path:
        """The configuration as resolved."""
        return self.path / _CONFIG

    @property
    def summary_path(self) -> Path:
        """How the run stands."""
        return self.path / "summary.json"

    @property
    def timeline_path(self) -> Path:
        """What ran where and when."""
        return self.path / "timeline.json"

    @property
    def profile_path(self) -> Path:
        """Seconds of its units, as measured."""
        return self.path / "profile.json"

    @property
    def log_path(self) -> Path:
        """The run's log."""
        return self.path / "log.txt"

    @property
    def checkpoints(self) -> Path:
        """Root of the run's checkpoints; may not exist yet."""
        return self.path / "checkpoints"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it, this process is the only one that trains the run. The kernel frees the lock if it dies.

        Raises:
            ConfigError: another process trains it; names its pid.
        """
        with (self.path / "lock").open("a+") as lock:
            if not _locked(lock):
                lock.seek(0)
                holder = lock.read().strip() or "unknown"
                raise ConfigError(
                    f"the run {self.name!r} is being trained by process {holder}; wait for it or stop it first"
                )
            lock.truncate(0)
            lock.write(f"{os.getpid()}\n")
            lock.flush()
            yield

    @property
    def is_held(self) -> bool:
        """Whether a process trains the run now."""
        try:
            with (self.path / "lock").open() as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def picture_path(self, label: str, iteration: int) -> Path:
        """Where a picture goes, e.g. `pictures/held-out-000010.png`; its directory exists on return."""
        check_name(label)
        directory = self.path / "pictures"
        directory.mkdir(exist_ok=True)
        return directory / f"{label}-{iteration:06d}.png"

    def write_config(self, config: RunConfig) -> None:
        """Replace the configuration, e.g. on a resume with overrides."""
        write_atomically(self.config_path, show(config).encode())

    def read_config(self) -> RunConfig:
        """The configuration as resolved.

        Raises:
            ConfigError: it was edited into something that cannot run.
        """
        return load_config(str(self.config_path))

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Replace the summary: a reader sees the old one or the new one.

        Raises:
            ValueError: a number is not finite.
        """
        write_atomically(self.summary_path, json.dumps(summary, indent=1, allow_nan=False).encode())

    def read_summary(self) -> dict[str, Any] | None:
        """The summary, None before the first was written.

        Raises:
            ConfigError: the file is damaged. The run does not depend on it: checkpoints hold what is needed to go on.
        """
        try:
            summary: dict[str, Any] = json.loads(self.summary_path.read_bytes())
            problem = None if isinstance(summary.get("iterations"), int) else "it has no number of iterations"
        except FileNotFoundError:
            return None
        except (ValueError, AttributeError, RecursionError) as error:
            problem = str(error)
        if problem is not None:
            raise ConfigError(f"{self.summary_path} is damaged ({problem}); remove it, the run goes on without it")
        return summary

    def summary_if_whole(self) -> dict[str, Any]:
        """The summary; empty if there is none, or only a damaged one. For looking at many runs."""
        try:
            return self.read_summary() or {}
        except ConfigError:
            return {}


def run_names(home: Path) -> list[str]:
    """Names of the runs below `home`, newest first."""
    configs = sorted(home.glob(f"*/{_CONFIG}"), key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent.name for path in configs if _NAME.fullmatch(path.parent.name)]


def check_name(name: str) -> None:
    """A name is a file name on any system and cannot lead out of its directory.

    Raises:
        ConfigError: it is not.
    """
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"the name {name[:20]!r}… has {len(name)} characters, expected at most {LONGEST_NAME}")
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name {name!r} must be made of letters, digits, '.', '_' and '-', and begin with a letter or digit"
        )


def _with_absolute_paths(config: RunConfig) -> RunConfig:
    """The configuration with every path that exists here, or will, made absolute; package names and hub ids stay."""
    data = config.data.model_copy(
        update={"prompts": _located(config.data.prompts), "held_out": _located(config.data.held_out)}
    )
    model = config.model.model_copy(update={"path": _absolute(config.model.path)})
    checkpoint, url = config.checkpoint, config.checkpoint.url
    if url is not None and "://" not in url:
        checkpoint = checkpoint.model_copy(update={"url": str(Path(url).expanduser().absolute())})
    return config.model_copy(update={"data": data, "model": model, "checkpoint": checkpoint})


def _located(prompts: str | tuple[PromptSource, ...] | None) -> str | tuple[PromptSource, ...] | None:
    if prompts is None or isinstance(prompts, str):
        return None if prompts is None else _absolute(prompts)
    return tuple(source.model_copy(update={"path": _absolute(source.path)}) for source in prompts)


def _absolute(path: str) -> str:
    if not Path(path).expanduser().exists():
        return path
    return str(Path(path).expanduser().absolute())


def _claim_named(home: Path, name: str) -> Path:
    path = home / name
    try:
        if path.is_dir():
            _discard_unless_begun(path)
        path.mkdir()
    except FileExistsError:
        raise ConfigError(
            f"the run {name!r} exists in {home}; continue it with `digenrl resume {name}`, or choose another name"
        ) from None
    return path


def _locked(lock: IO[str]) -> bool:
    """Lock a file, unless it stays locked: `is_held` holds it for an instant, to look."""
    deadline = time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        else:
            return True


def _discard_unless_begun(path: Path) -> None:
    """Remove the directory of an attempt that has ended and computed no iteration.

    Its lock tells that the attempt has begun (the file is there) and ended (it is free); a directory without one may
    have been claimed this moment. Whoever waited for the lock of a directory that was replaced finds another one there.
    """
    run = RunDirectory(path)
    try:
        with (path / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock.fileno()).st_ino == (path / "lock").stat().st_ino and not _has_begun(run):
                discarded = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
                path.rename(discarded)
                shutil.rmtree(discarded)
    except (FileNotFoundError, BlockingIOError):
        return


def _has_begun(run: RunDirectory) -> bool:
    """Whether an iteration is complete, as the summary or a checkpoint has it."""
    try:
        summary = run.read_summary() or {}
        if summary.get("status") == "running" and run.read_config().checkpoint.url is not None:
            return True  # it was killed, and its checkpoints are not here
    except ConfigError:  # somebody's run all the same
        return True
    return bool(summary.get("iterations")) or any(
        not re.match(r"step-0+(-|$)", entry.name) for entry in run.checkpoints.glob("step-*")
    )


def _claim_next(home: Path, stem: str, taken: Collection[str]) -> Path:
    """Claim the number after the highest one in use. Numbers are not reused while a later run exists."""
    pattern = re.compile(rf"{re.escape(stem)}-([0-9]{{1,8}})")
    names = [*(entry.name for entry in home.iterdir()), *taken]
    number = 1 + max((int(m[1]) for name in names if (m := pattern.fullmatch(name))), default=0)
    while True:
        path = home / f"{stem}-{number}"
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _stem(preset: str) -> str:
    """The name of a preset, or of a file without its directory and suffix, made into a possible name."""
    name = Path(preset).name.removesuffix(".yaml").removesuffix(".yml")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")[:_LONGEST_STEM]
    return stem or "run"
