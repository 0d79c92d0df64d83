"""Is a checkpoint computed here as its own pipeline computes it? The families' tests, repeated on given weights.

    verify(config) -> Iterator[Check]     as they are made; some take minutes on real weights
    family_in(path), smallest(...)    what a checkpoint says of itself

The limits are of float32 and of bfloat16, where the pipelines of pictures round latents after every step and ours do
not. Numbers are differences relative to the norm (L2) of what is expected, unless a check says otherwise.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from digenrl.config import FlowGrpoConfig, LoraConfig, ModelConfig
from digenrl.contributions import Contribution
from digenrl.identity import MicroBatchId, SampleId
from digenrl.models.base import Geometry
from digenrl.models.checkpoint import CheckpointError, locate
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.pipeline import PipelineModel, quiet
from digenrl.models.registry import FAMILIES, load_model, save_lora
from digenrl.models.stock import stock_of
from digenrl.policy import NumberedAdapter, Policy
from digenrl.rollout import RolloutSpec, RolloutState, advance, finish, start_rollout
from digenrl.training import train_unit
from digenrl.trajectory import Trajectory

#: Of different lengths.
PROMPTS = ("042", "two dogs", "a cat")
STEPS, TRAINED = 4, (0, 1, 2)
#: An adapter that changes latents by less shows nothing.
ACTS = 1e-3


@dataclass(frozen=True)
class Limits:
    """What each check may differ by; `adapter` as a share of its effect: one of half the strength is off by 0.5."""

    encoding: float
    latents: float
    log_prob: float
    gradient: float
    adapter: float


LIMITS = {
    "float32": Limits(encoding=1e-5, latents=1e-5, log_prob=1e-6, gradient=1e-3, adapter=1e-3),
    "bfloat16": Limits(encoding=2e-2, latents=5e-2, log_prob=1e-3, gradient=2e-1, adapter=0.35),
}


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        name: what was compared.
        value: what was found.
        limit: what is allowed.
        detail: in words.
        at_least: the limit is the least value, not the greatest.
    """

    name: str
    value: float
    limit: float
    detail: str = ""
    at_least: bool = False

    @property
    def passed(self) -> bool:
        """Whether the limit is kept; NaN never is."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


def family_in(path: str) -> str:
    """The family of a checkpoint on this machine.

    Raises:
        CheckpointError: it is not one, or of none of the families.
    """
    folder = Path(locate(path))
    index = folder / "model_index.json"
    if not folder.is_dir():
        raise CheckpointError(f"{path} is a hub id: say of which family it is (--family {'|'.join(FAMILIES)})")
    if not index.is_file():
        raise CheckpointError(
            f"{path} holds no model_index.json; expected a diffusers pipeline saved by save_pretrained"
        )
    try:
        found = json.loads(index.read_bytes()).get("_class_name")
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a JSON object ({error})") from None
    known = {family.pipeline: name for name, family in FAMILIES.items()}
    if found not in known:
        raise CheckpointError(f"{path} holds a {found}; the pipelines that can be trained are {', '.join(known)}")
    return known[found]


def smallest(family: str, path: str) -> Geometry:
    """A small size that a checkpoint generates: what is checked does not depend on it, how long it takes does.

    Raises:
        CheckpointError: the checkpoint is a folder without the files that tell.
    """
    folder = Path(locate(path))
    if not folder.is_dir():  # on the hub: every published checkpoint of the families generates this
        return Geometry(256, 384, 1 if FAMILIES[family].pictures else 5)
    try:
        vae, transformer = (json.loads((folder / part / "config.json").read_bytes()) for part in ("vae", "transformer"))
        sizes = FAMILIES[family].sizes(vae, transformer)
    except OSError as error:
        raise CheckpointError(f"model.path={path} is not complete: {error.filename} is missing") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"model.path={path} holds no {family} checkpoint: {error!r}") from None
    unit = sizes.scale * sizes.patch
    height, width = (min(n * unit, sizes.largest or n * unit) for n in (8, 12))
    return Geometry(height, width, 1 if sizes.frame_scale is None else sizes.frame_scale + 1)


def verify(
    config: ModelConfig, lora: LoraConfig, device: str = "cpu", geometry: Geometry | None = None
) -> Iterator[Check]:
    """Check a checkpoint.

    Args:
        config: which, and size of the samples. Its guidance scale is not looked at: both kinds of guidance are.
        lora: of the adapter that is tried.
        device: where.

    Raises:
        ConfigError: it cannot be loaded, or a target matches no layer.
    """
    with quiet():  # that prompts are cut is not news
        yield from _checks(config, lora, device)


def _checks(config: ModelConfig, lora: LoraConfig, device: str) -> Iterator[Check]:
    began = time.perf_counter()
    model = load_model(config, device)
    assert isinstance(model, PipelineModel)
    took = time.perf_counter() - began
    parameters = sum(parameter.numel() for parameter in model.transformer.parameters())
    yield Check(
        "loads", parameters, 1, f"parameters of {type(model.transformer).__name__}, in {took:.1f} s", at_least=True
    )
    trial = _Trial(config, model, lora, device)
    yield Check(
        "LoRA layers bound", trial.policy.bound_modules, 1, ", ".join(lora.targets or model.lora_targets), at_least=True
    )
    yield from trial.encoding()
    for guided in (False, True):
        yield trial.pipelines_call(guided)
    yield trial.replay()
    yield trial.timestep_batch()
    yield trial.singles()
    adapted = trial.adapted()
    del trial, model  # the pipeline is loaded again, and there may be room for one
    gc.collect()
    yield from adapted.in_a_fresh_pipeline(config, lora, device)


@dataclass(frozen=True)
class _Adapted:
    """A rollout under an adapter: from `start` to `latents`, both (B, *D)."""

    weights: dict[str, torch.Tensor]
    start: torch.Tensor
    latents: torch.Tensor
    geometry: Geometry
    tokens: int
    limit: float

    def in_a_fresh_pipeline(self, config: ModelConfig, lora: LoraConfig, device: str) -> Iterator[Check]:
        """An adapter that was saved does there what it did here."""
        stock, model = stock_of(config.family), load_model(config, device)
        assert isinstance(model, PipelineModel)
        pipeline = stock.prepare(model.pipeline.to(device))

        def latents() -> torch.Tensor:
            found: torch.Tensor = stock.call(
                pipeline,
                PROMPTS,
                self.start,
                self.geometry,
                steps=STEPS,
                guidance=stock.guidance[0],
                tokens=self.tokens,
            )
            return found

        without = latents()
        with tempfile.TemporaryDirectory() as folder, quiet():
            save_lora(config.family, self.weights, lora, Path(folder))
            pipeline.load_lora_weights(folder)
        effect = relative(without, self.latents)
        yield Check("adapter acts", effect, ACTS, "latents without it differ", at_least=True)
        off = relative(latents(), self.latents) / effect
        yield Check("adapter in load_lora_weights", off, self.limit, "final latents, as a share of its effect")


class _Trial:
    def __init__(self, config: ModelConfig, model: PipelineModel, lora: LoraConfig, device: str) -> None:
        self.geometry, self.tokens = Geometry(config.height, config.width, config.frames), model.tokens
        self.limits = LIMITS[config.base_dtype(torch.device(device).type)]
        self.model, self.stock = model, stock_of(config.family)
        self.policy = Policy(model, lora, seed=0, device=device)
        self.moved = moved(self.policy)
        self.model.pipeline.vae.to(self.model.device)

    def encoding(self) -> Iterator[Check]:
        """Embeddings of a batch, and of one prompt at a time, against `encode_prompt`."""
        with self.model.encoders_on_device():
            expected = self.stock.encoded(self.model.pipeline, PROMPTS, self.tokens)
        ours = {"together": self.model.encode(PROMPTS), "one by one": EmbeddingCache(self.model).encode(PROMPTS)}
        for way, found in ours.items():
            if found.keys() != expected.keys():
                yield Check(f"prompts encoded {way}", float("nan"), self.limits.encoding, "other tensors")
                continue
            worst = max(relative(found[name], tensor) for name, tensor in expected.items())
            yield Check(f"prompts encoded {way}", worst, self.limits.encoding, "against encode_prompt")

    def pipelines_call(self, guided: bool) -> Check:
        """A rollout without noise is the pipeline's own call."""
        guidance = self.stock.guidance[guided]
        self._bind(self.policy.initial_adapter(), 0)
        spec = self._spec(3, (), guidance)
        start = start_rollout(self.policy, spec).latents
        found = self._rolled_out(spec, list(PROMPTS))[0].latents
        pipeline = self.model.pipeline
        before = pipeline.scheduler
        with self.policy.reference(), self.model.encoders_on_device():
            expected = self.stock.call(
                self.stock.prepare(pipeline),
                PROMPTS,
                start,
                self.geometry,
                steps=STEPS,
                guidance=guidance,
                tokens=self.tokens,
            )
        pipeline.scheduler = before
        detail = f"final latents of {STEPS} steps, guidance {guidance:g}"
        return Check("rollout is the pipeline's call", relative(found, expected), self.limits.latents, detail)

    def replay(self) -> Check:
        """Training sees the log-probs of the rollout, ratio 1. A step at a time: a batch may round otherwise."""
        spec, trajectory = self._trajectory()
        metrics = [self._trained(spec, (step,), trajectory).metrics for step in TRAINED]
        gap = max(max(m.logp_gap_max, abs(m.ratio_max - 1)) for m in metrics)
        return Check("log-probs replayed", gap, self.limits.log_prob, "largest difference; the ratio is 1")

    def timestep_batch(self) -> Check:
        """One pass over several steps has the gradient of a pass per step."""
        spec, trajectory = self._trajectory()
        together = self._trained(spec, TRAINED, trajectory).gradient
        single = [self._trained(spec, (step,), trajectory).gradient for step in TRAINED]
        whole = torch.cat([gradient.flatten() for gradient in together.values()])
        summed = torch.cat([torch.stack([g[name] for g in single]).sum(0).flatten() for name in together])
        return Check("timesteps batched", relative(whole, summed), self.limits.gradient, "gradient, against one by one")

    def singles(self) -> Check:
        """A batch is as its samples alone."""
        self._bind(self.moved.weights, self.moved.theta)
        spec = self._spec(3, TRAINED, self.stock.guidance[1])
        together = self._rolled_out(spec, list(PROMPTS))[0].latents
        alone = [
            self._rolled_out(replace(spec, samples=(sample,)), [prompt])[0].latents
            for sample, prompt in zip(spec.samples, PROMPTS, strict=True)
        ]
        return Check("batch as its samples alone", relative(together, torch.cat(alone)), self.limits.latents, "latents")

    def adapted(self) -> _Adapted:
        """A rollout under an adapter."""
        self._bind(self.moved.weights, self.moved.theta)
        spec = self._spec(3, (), self.stock.guidance[0])
        start, latents = start_rollout(self.policy, spec).latents, self._rolled_out(spec, list(PROMPTS))[0].latents
        return _Adapted(self.moved.weights, start, latents, self.geometry, self.tokens, self.limits.adapter)

    def _bind(self, weights: dict[str, torch.Tensor], tag: int) -> None:
        self.policy.bind(weights, tag)

    def _spec(self, size: int, steps: tuple[int, ...], guidance: float) -> RolloutSpec:
        return rollout_of(self.policy, self.geometry, size, steps, guidance)

    def _rolled_out(self, spec: RolloutSpec, prompts: list[str]) -> tuple[RolloutState, Trajectory]:
        embeddings = EmbeddingCache(self.model).encode(prompts)
        state = advance(self.policy, spec, start_rollout(self.policy, spec), embeddings, 0, spec.num_steps)
        return state, finish(self.policy, spec, state)[0]

    def _trajectory(self) -> tuple[RolloutSpec, Trajectory]:
        self._bind(self.moved.weights, self.moved.theta)
        spec = self._spec(3, TRAINED, self.stock.guidance[1])
        return spec, self._rolled_out(spec, [PROMPTS[1]] * 3)[1]

    def _trained(self, spec: RolloutSpec, steps: tuple[int, ...], trajectory: Trajectory) -> Contribution:
        return train_unit(
            self.policy,
            trajectory,
            EmbeddingCache(self.model).encode([PROMPTS[1]] * len(spec.samples)),
            steps,
            dict(zip(spec.samples, (1.0, -0.5, 0.7), strict=True)),
            current=self.moved,
            old=self.moved,
            algorithm=FlowGrpoConfig(num_steps=STEPS),
            guidance_scale=spec.guidance_scale,
            normaliser=len(spec.samples) * len(TRAINED),
        )


def moved(policy: Policy, scale: float = 0.1) -> NumberedAdapter:
    """An adapter away from the start, both matrices of every layer."""
    generator = torch.Generator().manual_seed(1)
    start = policy.initial_adapter()
    noise = {name: torch.randn(w.shape, generator=generator).to(w) for name, w in start.items()}
    return NumberedAdapter(1, {name: w + scale * noise[name] for name, w in start.items()})


def rollout_of(
    policy: Policy, geometry: Geometry, size: int, steps: Sequence[int], guidance: float, num_steps: int = STEPS
) -> RolloutSpec:
    """The rollout of a micro-batch of `size`, noise at `steps`."""
    return RolloutSpec(
        micro_batch=MicroBatchId("train", 0, 0),
        samples=tuple(SampleId(7, 0, 0, i) for i in range(size)),
        version=0,
        sigmas=policy.model.sigmas(num_steps, geometry),
        stochastic=tuple(steps),
        steps=tuple(steps),
        sampler="flow_sde",
        noise_level=0.7,
        guidance_scale=guidance,
        geometry=geometry,
    )


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, in norms of what is expected."""
    difference = found.double() - expected.double().to(found.device)
    return float(difference.norm() / expected.double().norm().clamp_min(1e-12))
