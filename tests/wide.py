"""A replica whose gradients are float64, for comparing them closer than float32 can. Imported by worker processes too.

WideReplica    computes in float64; adapters, latents at rollout and images stay as they are
gradients()    what it summed up for the first optimiser step of its run, by weight name
"""

from __future__ import annotations

from dataclasses import replace

import torch
from diffusers.models.normalization import RMSNorm

from digenrl import runspec
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.registry import load_model
from digenrl.policy import Policy
from digenrl.rewards.base import PromptRecord
from digenrl.scheduling.messages import Run
from digenrl.scheduling.units import RolloutUnit, UpdateUnit
from workers.held import FinishedRollout
from workers.receipts import Receipt, RunSetup
from workers.replica import Replica
from workers.weights import Weights

_GRADIENTS: dict[str, torch.Tensor] = {}


def gradients() -> dict[str, torch.Tensor]:
    """Of this process; empty if it took no step. They are forgotten."""
    found = dict(_GRADIENTS)
    _GRADIENTS.clear()
    return found


class WideReplica(Replica):
    """See the module."""

    def __init__(self, setup: RunSetup, incarnation: str) -> None:
        super().__init__(setup, incarnation)
        _GRADIENTS.clear()
        config = setup.config
        model = load_model(config.model.model_copy(update={"dtype": "float64"}), config.cluster.device)
        _widen_norms(model.transformer)
        self.policy = Policy(model, config.adapter, seed=runspec.adapter_seed(config), dtype=torch.float64)
        self._embeddings = EmbeddingCache(model)
        self._weights = Weights(config, self.policy)

    def initialise(self) -> str:
        """The initial adapter as everybody makes it: it is drawn in float32."""
        return self._weights.begin({name: weight.float() for name, weight in self.policy.initial_adapter().items()})

    def _rollout(self, unit: RolloutUnit, run: Run, prompts: tuple[PromptRecord, ...]) -> Receipt:
        receipt = super()._rollout(unit, run, prompts)
        if (done := self._finished.get(unit.micro_batch)) is not None:
            names = ("sigmas", "latents", "next_latents", "log_probs", "clean")
            wide = {name: getattr(done.trajectory, name).double() for name in names}
            self._finished[unit.micro_batch] = FinishedRollout(replace(done.trajectory, **wide), done.images)
        return receipt

    def _update(self, unit: UpdateUnit, run: Run, learning_rate: float) -> Receipt:
        accumulator = self._accumulator(unit.theta)
        accumulator.close(run.closings)
        if not _GRADIENTS:
            _GRADIENTS.update(accumulator.sums())
        return super()._update(unit, run, learning_rate)


def _widen_norms(transformer: torch.nn.Module) -> None:
    """Diffusers' RMS norm computes its variance in float32 whatever the model's type; here it must not."""
    for parent in list(transformer.modules()):
        for name, module in parent.named_children():
            if isinstance(module, RMSNorm):
                norm = torch.nn.RMSNorm(module.dim, eps=module.eps, dtype=torch.float64)
                norm.weight = module.weight
                setattr(parent, name, norm)
