"""The policy: a frozen base model with one trainable LoRA.

    Adapter          LoRA weights by parameter name: a plain value that is published, hashed, averaged and saved
    NumberedAdapter  an adapter and its theta
    Policy           the model with a slot into which one adapter at a time is copied
    adapter_hash     equal hashes mean bit-equal adapters

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
from digenrl.config.errors import ConfigError, nearest
from digenrl.identity import seed_of
from digenrl.models.base import Embeddings, FlowModel
from digenrl.trajectory import tensor_hash

#: LoRA matrices by name, such as `transformer_blocks.0.attn.to_q.lora_A.weight`.
Adapter = dict[str, torch.Tensor]

#: peft keeps adapters under a name and writes it into parameter names; ours do not carry it.
_SLOT = "digenrl"


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
    """A loaded model whose targets carry a LoRA.

    Args:
        model: the loaded checkpoint; its transformer gets the LoRA layers, its weights stay as they are.
        lora: rank, alpha and targets.
        seed: seed of the initial adapter.
        device: where the adapter lives; the device the model was loaded on.
        dtype: dtype of the adapter. Anything but float32 is for numerical tests.

    Attributes:
        bound_modules: number of layers with a LoRA.
        bound: tag of the adapter that is bound now, None if none is.
        device: where the adapter lives and latents belong.

    Raises:
        ConfigError: a target matches no layer.
    """

    def __init__(
        self,
        model: FlowModel,
        lora: LoraConfig,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = model
        self.lora = lora
        self.device = torch.device(device)
        self.bound: Hashable = None
        self._seed = seed
        # Seconds to import, for transformers comes along; a process that only handles adapters does without.
        from peft import LoraConfig as PeftLoraConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        targets = lora.targets or model.lora_targets
        _check_targets(model.transformer, targets)
        with torch.random.fork_rng(devices=[]):  # peft draws initial values, which are overwritten on the first bind
            inject_adapter_in_model(
                PeftLoraConfig(
                    r=lora.rank, lora_alpha=lora.alpha, target_modules=list(targets), init_lora_weights="gaussian"
                ),
                model.transformer,
                adapter_name=_SLOT,
            )
        self._layers = [m for m in model.transformer.modules() if isinstance(m, LoraLayer)]
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.transformer.named_parameters():
            adapted = f".{_SLOT}." in name
            parameter.requires_grad_(adapted)
            if adapted:
                parameter.data = parameter.data.to(device=device, dtype=dtype)
                self._parameters[name.replace(f".{_SLOT}.", ".")] = parameter
        self.bound_modules = len(self._layers)

    def initial_adapter(self) -> Adapter:
        """The adapter a run starts from: A ~ N(0, 1/rank^2), B = 0, so it changes nothing yet.

        Each matrix is drawn on the CPU by a generator seeded from the run and the matrix's name: every process gets
        the same bits.
        """
        adapter: Adapter = {}
        for name, parameter in self._parameters.items():
            value = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                generator = torch.Generator().manual_seed(seed_of("adapter", self._seed, name))
                value = torch.randn(parameter.shape, generator=generator) / self.lora.rank
            adapter[name] = value.to(device=parameter.device, dtype=parameter.dtype)
        return adapter

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
        """Within it, `velocity` is that of the base model: the adapter is off."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        for layer in self._layers:
            layer.enable_adapters(enabled)


def adapter_hash(adapter: Mapping[str, torch.Tensor], behaviour: Mapping[str, torch.Tensor] | None = None) -> str:
    """SHA-256 over names, dtypes, shapes and bytes, in the order of names; of `behaviour` too where there is one."""
    names = sorted(adapter)
    content = "\n".join([*names, tensor_hash(*(adapter[name] for name in names))])
    if behaviour is not None:
        content += f"\n{adapter_hash(behaviour)}"
    return hashlib.sha256(content.encode()).hexdigest()


def _check_targets(transformer: nn.Module, targets: tuple[str, ...]) -> None:
    """Every target must match a layer: a misspelt one would silently train less, or nothing.

    Raises:
        ConfigError: naming the target and the nearest layer name.
        ValueError: another policy was built on this model.
    """
    from peft.tuners.lora import LoraLayer

    if any(isinstance(module, LoraLayer) for module in transformer.modules()):
        raise ValueError("this model already carries a LoRA: a policy needs a freshly loaded model")
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if any(name == target or name.endswith("." + target) for name in linear):
            continue
        depth = target.count(".") + 1
        near = nearest(target, sorted({".".join(name.split(".")[-depth:]) for name in linear}))
        raise ConfigError(
            f"lora.targets: {target!r} matches no linear layer of {type(transformer).__name__}"
            + (f"; did you mean {near}?" if near else "")
        )
