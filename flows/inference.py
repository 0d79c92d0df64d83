"""A run's model in this process, for commands that only generate.

inference = Inference(config)
trajectory, images = inference.generate("base", inference.base, samples, prompts)

Steps are deterministic and noise comes from identity, as in the run's evaluations: with the same samples in the same
batches, on one CPU type, the images are those of the run to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError
from digenrl.identity import MicroBatchId, SampleId
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.registry import load_model
from digenrl.policy import Adapter, Policy
from digenrl.rollout import RolloutSpec, RolloutState, advance, finish, start_rollout
from digenrl.trajectory import Trajectory


class Inference:
    """The loaded model and its LoRA slot.

    Args:
        config: of the run.

    Attributes:
        policy: the model.
        base: the adapter every run starts from, which changes nothing.
        notes: what a person should know, in sentences.
    """

    def __init__(self, config: RunConfig) -> None:
        self.notes: list[str] = []
        device = config.cluster.device
        if device == "cuda" and not torch.cuda.is_available():
            self.notes.append("the run was configured for cuda, which this machine has not: generating on the CPU")
            device = "cpu"
        if device == "cpu":
            torch.set_num_threads(1)  # as the workers do: another number of threads may change the last bits
        self._config = config
        model = load_model(config.model, device)
        self.policy = Policy(model, config.adapter, seed=runspec.adapter_seed(config), device=device)
        self.base: Adapter = self.policy.initial_adapter()
        self._embeddings = EmbeddingCache(model)

    def generate(
        self,
        tag: str,
        adapter: Adapter,
        samples: Sequence[SampleId],
        prompts: Sequence[str],
        noise: torch.Tensor | None = None,
    ) -> tuple[Trajectory, NDArray[np.uint8]]:
        """Generate one batch by `evaluation.num_steps` deterministic steps.

        Args:
            tag: names the adapter for the life of this object.
            adapter: the weights.
            samples: B identities.
            prompts: B texts.
            noise: (B, *D) initial latents; None: those of the identities.

        Returns:
            The trajectory, which has no trained steps, and the images (B, F, H, W, 3).

        Raises:
            ConfigError: the adapter does not fit the model.
        """
        config, size = self._config, runspec.geometry(self._config)
        spec = RolloutSpec(
            micro_batch=MicroBatchId("eval", 0, 0),
            samples=tuple(samples),
            version=0,
            sigmas=self.policy.model.sigmas(config.evaluation.num_steps, size),
            stochastic=(),
            steps=(),
            sampler="flow_sde",
            noise_level=0.0,
            guidance_scale=config.model.guidance_scale,
            geometry=size,
        )
        try:
            self.policy.bind(adapter, tag)
        except ValueError as error:
            raise ConfigError(f"the {tag} weights do not fit this run's model and lora: {error}") from None
        with _quiet():
            embeddings = self._embeddings.encode(prompts)
        state = start_rollout(self.policy, spec) if noise is None else RolloutState(0, noise.to(self.policy.device))
        return finish(self.policy, spec, advance(self.policy, spec, state, embeddings, 0, spec.num_steps))

    def noise(self, generator: torch.Generator) -> torch.Tensor:
        """(1, *D) float32: what diffusers draws for one picture from a generator on the CPU, and in which dtype."""
        model = self.policy.model
        shape = model.latent_shape(runspec.geometry(self._config))
        return torch.randn((1, *shape), generator=generator, dtype=model.noise_dtype).to(torch.float32)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' warnings about long prompts: `flows.prompt_notes` says it once, in one line."""
    loggers = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
