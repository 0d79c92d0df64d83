"""What train_step, rollout and gpu compare: our units, and what people write without them, on one model in one process.

Bench.of(model, ...)       a policy and a micro-batch to train and roll out
Bench.train, .published    the gradient of a micro-batch: our train unit; one timestep of one sample at a time
Bench.roll_out, .call      samples: our rollout; the diffusers pipeline's own call
in_turns(works, repeats)   median seconds of each, measured A B A B ...
peak_bytes(work, device)   most memory above the loaded process, from the allocator
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from digenrl.algorithms.steps import log_prob, step_mean, step_terms
from digenrl.config import FlowGrpoConfig, LoraConfig
from digenrl.models.base import Embeddings, Geometry
from digenrl.models.pipeline import PipelineModel
from digenrl.models.registry import FAMILIES
from digenrl.models.stock import Stock, stock_of
from digenrl.models.verify import moved, rollout_of
from digenrl.policy import Adapter, NumberedAdapter, Policy
from digenrl.rollout import RolloutSpec, advance, finish, start_rollout
from digenrl.training import train_unit
from digenrl.trajectory import Trajectory

#: Clip range of the ratio, on both sides.
CLIP = 1e-4


@dataclass(frozen=True)
class Bench:
    """A policy, its adapter, and one micro-batch of B samples with K of T steps stochastic and trained.

    Guidance is off, or what a distilled transformer is given.
    """

    policy: Policy
    adapter: NumberedAdapter
    spec: RolloutSpec
    embeddings: Embeddings
    trajectory: Trajectory
    stock: Stock

    @classmethod
    def of(
        cls, model: PipelineModel, policy: Policy, geometry: Geometry, size: int, trained: int, num_steps: int
    ) -> Bench:
        """Roll the micro-batch out once; prompts are blank."""
        stock = stock_of(model.family)
        guidance = stock.guidance[FAMILIES[model.family].distilled]
        spec = rollout_of(policy, geometry, size, range(trained), guidance, num_steps)
        adapter = moved(policy, 0.01)
        policy.bind(adapter.weights, adapter.tag)
        generator = torch.Generator().manual_seed(0)
        embeddings = {
            name: tensor if "mask" in name else torch.randn(tensor.shape, generator=generator).to(tensor)
            for name, tensor in model.blank_embeddings(size).items()
        }
        state = advance(policy, spec, start_rollout(policy, spec), embeddings, 0, num_steps)
        return cls(policy, adapter, spec, embeddings, finish(policy, spec, state)[0], stock)

    @property
    def advantages(self) -> dict[Any, float]:
        """Of the samples, of both signs."""
        return {sample: 1.0 if i % 2 else -0.8 for i, sample in enumerate(self.spec.samples)}

    def train(self, timestep_batch: int) -> Adapter:
        """The gradient by our train units, `timestep_batch` trained steps at a time."""
        steps = self.spec.steps
        summed: Adapter = {}
        for first in range(0, len(steps), timestep_batch):
            found = train_unit(
                self.policy,
                self.trajectory,
                self.embeddings,
                steps[first : first + timestep_batch],
                self.advantages,
                current=self.adapter,
                old=self.adapter,
                algorithm=FlowGrpoConfig(num_steps=self.spec.num_steps, clip_range=CLIP),
                guidance_scale=self.spec.guidance_scale,
                normaliser=len(steps) * len(self.spec.samples),
            ).gradient
            summed = {name: summed[name] + g if summed else g for name, g in found.items()}
        return summed

    def published(self) -> Adapter:
        """The gradient by the loop of Flow-GRPO's scripts: for each sample, for each timestep, forward and backward."""
        policy, path, spec = self.policy, self.trajectory, self.spec
        parameters = policy.trainable()
        sigmas = path.sigmas.to(policy.device)
        for parameter in parameters.values():
            parameter.grad = None
        for row, advantage in enumerate(self.advantages.values()):
            prompt = {name: tensor[row : row + 1] for name, tensor in self.embeddings.items()}
            for position, step in enumerate(spec.steps):
                index = torch.tensor([step], device=policy.device)
                latents, after = (kept[position, row : row + 1] for kept in (path.latents, path.next_latents))
                velocity = policy.velocity(latents, sigmas[index], prompt, spec.guidance_scale)
                terms = step_terms(spec.sampler, sigmas, index, spec.noise_level, latents.ndim)
                log_p = log_prob(spec.sampler, after, step_mean(terms, latents, velocity), terms)
                ratio = torch.exp(log_p - log_p.detach())
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = torch.maximum(-advantage * ratio, -advantage * clipped).mean()
                (loss / (len(spec.steps) * len(spec.samples))).backward()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in parameters.items()}

    def roll_out(self) -> object:
        """Our rollout, noise and decoding included."""
        policy, spec = self.policy, self.spec
        state = advance(policy, spec, start_rollout(policy, spec), self.embeddings, 0, spec.num_steps)
        return finish(policy, spec, state)

    def call(self, output: str = "np") -> object:
        """The pipeline's own call with the same model, steps, embeddings and adapter, decoding included."""
        arguments = self.stock.call_arguments(
            [],
            start_rollout(self.policy, self.spec).latents,
            self.spec.geometry,
            steps=self.spec.num_steps,
            guidance=self.spec.guidance_scale,
            output=output,
        )
        given = {name: tensor for name, tensor in self.embeddings.items() if not name.startswith("negative_")}
        return self.policy.model.pipeline(**{**arguments, **given, "prompt": None})


def policy_of(model: PipelineModel, rank: int, device: str) -> Policy:
    """A policy with a LoRA on the family's layers."""
    model.pipeline.vae.to(device)
    return Policy(model, LoraConfig(rank=rank, alpha=rank), seed=0, device=device)


def in_turns(works: Mapping[str, Callable[[], object]], repeats: int, device: str) -> dict[str, float]:
    """Median seconds of each, after one that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            _synchronise(device)
            began = time.perf_counter()
            work()
            _synchronise(device)
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return {name: median(found) for name, found in seconds.items()}


def peak_bytes(work: Callable[[], object], device: str) -> float:
    """Allocator's peak while `work` runs, above what was there, its result included."""
    gc.collect()
    if device == "cuda":
        work()  # libraries take their workspace
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return float(torch.cuda.max_memory_allocated() - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = seen.profiler.kineto_results.events()
    moves = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    now = most = 0
    for _, size in moves:
        now += size
        most = max(most, now)
    return float(most)


def resident_bytes(work: Callable[[], object]) -> float:
    """By how much the process's resident memory grows at most while `work` runs (Linux)."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    work()
    return float(_status("VmHWM") - before)


def differ(one: Adapter, other: Adapter) -> float:
    """Norm of the difference of two gradients, relative."""
    flat: Sequence[torch.Tensor] = [torch.cat([g[name].flatten().double() for name in one]) for g in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
