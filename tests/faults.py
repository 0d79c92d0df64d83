"""Things that go wrong on workers, on demand. Imported by worker processes too.

FaultyReward    a reward that does what the prompt's field `fault` says
Faults          a Dask plugin that brings faults to every worker, also to those that come later
faulty(...)     prompts of which some carry a fault
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from distributed import Worker, WorkerPlugin
from numpy.typing import NDArray

from digenrl.config import RewardConfig, RunConfig
from digenrl.identity import SampleId
from digenrl.rewards.base import PromptRecord, Reward, Score, Scored
from digenrl.rewards.registry import REWARDS
from workers import replica


class FaultyReward(Reward):
    """Mean brightness, after what the first prompt's fault asks for."""

    name = "faulty"

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """See Reward."""
        fault, _, argument = prompts[0].fields.get("fault", "").partition(" ")
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "raise":
            raise ValueError("this picture cannot be scored")
        if fault == "sleep":
            time.sleep(float(argument))
        return [Scored(float(image.mean()) / 255) for image in images]


def faulty_config(config: RunConfig) -> RunConfig:
    """The run with the faulty reward alone."""
    return config.model_copy(update={"rewards": (RewardConfig(name=FaultyReward.name),)})


def faulty(faults: Mapping[int, str], groups: int) -> tuple[PromptRecord, ...]:
    """One prompt per group; some carry a fault."""
    return tuple(
        PromptRecord(f"p{i}", f"{i:03d}", {"target": f"{i:03d}", "fault": faults.get(i, "")}) for i in range(groups)
    )


@dataclass
class Faults(WorkerPlugin):
    """Sets faults up in a worker process.

    Attributes:
        name: of the plugin.
        nan: whose last latents become NaN, before they are decoded: (group, generation).
        round_stored: store the next latents of training rollouts in bfloat16, after they were scored.
        tamper: adapters lose their last bit when they are sent.
        stuck: rollouts take the weights of the first one, whatever version they say.
        executions: file to which every executed unit appends "pid label".
    """

    name: str = "faults"
    nan: frozenset[tuple[int, int]] = frozenset()
    round_stored: bool = False
    tamper: bool = False
    stuck: bool = False
    executions: Path | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)

    def setup(self, worker: Worker) -> None:
        """Patch this process."""
        REWARDS[FaultyReward.name] = "faults:FaultyReward"
        if self.nan or self.round_stored:
            self._patch(replica, "finish", self._finish)
        if self.tamper:
            self._patch(replica.Replica, "load", _tampered)
        if self.stuck:
            self._patch(replica.Replica, "_rollout", _stuck)
        if self.executions is not None:
            self._patch(replica.Replica, "run", self._noted)

    def teardown(self, worker: Worker) -> None:
        """Leave the process as it was."""
        REWARDS.pop(FaultyReward.name, None)
        for undo in self.undo:
            undo()

    def _patch(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, wrap(original))
        self.undo.append(lambda: setattr(owner, name, original))

    def _finish(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        def finished(policy: Any, spec: Any, state: Any) -> Any:
            if spec.micro_batch.phase == "train":
                state = self._spoilt(spec.samples, state)
            return finish(policy, spec, state)

        return finished

    def _spoilt(self, samples: Sequence[SampleId], state: Any) -> Any:
        from dataclasses import replace

        latents = state.latents.clone()
        for row, sample in enumerate(samples):
            if (sample.group, sample.generation) in self.nan:
                latents[row] = torch.nan
        left = tuple(t.bfloat16().float() for t in state.left) if self.round_stored else state.left
        return replace(state, latents=latents, left=left)

    def _noted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        assert self.executions is not None
        path = self.executions

        def noted(held: Any, assignment: Any) -> Any:
            with path.open("a") as file:
                file.write(f"{os.getpid()} {assignment.run.unit.label}\n")
            return run(held, assignment)

        return noted


def _stuck(rollout: Callable[..., Any]) -> Callable[..., Any]:
    first: dict[str, Any] = {}

    def rolled(held: Any, unit: Any, run: Any, prompts: Any) -> Any:
        from digenrl.policy import NumberedAdapter

        weights = first.setdefault(held.setup.epoch, held._weights.behaviour(run.theta).weights)
        held._weights.behaviour = lambda theta: NumberedAdapter(theta, weights)
        try:
            return rollout(held, unit, run, prompts)
        finally:
            del held._weights.behaviour

    return rolled


def _tampered(load: Callable[..., Any]) -> Callable[..., Any]:
    def loaded(held: Any, ref: Any) -> Any:
        meta, tensors = load(held, ref)
        if not hasattr(ref, "theta") or hasattr(ref, "worker"):
            return meta, tensors
        name = sorted(tensors)[0]
        return meta, {**tensors, name: torch.nextafter(tensors[name], torch.tensor(torch.inf))}

    return loaded


@contextmanager
def installed(ground: Any, faults: Faults) -> Iterator[None]:
    """Within it, all workers of a cluster have the faults."""
    ground.install(faults)
    try:
        yield
    finally:
        ground.uninstall(faults.name)
