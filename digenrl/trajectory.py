"""What a rollout leaves behind: frozen records that travel between workers.

A trajectory carries its own sigma table and step indices; nobody rebuilds a schedule from a configuration. Latents
and log-probs are float32: storing the next latent in a narrower type than the one that was scored moves the
log-prob by more than the clip range.

Shapes: B micro-batch, K trained steps, T denoising steps, D latent shape of one sample.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from digenrl.identity import MicroBatchId, SampleId


@dataclass(frozen=True)
class Trajectory:
    """The trained part of one micro-batch's denoising.

    Attributes:
        micro_batch: which canonical micro-batch this is.
        samples: B identities, in the order of the batch axis.
        version: version of the weights that generated it.
        sigmas: (T+1,) float32, decreasing, ending in 0.
        steps: the K denoising steps that can be trained, increasing: their transition was sampled, or their noise
            level is one that `clean` is trained at.
        latents: (K, B, *D) float32, the latent entering each step of `steps`; of transitions, or without entries.
        next_latents: (K, B, *D) float32, the latent leaving it.
        log_probs: (K, B) float32 as evaluated at rollout: a monitor, never the denominator of a ratio.
        finite: (B,) bool, False where the decoded image held a non-finite value.
        clean: (B, *D) float32, the latent that was decoded; without entries where transitions are trained.
    """

    micro_batch: MicroBatchId
    samples: tuple[SampleId, ...]
    version: int
    sigmas: torch.Tensor
    steps: tuple[int, ...]
    latents: torch.Tensor
    next_latents: torch.Tensor
    log_probs: torch.Tensor
    finite: torch.Tensor
    clean: torch.Tensor

    def position(self, step: int) -> int:
        """Index of denoising step `step` on the K axis.

        Raises:
            ValueError: the step cannot be trained in this trajectory.
        """
        try:
            return self.steps.index(step)
        except ValueError:
            raise ValueError(
                f"step {step} of {self.micro_batch.label} is not one of the trained steps {self.steps}"
            ) from None

    def check_schedule(self, num_steps: int) -> None:
        """See that this was generated along one schedule of the length a run trains on.

        Raises:
            ValueError: naming both lengths, or the samples that bring a schedule of their own.
        """
        if self.sigmas.ndim != 1:
            odd = [s for s, row in zip(self.samples, self.sigmas, strict=True) if not torch.equal(row, self.sigmas[0])]
            raise ValueError(
                f"{self.micro_batch.label} brings {len(self.sigmas)} sigma tables, a micro-batch has one; "
                f"other than the first: {', '.join(map(str, odd)) or 'none'}"
            )
        if len(self.sigmas) != num_steps + 1:
            raise ValueError(
                f"{self.micro_batch.label} was generated along {len(self.sigmas)} sigmas, this run trains on "
                f"{num_steps + 1} (algorithm.num_steps={num_steps})"
            )

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        held = (self.latents, self.next_latents, self.log_probs, self.sigmas, self.clean)
        return sum(t.numel() * t.element_size() for t in held)


def tensor_hash(*tensors: torch.Tensor) -> str:
    """SHA-256 over dtype, shape and bytes: equal hashes mean bit-equal tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        digest.update(f"{flat.dtype}{tuple(flat.shape)}".encode())
        digest.update(flat.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
