"""What a worker's memory must hold, by role: the units themselves, traced on tensors that have shapes and no data.

    LiveBytes                 counts the bytes of tensors that are alive
    trace(sizes) -> Traced    what one unit of each kind holds, of a checkpoint that need not fit this machine
    need_of(config) -> Need   what a worker of a run holds
    capabilities(...)         what of it fits

A trace runs the family's own transformer, with LoRA layers, gradient checkpointing and attention as configured, in
torch's FakeTensorMode: each operation only says what it would return. So the peak is that of the operations that will
run, whatever the family, and no formula has to follow diffusers. Left out are an allocator's rounding and fragments,
and workspace inside of kernels; benchmarks/memory.py compares with what allocators report.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from digenrl import runspec
from digenrl.config import LoraConfig, ModelConfig, RunConfig
from digenrl.models.base import Geometry
from digenrl.models.blank import blank_model, text_encoder_elements
from digenrl.models.checkpoint import CheckpointError, locate
from digenrl.models.pipeline import PipelineModel
from digenrl.policy import Policy
from digenrl.scheduling.messages import Capability

#: Share of the memory that may be planned with; the rest is fragmentation and workspace.
USABLE = 0.9

#: float32.
_FULL = 4


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, the bytes of every tensor that operations return are counted until the tensor is gone.

    Attributes:
        now: bytes that are alive.
        peak: most bytes that were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made: views share a storage, which counts once."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), 0)  # from outside, if it is not known: weights
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage(), leaf.untyped_storage().nbytes())
        return made

    def _count(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._known.pop(key)


@dataclass(frozen=True)
class Traced:
    """Bytes by role, of one micro-batch.

    Attributes:
        base: the transformer's frozen weights.
        vae: the VAE's.
        text_encoders: theirs.
        adapter: one float32 copy of what is trained.
        rollout: activations of a denoising step, its inputs included.
        train_fixed, train_timestep: activations of a forward and backward pass over n timesteps are the first and n
            times the second, the gradient included.
        decode: activations of decoding.
        latents: one float32 latent of each of its samples.
    """

    base: int
    vae: int
    text_encoders: int
    adapter: int
    rollout: int
    train_fixed: int
    train_timestep: int
    decode: int
    latents: int


@dataclass(frozen=True)
class Need:
    """Bytes on one worker.

    Attributes:
        base: frozen weights that stay on the device: transformer and VAE; on the CPU text encoders too.
        states: what training keeps beside them: adapters, optimiser, sums of gradients.
        trajectories: what rollouts of an iteration leave until they are trained.
        rollout: activations of rolling out and decoding a micro-batch, whichever is more.
        fixed, timestep: activations of training n timesteps of a micro-batch are the first and n times the second.
        has: memory of a worker of the reference kind; None: not known.
    """

    base: float
    states: float
    trajectories: float
    rollout: float
    fixed: float
    timestep: float
    has: float | None = None

    @property
    def to_roll_out(self) -> float:
        """Rolling out and decoding."""
        return self.base + self.trajectories + self.rollout

    def train(self, timestep_batch: int) -> float:
        """Training with so many timesteps in one unit."""
        return self.base + self.states + self.trajectories + self.fixed + timestep_batch * self.timestep

    def most_timesteps(self, memory: float) -> int:
        """The largest timestep batch that fits into so much memory."""
        return max(0, int((USABLE * memory - self.train(0)) // self.timestep))


def capabilities(need: Need | None, timestep_batch: int, memory: float | None) -> frozenset[Capability]:
    """What a worker with so much memory can do; everything if either is not known.

    Refused is what cannot fit at all: that little would be left is for `digenrl plan` to say.
    """
    able: set[Capability] = {"rollout", "train", "score"}
    if need is not None and memory is not None:
        if need.to_roll_out > memory:
            able.discard("rollout")
        if need.train(timestep_batch) > memory:
            able.discard("train")
    return frozenset(able)


def trace(
    config: ModelConfig,
    lora: LoraConfig | None,
    micro_batch: int,
    device: str = "cpu",
    transformer: Mapping[str, object] | None = None,
) -> Traced:
    """Trace the units of a micro-batch.

    Args:
        config: checkpoint, on this machine, and sizes.
        lora: the adapter; None: all weights are trained.
        micro_batch: samples.
        device: type of the device that `config.dtype=auto` is about; nothing is put there.
        transformer: fields of the transformer's configuration that differ from the checkpoint's.

    Raises:
        CheckpointError: there is no such checkpoint here, or it cannot generate the size.
    """
    dtype = config.base_dtype(device)
    settled = config.model_copy(update={"dtype": dtype, "compile": False, "attention": "auto"})
    text_encoders = text_encoder_elements(Path(locate(config.path))) * getattr(torch, dtype).itemsize
    mode = FakeTensorMode()
    model = blank_model(settled, transformer=transformer, mode=mode)
    with mode, _standing():
        policy = Policy(model, lora, seed=0)
        policy.bound = 0  # whose values do not matter here
        shape = model.latent_shape(Geometry(config.height, config.width, config.frames))
        weights = policy.trainable()
        trained = sum(parameter.nbytes for parameter in weights.values())
        one, two = (_peak(partial(train_pass, policy, config, n * micro_batch, shape)) for n in (1, 2))
        return Traced(
            base=sum(p.nbytes for p in model.transformer.parameters()) - trained,
            vae=sum(p.nbytes for p in model.pipeline.vae.parameters()),
            text_encoders=text_encoders,
            adapter=_FULL * sum(parameter.numel() for parameter in weights.values()),
            rollout=_peak(lambda: rollout_pass(policy, config, micro_batch, shape)),
            train_fixed=2 * one - two,
            train_timestep=two - one,
            decode=_peak(lambda: model.decode(torch.zeros((micro_batch, *shape)))),
            latents=micro_batch * torch.Size(shape).numel() * _FULL,
        )


def train_pass(policy: Policy, config: ModelConfig, pairs: int, shape: tuple[int, ...]) -> object:
    """Forward and backward over N pairs, as a train unit computes them, on blank inputs; returns the gradients."""
    latents, sigma, embeddings = _inputs(policy, pairs, shape)
    target = torch.zeros_like(latents)
    with torch.enable_grad():
        velocity = policy.velocity(latents, sigma, embeddings, config.guidance_scale)
        loss = (latents - sigma.reshape(-1, *(1 for _ in shape)) * velocity - target).square().mean()
        return torch.autograd.grad(loss, list(policy.trainable().values()), allow_unused=True, materialize_grads=True)


@torch.no_grad()
def rollout_pass(policy: Policy, config: ModelConfig, samples: int, shape: tuple[int, ...]) -> object:
    """One denoising step of B samples on blank inputs."""
    latents, sigma, embeddings = _inputs(policy, samples, shape)
    return latents + policy.velocity(latents, sigma, embeddings, config.guidance_scale)


def _inputs(policy: Policy, count: int, shape: tuple[int, ...]) -> Any:
    model = policy.model
    assert isinstance(model, PipelineModel)
    latents = torch.zeros((count, *shape), device=policy.device)
    sigma = torch.full((count,), 0.5, device=policy.device)
    return latents, sigma, model.blank_embeddings(count)


@contextmanager
def _standing() -> Iterator[None]:
    """Modules stay where and what they are: torch refuses to move fake parameters, and all are in place."""
    before = nn.Module._apply
    nn.Module._apply = lambda self, fn, recurse=True: self  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = before  # type: ignore[method-assign]


def _peak(work: Callable[[], object]) -> int:
    """Most bytes alive at once of what `work` makes."""
    live = LiveBytes()
    with live:
        work()
    return live.peak


def need_of(config: RunConfig) -> Need | None:
    """What one worker of a run holds; None: the checkpoint is not on this machine, so its size is not known."""
    device = config.cluster.device
    try:
        if not Path(locate(config.model.path)).is_dir():
            return None
        traced = trace(config.model, config.adapter, config.micro_batch, device)
    except CheckpointError:
        return None
    algorithm = config.algorithm
    samples = algorithm.prompts_per_iteration * algorithm.samples_per_prompt
    # Entered and left latents of every trained step.
    kept = 2 * runspec.trained_step_count(config) * traced.latents / config.micro_batch
    on_device = device != "cpu"
    return Need(
        base=traced.base + traced.vae + (0 if on_device else traced.text_encoders),
        states=traced.adapter * adapter_copies(config, device),
        trajectories=kept * samples / config.cluster.workers,
        rollout=max(traced.rollout, traced.decode),
        fixed=traced.train_fixed,
        timestep=traced.train_timestep,
    )


def adapter_copies(config: RunConfig, device: str) -> int:
    """Adapters' worth of float32 numbers that a trainer holds while it takes an optimiser step.

    Bound and current; two moments; the gradient; new weights and new moments, as the old ones stay until the step is
    committed; an older adapter if there are several updates in an iteration; a moving average and its successor; the
    sum of gradients, in float64 on the CPU, and two more for groups that are open.
    """
    sums = 2 if device == "cpu" else 1
    older = 1 if config.algorithm.updates_per_iteration > 1 else 0
    average = 2 if config.optimizer.ema_decay is not None else 0
    return 2 + 2 + 1 + 3 + older + average + sums * (3 if config.schedule.streams else 1)
