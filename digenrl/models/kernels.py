"""How a transformer is computed, where there is a choice: attention kernel, compiled rollout.

set_attention(transformer, name)    by diffusers' name, tried out forwards and backwards first
Compiled                            a transformer for rollout, held against the one that trains on its first call
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from digenrl.models.checkpoint import LONGEST, CheckpointError

#: By how much of its norm (L2) a compiled output may differ. Fused kernels round less often than eager ones.
COMPILED_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}


def set_attention(transformer: Any, name: str) -> None:
    """Let a transformer use an attention kernel; `auto` leaves it as it is.

    Raises:
        CheckpointError: this transformer's attention takes no other kernel, or the kernel does not run here.
    """
    if name == "auto":
        return
    from diffusers.models import attention_dispatch

    from digenrl.models.pipeline import quiet

    processors = [getattr(module, "processor", None) for module in transformer.modules()]
    if not any(hasattr(processor, "_attention_backend") for processor in processors):
        if name == "native":  # it is what such a transformer has
            return
        raise CheckpointError(
            f"model.attention={name!r} cannot be set: the attention of {type(transformer).__name__} takes no other "
            "kernel than torch's own; write model.attention=auto"
        )
    registry: Any = attention_dispatch._AttentionBackendRegistry
    before, _ = registry.get_active_backend()
    try:
        with quiet():
            transformer.set_attention_backend(name)
        shape = (1, 16, 2, int(transformer.config.attention_head_dim))
        query = torch.zeros(shape, dtype=transformer.dtype, device=transformer.device, requires_grad=True)
        with torch.enable_grad():
            kernel = attention_dispatch.AttentionBackendName(name)
            made = attention_dispatch.dispatch_attention_fn(query, query, query, backend=kernel)
            torch.autograd.grad(made.sum(), query)
    except Exception as error:  # whatever a kernel says where it cannot run
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"model.attention={name!r} does not run on {transformer.device.type} in {transformer.dtype}: "
            f"{reason[:LONGEST]}; write model.attention=auto"
        ) from error
    finally:
        registry.set_active_backend(before)  # setting one makes it every other model's default


class Compiled:
    """A transformer as `torch.compile` makes it.

    Rollout and training then round differently; no ratio contains a log-prob of the rollout, so the loss stays what
    it is. The first call computes both, and ends the run if they differ by more than rounding.

    Args:
        transformer: with its adapter's layers.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self._compiled: Any = torch.compile(transformer)
        self._proven = False

    def __call__(self, **inputs: Any) -> Any:
        """As the transformer itself, with `return_dict=False`.

        Raises:
            CheckpointError: on the first call, that it computes something else.
        """
        found = self._compiled(**inputs)
        if not self._proven:
            self._prove(found[0], self._transformer(**inputs)[0])
            self._proven = True
        return found

    @staticmethod
    def _prove(found: torch.Tensor, expected: torch.Tensor) -> None:
        off = float((found.float() - expected.float()).norm() / expected.float().norm())
        limit = COMPILED_LIMITS.get(expected.dtype, COMPILED_LIMITS[torch.float32])
        if not off <= limit:
            raise CheckpointError(
                f"model.compile=true: compiled, the transformer's output differs by {off:.2g} of its norm, more than "
                f"the {limit:g} of rounding in {expected.dtype}; write model.compile=false"
            )
