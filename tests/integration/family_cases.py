"""One small case of every model family, and how its stock pipeline is called by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from digenrl.config import LoraConfig, ModelConfig
from digenrl.models.base import Geometry
from digenrl.models.registry import load_model
from digenrl.models.stock import Stock, stock_of
from digenrl.models.verify import rollout_of
from digenrl.policy import Policy
from digenrl.rollout import RolloutSpec
from digenrl.trajectory import Trajectory

#: Of different lengths.
PROMPTS = ["042", "two dogs", "a cat"]
LORA = LoraConfig(rank=4, alpha=8)


@dataclass(frozen=True)
class Case:
    """A family on its tiny checkpoint."""

    model: ModelConfig

    @property
    def called(self) -> Stock:
        """How the family's pipeline is called."""
        return stock_of(self.model.family)

    @property
    def guidance(self) -> tuple[float, float]:
        """Without and with."""
        return self.called.guidance

    @property
    def tokens(self) -> int:
        """Of the long part of a prompt; the tiny SD3 has no T5."""
        return {"sd3": 0, "hunyuan": 256}.get(self.model.family, 512)

    @property
    def geometry(self) -> Geometry:
        return Geometry(self.model.height, self.model.width, self.model.frames)

    def policy(self, lora: LoraConfig = LORA) -> Policy:
        return Policy(load_model(self.model), lora, seed=0)

    def wide_policy(self) -> Policy:
        """The same in float64."""
        model = load_model(self.model)
        model.transformer.double()
        model._dtype = torch.float64
        return Policy(model, LORA, seed=0, dtype=torch.float64)

    def stock(self) -> Any:
        """The family's pipeline, freshly loaded."""
        pipeline = load_model(self.model).pipeline
        return self.called.prepare(pipeline)

    def encoded(self, pipeline: Any, prompts: list[str]) -> Mapping[str, torch.Tensor]:
        """What `encode_prompt` of the pipeline gives, by our names."""
        return self.called.encoded(pipeline, prompts, self.tokens)

    def call(self, pipeline: Any, latents: torch.Tensor, steps: int, guidance: float, output: str) -> Any:
        """Final latents (B, *D), or pixels in [0, 1] as an array (B, [F,] H, W, 3)."""
        found = pipeline(**self.call_arguments(latents, steps, guidance, output))[0]
        return self.leave(found, latents) if output == "latent" else found

    def call_arguments(self, latents: torch.Tensor, steps: int, guidance: float, output: str) -> dict[str, Any]:
        """What the pipeline is called with, for as many of the prompts as there are (B, *D) latents."""
        # The pipeline's own default length, where it has one: it is what our default must agree with.
        tokens = self.tokens if self.model.family == "sd3" else None
        return self.called.call_arguments(
            PROMPTS[: len(latents)],
            latents,
            self.geometry,
            steps=steps,
            guidance=guidance,
            tokens=tokens,
            output=output,
        )

    def leave(self, found: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What a call returned, as (B, *D) latents."""
        return self.called.leave(found, like)

    def spec(self, policy: Policy, size: int, steps: Sequence[int], guidance: float, num_steps: int = 4) -> RolloutSpec:
        return rollout_of(policy, self.geometry, size, steps, guidance, num_steps)


def widened(trajectory: Trajectory) -> Trajectory:
    """The same trajectory in float64."""
    names = ("sigmas", "latents", "next_latents", "log_probs")
    return replace(trajectory, **{name: getattr(trajectory, name).double() for name in names})


CASES = {
    "sd3": Case(ModelConfig()),
    "flux": Case(ModelConfig(family="flux", path="tiny:flux", height=32, width=64)),
    "qwen": Case(ModelConfig(family="qwen", path="tiny:qwen", height=32, width=64)),
    "wan": Case(ModelConfig(family="wan", path="tiny:wan", height=32, width=48, frames=5)),
    "hunyuan": Case(ModelConfig(family="hunyuan", path="tiny:hunyuan", height=32, width=48, frames=5)),
}
