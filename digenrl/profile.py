"""What units take on this device, measured before a run on its real model with a throw-away adapter.

    measure(...) -> Profile       of one micro-batch: denoising, training at several timestep batches, maybe the rest
    best_timestep_batch(train_s)  the largest timestep batch that no smaller one beats

Nothing is drawn and nothing is kept: noise comes from identities and the trajectory is made up, since how long a pass
takes does not depend on the values. On the CPU the thread's own time is taken, which other processes cannot stretch.

Shapes: B micro-batch, K trained steps, D latent shape of one sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from digenrl import runspec
from digenrl.algorithms.registry import algorithm_of
from digenrl.config import RunConfig
from digenrl.identity import SampleId
from digenrl.models.embeddings import EmbeddingCache
from digenrl.policy import NumberedAdapter, Policy
from digenrl.rewards.base import PromptRecord
from digenrl.rewards.mix import RewardMix
from digenrl.rollout import RolloutSpec, advance, start_rollout
from digenrl.scheduling.costs import KindCosts
from digenrl.scheduling.shape import RunShape
from digenrl.training import stream_unit, train_unit
from digenrl.trajectory import Trajectory

#: Every duration is the shortest of so many; the first one may include the choice of kernels.
REPEATS = 2

#: A smaller timestep batch must take so much less time per timestep to be better. Each unit also costs an
#: orchestration gap, and timings scatter.
MARGIN = 0.1

#: Share of a device's memory that one train unit may take. Trajectories, sums of gradients and adapters need the rest.
MEMORY_SHARE = 0.9

#: Names no adapter of a run.
_THROWN_AWAY = -1


@dataclass(frozen=True)
class Profile:
    """One device.

    Attributes:
        kind: its type.
        costs: what was measured, None for the rest. Timestep batches that do not fit its memory are left out.
        streamed: how many times as long a train unit takes before its group is complete; None: not measured.
        off_policy: whether train units were timed with a forward pass under other weights, which all of them make.
    """

    kind: str
    costs: KindCosts
    streamed: float | None = None
    off_policy: bool = False


def measure(
    kind: str,
    policy: Policy,
    config: RunConfig,
    run_shape: RunShape,
    prompts: Sequence[PromptRecord],
    *,
    everything: bool,
) -> Profile:
    """Time the units of one micro-batch.

    Args:
        kind: type of the device.
        policy: as the run will use it; it is left with an adapter bound that no theta names.
        config: of the run.
        run_shape: of the run.
        prompts: of its first micro-batch, B records.
        everything: also time decoding, scoring and train units whose group is not complete.
    """
    bench = _Bench(policy, config, run_shape, prompts)
    rollout_step_s, train_s = bench.rollout_step_s(), bench.train_s()
    if not everything:
        return Profile(kind, KindCosts(rollout_step_s=rollout_step_s, train_s=train_s), off_policy=bench.off_policy)
    decode_s, score_s = bench.decode_and_score_s()
    costs = KindCosts(rollout_step_s=rollout_step_s, train_s=train_s, decode_s=decode_s, score_s=score_s)
    batch = best_timestep_batch(train_s)
    streamed = bench.streamed_s(batch) / train_s[batch] if train_s else None
    return Profile(kind, costs, streamed, off_policy=bench.off_policy)


def best_timestep_batch(train_s: Mapping[int, float]) -> int:
    """The largest timestep batch, unless half of it takes clearly less time per timestep, and so on.

    Args:
        train_s: timestep batch -> seconds of a train unit; those that fit. 1 if none does: it will fail where it is
            used, with the device's own words.
    """
    best, *smaller = sorted(train_s, reverse=True) or [1]
    for batch in smaller:
        if train_s[batch] / batch >= (1 - MARGIN) * train_s[best] / best:
            break
        best = batch
    return best


class _Bench:
    """The first micro-batch of a run under the adapter that the policy would start from."""

    def __init__(self, policy: Policy, config: RunConfig, run_shape: RunShape, prompts: Sequence[PromptRecord]) -> None:
        self._policy, self._config, self._prompts = policy, config, prompts
        micro_batch = run_shape.micro_batches(run_shape.start_iteration)[0]
        self._spec = runspec.rollout_spec(config, run_shape, policy.model, micro_batch, micro_batch.iteration)
        self._embeddings = EmbeddingCache(policy.model).encode([prompt.text for prompt in prompts])
        self._adapter = NumberedAdapter(_THROWN_AWAY, policy.initial_adapter())
        self.off_policy = algorithm_of(config.algorithm).lags
        self._old = replace(self._adapter, role="behaviour" if self.off_policy else "adapter")
        policy.bind(self._adapter.weights, self._adapter.tag)
        self._start = start_rollout(policy, self._spec)

    def rollout_step_s(self) -> float:
        """One denoising step."""
        return self._time(lambda: advance(self._policy, self._spec, self._start, self._embeddings, 0, 1))

    def train_s(self) -> dict[int, float]:
        """Timestep batch -> seconds, from all K downwards by halves as far as that is better; empty if none fits."""
        found: dict[int, float] = {}
        batch = len(self._spec.steps)
        while True:
            seconds = self._train_s(batch)
            if seconds is not None:
                found[batch] = seconds
            if batch == 1 or (len(found) > 1 and best_timestep_batch(found) != batch):
                break
            batch = (batch + 1) // 2
        return found

    def streamed_s(self, batch: int) -> float:
        """A train unit whose group is not complete."""
        return self._time(
            lambda: stream_unit(
                self._policy,
                _trajectory(self._spec, self._start.latents),
                self._embeddings,
                self._spec.steps[:batch],
                self._weights,
                baseline=0.0,
                current=self._adapter,
                algorithm=self._config.algorithm,
                guidance_scale=self._config.model.guidance_scale,
                normaliser=runspec.normaliser(self._config),
                old=self._old,
            )
        )

    def decode_and_score_s(self) -> tuple[float, float]:
        """Decoding a micro-batch, and scoring what comes out."""
        images = self._policy.model.decode(self._start.latents).images.numpy()
        reward = RewardMix.of(self._config.rewards).load()
        decode_s = self._time(lambda: self._policy.model.decode(self._start.latents))
        # Rewards may use threads of their own.
        return decode_s, self._time(lambda: reward(images, self._prompts), clock=time.perf_counter)

    @property
    def _weights(self) -> dict[SampleId, float]:
        return dict.fromkeys(self._spec.samples, 1.0)

    def _train_s(self, batch: int) -> float | None:
        """None: it does not fit the device's memory."""
        return within_memory(self._policy.device, lambda: self._time(lambda: self._train(batch)))

    def _train(self, batch: int) -> None:
        train_unit(
            self._policy,
            _trajectory(self._spec, self._start.latents),
            self._embeddings,
            self._spec.steps[:batch],
            self._weights,
            current=self._adapter,
            old=self._old,
            algorithm=self._config.algorithm,
            guidance_scale=self._config.model.guidance_scale,
            normaliser=runspec.normaliser(self._config),
        )

    def _time(self, work: Callable[[], object], clock: Callable[[], float] | None = None) -> float:
        device = self._policy.device
        clock = clock or (time.thread_time if device.type == "cpu" else time.perf_counter)
        shortest = float("inf")
        for _ in range(REPEATS):
            began = clock()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            shortest = min(shortest, clock() - began)
        return shortest


def within_memory(device: torch.device, work: Callable[[], float]) -> float | None:
    """What `work` returns; None if it needs more than MEMORY_SHARE of a CUDA device's memory."""
    if device.type != "cuda":
        return work()
    torch.cuda.reset_peak_memory_stats(device)
    try:
        found = work()
    except torch.cuda.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    peak_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return found if peak_bytes <= MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory else None


def _trajectory(spec: RolloutSpec, latents: torch.Tensor) -> Trajectory:
    """One of the right shapes that stands still: every step enters and leaves `latents` (B, *D)."""
    count = len(spec.steps)
    still = latents.expand(count, *latents.shape)
    return Trajectory(
        micro_batch=spec.micro_batch,
        samples=spec.samples,
        version=spec.version,
        sigmas=spec.sigmas,
        steps=spec.steps,
        latents=still,
        next_latents=still,
        log_probs=latents.new_zeros((count, len(latents))),
        finite=torch.ones(len(latents), dtype=torch.bool),
        clean=latents if spec.keep_clean else latents.new_empty((0, *latents.shape[1:])),
    )
