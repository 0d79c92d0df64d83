"""What an iteration shows of itself."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from digenrl.contributions import UnitMetrics
from digenrl.scheduling.units import TrainUnit
from workers.listener import Dispatched, IterationReport, Listener, TrainerState
from workers.receipts import Receipt


@dataclass
class Witness(Listener):
    """Notes what the gates of an iteration look at.

    Attributes:
        report: of the iteration, once it is closed.
        first: what the train units of the first update reported, computed under the weights of the rollout.
        trained: what there is to train.
        moved: whether the updates changed it: the B matrices of a fresh LoRA are 0; of all weights, their gradient is
            not.
    """

    report: IterationReport | None = None
    first: UnitMetrics = field(default_factory=UnitMetrics)
    trained: str = ""
    moved: bool = False

    def dispatched(self, event: Dispatched) -> None:
        """See Listener."""
        if isinstance(event.run.unit, TrainUnit) and event.run.theta == 0:
            event.outcome.add_done_callback(self._trained)

    def _trained(self, outcome: asyncio.Future[Receipt]) -> None:
        if not outcome.cancelled() and outcome.exception() is None:
            self.first += outcome.result().training

    def published(self, version: int, state: TrainerState) -> None:
        """See Listener."""
        outputs = [tensor for name, tensor in state.adapter.items() if ".lora_B" in name]
        self.trained = f"LoRA on {len(outputs)} layers" if outputs else f"{len(state.adapter)} tensors"
        self.moved = self.moved or any(bool(tensor.any()) for tensor in outputs)

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self.report = report
        full = self.trained.endswith("tensors")
        self.moved = self.moved or (full and report.metrics.get("grad_norm", 0.0) > 0)
