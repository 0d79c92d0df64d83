"""The shape of a run: how its work is cut into units, as a pure function of identity.

iteration: P groups x G generations, in micro-batches of `micro_batch` samples of one group
group g's micro-batches: indices [g*G/m, (g+1)*G/m)
optimiser step u of an iteration (0-based) takes groups [u*P/U, (u+1)*P/U)
groups below `stale_groups` of every iteration but the first are generated under the version before its own (TCSS)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from digenrl.identity import EVAL_ITERATION, MicroBatchId, SampleId
from digenrl.scheduling.units import RolloutUnit, TrainUnit


@dataclass(frozen=True)
class RunShape:
    """Sizes that stay fixed for a whole run.

    Attributes:
        run_seed: seed of training samples.
        eval_seed: seed of evaluation samples.
        start_iteration: first iteration to run (> 0 on resume).
        iterations: iterations of the whole run; the last one is `iterations - 1`.
        groups: P, prompt groups per iteration.
        group_size: G, samples per group.
        micro_batch: samples per micro-batch; divides G.
        num_steps: T, denoising steps of training rollouts, at most.
        updates: U, optimiser steps per iteration; divides P.
        timestep_batch: trained timesteps per train unit.
        trained_steps: iteration -> the K steps that are stochastic and trained, increasing.
        detailed: iteration -> whether rollouts are cut into one unit per timestep.
        eval_prompts: held-out samples per evaluation (0: no evaluation).
        eval_micro_batch: samples per evaluation micro-batch (the last one may be smaller).
        eval_num_steps: denoising steps of evaluation rollouts.
        evaluated: version -> whether that version is evaluated.
        steps_per_unit: denoising steps per training rollout unit outside detailed iterations; None: all of them.
        stale_groups: how many groups of an iteration are generated under the version of the iteration before.
        total_steps: iteration -> denoising steps of its rollouts; None: num_steps in all.
    """

    run_seed: int
    eval_seed: int
    start_iteration: int
    iterations: int
    groups: int
    group_size: int
    micro_batch: int
    num_steps: int
    updates: int
    timestep_batch: int
    trained_steps: Callable[[int], tuple[int, ...]]
    detailed: Callable[[int], bool]
    eval_prompts: int
    eval_micro_batch: int
    eval_num_steps: int
    evaluated: Callable[[int], bool]
    steps_per_unit: int | None = None
    stale_groups: int = 0
    total_steps: Callable[[int], int] | None = None

    @property
    def micro_batches_per_group(self) -> int:
        """Micro-batches of one group."""
        return self.group_size // self.micro_batch

    @property
    def groups_per_update(self) -> int:
        """Whole groups in one optimiser step."""
        return self.groups // self.updates

    def micro_batches(self, iteration: int) -> list[MicroBatchId]:
        """Micro-batches of an iteration, groups in order."""
        return [MicroBatchId("train", iteration, i) for i in range(self.groups * self.micro_batches_per_group)]

    def eval_micro_batches(self, version: int) -> list[MicroBatchId]:
        """Micro-batches of the evaluation of `version`."""
        count = -(-self.eval_prompts // self.eval_micro_batch)
        return [MicroBatchId("eval", version, i) for i in range(count)]

    def group_of(self, micro_batch: MicroBatchId) -> int:
        """Group a training micro-batch belongs to."""
        return micro_batch.index // self.micro_batches_per_group

    def samples(self, micro_batch: MicroBatchId) -> tuple[SampleId, ...]:
        """Identities in a micro-batch, in batch order.

        Evaluation samples take the prompt's index as group and always the same noise.
        """
        if micro_batch.phase == "eval":
            first = micro_batch.index * self.eval_micro_batch
            last = min(first + self.eval_micro_batch, self.eval_prompts)
            return tuple(SampleId(self.eval_seed, EVAL_ITERATION, i, 0) for i in range(first, last))
        group, part = divmod(micro_batch.index, self.micro_batches_per_group)
        first = part * self.micro_batch
        draws = micro_batch.draws or (0,) * self.micro_batch
        return tuple(
            SampleId(self.run_seed, micro_batch.iteration, group, first + i, draw) for i, draw in enumerate(draws)
        )

    def rollout_units(self, micro_batch: MicroBatchId) -> list[RolloutUnit]:
        """Units of one trajectory, in order. Evaluations are never cut."""
        if micro_batch.phase == "eval":
            return [RolloutUnit(micro_batch, 0, self.eval_num_steps)]
        total = self.num_steps if self.total_steps is None else self.total_steps(micro_batch.iteration)
        size = 1 if self.detailed(micro_batch.iteration) else self.steps_per_unit or total
        cuts = [*range(0, total, size), total]
        return [RolloutUnit(micro_batch, first, last) for first, last in pairwise(cuts)]

    def train_units(self, micro_batch: MicroBatchId) -> list[TrainUnit]:
        """Train units of one micro-batch, in order."""
        steps = self.trained_steps(micro_batch.iteration)
        size = self.timestep_batch
        return [TrainUnit(micro_batch, steps[i : i + size]) for i in range(0, len(steps), size)]

    def update_of_group(self, iteration: int, group: int) -> int:
        """The theta that the optimiser step of this group makes."""
        return iteration * self.updates + group // self.groups_per_update + 1

    def groups_of_update(self, theta: int) -> tuple[int, range]:
        """(iteration, groups) whose samples enter the step that makes `theta`."""
        iteration, step = divmod(theta - 1, self.updates)
        return iteration, range(step * self.groups_per_update, (step + 1) * self.groups_per_update)

    def theta_of_version(self, version: int) -> int:
        """The adapter that is published as `version`."""
        return version * self.updates

    # --- which weights generate what ---

    def version_of(self, micro_batch: MicroBatchId) -> int:
        """The version that generates a micro-batch: a function of identity, never of timing.

        It is the iteration's own, or for its first `stale_groups` groups the one before: those can be generated while
        the iteration before is still being trained.
        """
        if micro_batch.phase == "eval" or micro_batch.iteration == 0 or self.group_of(micro_batch) >= self.stale_groups:
            return micro_batch.iteration
        return micro_batch.iteration - 1

    def staleness(self, micro_batch: MicroBatchId) -> int:
        """How many versions old its samples are when they are trained on: 0 or 1."""
        return micro_batch.iteration - self.version_of(micro_batch)

    def on_policy(self, micro_batch: MicroBatchId) -> bool:
        """Whether the adapter it is trained from is the one that generated it, so that its ratio is identically 1."""
        first_update = self.group_of(micro_batch) < self.groups_per_update
        return first_update and self.version_of(micro_batch) == micro_batch.iteration

    def versions_in_use(self, version: int) -> range:
        """Versions whose adapters are needed while `version` is the current one."""
        stale = self.stale_groups > 0 and 0 < version < self.iterations
        return range(version - stale, version + 1)
