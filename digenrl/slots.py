"""Where trained weights go in a model: which of its parameters they are, and what they are at the start.

    LoraSlot    the matrices of a LoRA on some of the transformer's layers; everything else is frozen
    FullSlot    all parameters of the transformer (`method: full`)

Precision of `method: full`. Weights, moments and sums of gradients are float32 wherever they are kept, sent or saved.
The model's own parameters have the dtype the checkpoint was loaded in; copying weights into them rounds. With
`model.dtype: bfloat16`, forward and backward pass are bfloat16, and each unit's gradient is widened before it is added.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from digenrl.config import LoraConfig
from digenrl.config.errors import ConfigError, nearest
from digenrl.identity import seed_of
from digenrl.models.base import FlowModel

#: Trained weights by name: LoRA matrices, such as `transformer_blocks.0.attn.to_q.lora_A.weight`, or with
#: `method: full` the parameters of the transformer.
Adapter = dict[str, torch.Tensor]

#: peft keeps adapters under a name and writes it into parameter names; ours do not carry it.
_SLOT = "digenrl"


class Slot(Protocol):
    """Trained weights in a model.

    Attributes:
        parameters: the model's parameters that they are copied into, by name.
        modules: number of layers they belong to.
    """

    parameters: dict[str, nn.Parameter]
    modules: int

    def start(self) -> Adapter:
        """What a run begins with. Every process gets the same bits."""

    def replaced(self, adapter: object) -> None:
        """`adapter` has been copied into the parameters."""

    def enable(self, enabled: bool) -> None:
        """Let them take part, or compute the base model."""


class LoraSlot:
    """A LoRA, injected into the model's layers.

    Args:
        model: its transformer gets the LoRA layers.
        lora: rank, alpha and targets.
        seed: of the matrices at the start.
        device: of the matrices.
        dtype: of the matrices.

    Raises:
        ConfigError: a target matches no layer.
        ValueError: the model carries a LoRA already.
    """

    def __init__(
        self, model: FlowModel, lora: LoraConfig, *, seed: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._seed, self._rank = seed, lora.rank
        # Seconds to import, for transformers comes along; a process that only handles adapters does without.
        from peft import LoraConfig as PeftLoraConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        targets = model.lora_targets if lora.targets is None else lora.targets
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
        self.modules = len(self._layers)
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in model.transformer.named_parameters():
            adapted = f".{_SLOT}." in name
            parameter.requires_grad_(adapted)
            if adapted:
                parameter.data = parameter.data.to(device=device, dtype=dtype)
                self.parameters[name.replace(f".{_SLOT}.", ".")] = parameter

    def start(self) -> Adapter:
        """A ~ N(0, 1/rank^2), B = 0: it changes nothing yet.

        Each matrix is drawn on the CPU by a generator seeded from the run and the matrix's name.
        """
        adapter: Adapter = {}
        for name, parameter in self.parameters.items():
            value = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                generator = torch.Generator().manual_seed(seed_of("adapter", self._seed, name))
                value = torch.randn(parameter.shape, generator=generator) / self._rank
            adapter[name] = value.to(device=parameter.device, dtype=parameter.dtype)
        return adapter

    def replaced(self, adapter: object) -> None:
        """The start can be drawn again: nothing to be done."""

    def enable(self, enabled: bool) -> None:
        """Turn the LoRA on or off."""
        for layer in self._layers:
            layer.enable_adapters(enabled)


class FullSlot:
    """All parameters of the transformer.

    Args:
        model: as it was loaded; its transformer is trained.
        dtype: of the weights outside the model.

    Raises:
        ValueError: the model carries a LoRA.
    """

    def __init__(self, model: FlowModel, *, dtype: torch.dtype) -> None:
        _check_pristine(model.transformer)
        self.parameters = dict(model.transformer.named_parameters())
        self.modules = len({name.rpartition(".")[0] for name in self.parameters})
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        self._dtype = dtype
        self._start: Adapter | None = None
        self._gone = False

    def start(self) -> Adapter:
        """The weights the checkpoint was loaded with, which are in the model until others are copied over them.

        Raises:
            RuntimeError: that has happened.
        """
        if self._gone:
            raise RuntimeError("the weights this model was loaded with have been replaced; load it again")
        if self._start is None:
            self._start = {n: p.detach().to(self._dtype, copy=True) for n, p in self.parameters.items()}
        return self._start

    def replaced(self, adapter: object) -> None:
        """Where it was not by themselves, the weights of the start are no longer here."""
        if adapter is not self._start:
            self._start, self._gone = None, True

    def enable(self, enabled: bool) -> None:
        """Not possible: what the model was before is not kept.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("method=full keeps no copy of the base model; a run that needs one is refused before")


def _check_targets(transformer: nn.Module, targets: tuple[str, ...]) -> None:
    """Every target must match a layer: a misspelt one would silently train less, or nothing.

    Raises:
        ConfigError: naming the target and the nearest layer name.
        ValueError: another policy was built on this model.
    """
    _check_pristine(transformer)
    if not targets:
        raise ConfigError("lora.targets=[] binds no layer: nothing would be trained; use null for the family's list")
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


def _check_pristine(transformer: nn.Module) -> None:
    from peft.tuners.lora import LoraLayer

    if any(isinstance(module, LoraLayer) for module in transformer.modules()):
        raise ValueError("this model already carries a LoRA: a policy needs a freshly loaded model")
