"""Who a sample is, and every random number derived from that.

A sample's noise must not depend on which worker, role, batch or attempt computes it. So nothing here reads a
global generator: each draw is seeded by the SHA-256 of the identity, the purpose of the draw and the step index,
and is made on the CPU in float32.

    SampleId      one generated picture or video
    MicroBatchId  the canonical batch it is computed in
    normal(...)   standard normal noise of one sample
    draw_rng(...) a Python generator for choices (prompts, windows)
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Phase = Literal["train", "eval"]

#: Iteration number of samples made for evaluation. Their noise is the same at every evaluation.
EVAL_ITERATION = -1


@dataclass(frozen=True, order=True, slots=True)
class SampleId:
    """One sample. `draw` counts regenerations with fresh noise (0 unless a failed sample was redrawn)."""

    run_seed: int
    iteration: int
    group: int
    generation: int
    draw: int = 0

    def redrawn(self) -> SampleId:
        """The same place in the group with fresh noise."""
        return replace(self, draw=self.draw + 1)


@dataclass(frozen=True, order=True, slots=True)
class MicroBatchId:
    """A canonical micro-batch: `index` counts within the iteration (train) or within one evaluation (eval).

    For phase "eval", `iteration` is the version of the weights that is evaluated. `draws` are the draws of its samples,
    in batch order; empty: all 0. A micro-batch some of whose samples are drawn again is another one.
    """

    phase: Phase
    iteration: int
    index: int
    draws: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        """Short name for people: `i10 m3`, `i10 m3 draw 1`, or `eval v10 m3`."""
        name = f"i{self.iteration} m{self.index}" if self.phase == "train" else f"eval v{self.iteration} m{self.index}"
        return f"{name} draw {self.draw}" if self.draws else name

    @property
    def draw(self) -> int:
        """How often some of its samples have been drawn again."""
        return max(self.draws, default=0)

    def redrawn(self, failed: Sequence[bool]) -> MicroBatchId:
        """The micro-batch in which the samples that failed, by batch order, are drawn once more."""
        draws = self.draws or (0,) * len(failed)
        return replace(self, draws=tuple(n + again for n, again in zip(draws, failed, strict=True)))


def seed_of(*parts: str | int) -> int:
    """A 63-bit seed: the first 8 bytes of SHA-256 over the parts, joined by '/'; the sign bit is cleared."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def sample_seed(sample: SampleId, purpose: str, step: int) -> int:
    """Seed of one draw of one sample."""
    s = sample
    return seed_of("sample", s.run_seed, s.iteration, s.group, s.generation, s.draw, purpose, step)


def normal(sample: SampleId, purpose: str, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Standard normal noise of one sample.

    Args:
        sample: whose noise.
        purpose: "init" for the starting latent, "step" for the noise added after denoising step `step`.
        step: the denoising step; 0 for "init".
        shape: shape of one sample's latent, without a batch axis.

    Returns:
        float32 CPU tensor of `shape`.
    """
    # Here, so that whoever only needs identities (scheduler, command line) does not wait for torch.
    import torch

    generator = torch.Generator(device="cpu").manual_seed(sample_seed(sample, purpose, step))
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def draw_rng(run_seed: int, purpose: str, *index: int) -> random.Random:
    """Generator for discrete choices, such as the prompts or the SDE window of one iteration."""
    return random.Random(seed_of("choice", run_seed, purpose, *index))
