"""The policy: a model with a slot for its trained weights.

    Adapter          the trained weights by name: a plain value that is published, hashed, averaged and saved
    NumberedAdapter  an adapter and its theta
    Policy           the model into whose slot one adapter at a time is copied
    adapter_hash     equal hashes mean bit-equal adapters

What the trained weights are, a LoRA or all of the transformer, is told in `digenrl.slots`.

An adapter is bound by copying it into the model's parameters, not by torch.func.functional_call: with gradient
checkpointing the backward pass runs the forward again, after functional_call has put the old parameters back, and
would differentiate the wrong weights without an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from digenrl.config import LoraConfig
from digenrl.models.base import Embeddings, FlowModel
from digenrl.slots import Adapter as Adapter
from digenrl.slots import FullSlot, LoraSlot, Slot
from digenrl.trajectory import tensor_hash


@dataclass(frozen=True)
class NumberedAdapter:
    """The adapter that optimiser step number `theta` made; theta 0 is the run's start.

    Attributes:
        theta: number of the step.
        weights: of the adapter, or of what stands for it:
        role: "behaviour" generates samples when `theta` is published, "average" is evaluated.
    """

    theta: int
    weights: Adapter
    role: Literal["adapter", "behaviour", "average"] = "adapter"

    @property
    def tag(self) -> Hashable:
        """Equal tags name equal weights, for the life of a run."""
        return self.theta if self.role == "adapter" else (self.theta, self.role)


class Policy:
    """A loaded model and the slot of its trained weights.

    Args:
        model: the loaded checkpoint. With a LoRA, its transformer gets the layers and its weights stay as they are.
        lora: rank, alpha and targets; None: all weights of the transformer are trained.
        seed: seed of the initial adapter.
        device: where the adapter lives; the device the model was loaded on.
        dtype: dtype of the adapter. Anything but float32 is for numerical tests.

    Attributes:
        bound_modules: number of layers that trained weights belong to.
        bound: tag of the adapter that is bound now, None if none is.
        device: where the adapter lives and latents belong.

    Raises:
        ConfigError: a target matches no layer.
    """

    def __init__(
        self,
        model: FlowModel,
        lora: LoraConfig | None,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.device = torch.device(device)
        self.bound: Hashable = None
        self._slot: Slot
        if lora is None:
            self._slot = FullSlot(model, dtype=dtype)
        else:
            self._slot = LoraSlot(model, lora, seed=seed, device=self.device, dtype=dtype)
        self._parameters = self._slot.parameters
        self.bound_modules = self._slot.modules

    def initial_adapter(self) -> Adapter:
        """The adapter a run starts from, which changes nothing yet; in every process the same bits.

        Raises:
            RuntimeError: the checkpoint's own weights were trained, and are here no more.
        """
        return self._slot.start()

    def check(self, adapter: Mapping[str, torch.Tensor], tag: Hashable) -> None:
        """See that an adapter is one of this policy's; `tag` is what an error calls it.

        Raises:
            ValueError: its names or shapes are not those of this policy.
        """
        if adapter.keys() != self._parameters.keys():
            odd = sorted(adapter.keys() ^ self._parameters.keys())
            raise ValueError(
                f"adapter {tag} has {len(adapter)} tensors where this policy has {len(self._parameters)}; "
                f"{len(odd)} names are in one of them only, the first is {odd[0]!r}"
            )
        for name, parameter in self._parameters.items():
            if adapter[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} of adapter {tag} has shape {tuple(adapter[name].shape)} where this policy has "
                    f"{tuple(parameter.shape)}"
                )

    @torch.no_grad()
    def bind(self, adapter: Mapping[str, torch.Tensor], tag: Hashable) -> None:
        """Copy `adapter` into the model; costs nothing if `tag` is bound already.

        A tag names one adapter for the life of this policy (theta does).

        Raises:
            ValueError: see `check`.
        """
        if self.bound is not None and self.bound == tag:
            return
        self.check(adapter, tag)
        self.bound = None  # while half of it is copied, nothing is
        for name, parameter in self._parameters.items():
            parameter.copy_(adapter[name])
        self._slot.replaced(adapter)
        self.bound = tag

    def trainable(self) -> dict[str, nn.Parameter]:
        """The bound parameters by adapter name: what gradients are taken of."""
        return dict(self._parameters)

    def velocity(
        self, latents: torch.Tensor, sigma: torch.Tensor, embeddings: Embeddings, guidance_scale: float
    ) -> torch.Tensor:
        """Velocity under the bound adapter; see FlowModel.velocity for shapes.

        Raises:
            RuntimeError: no adapter is bound.
        """
        if self.bound is None:
            raise RuntimeError("no adapter is bound to the policy; call bind before velocity")
        return self.model.velocity(latents, sigma, embeddings, guidance_scale)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it, `velocity` is that of the base model: the adapter is off.

        Raises:
            RuntimeError: all weights are trained.
        """
        self._slot.enable(False)
        try:
            yield
        finally:
            self._slot.enable(True)


def adapter_hash(adapter: Mapping[str, torch.Tensor], behaviour: Mapping[str, torch.Tensor] | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of names; of `behaviour` too where there is one."""
    names = sorted(adapter)
    content = "\n".join([*names, tensor_hash(*(adapter[name] for name in names))])
    if behaviour is not None:
        content += f"\n{adapter_hash(behaviour)}"
    return hashlib.sha256(content.encode()).hexdigest()
