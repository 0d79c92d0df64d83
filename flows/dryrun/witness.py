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
        layers: with a LoRA; 0: all weights are trained.
        outputs: whether the B matrices of the LoRA, which are 0 at the start, are not any more.
    """

    report: IterationReport | None = None
    first: UnitMetrics = field(default_factory=UnitMetrics)
    layers: int = 0
    outputs: bool = False

    @property
    def moved(self) -> bool:
        """Whether the updates changed the weights. Of all weights it is known that their gradient was not 0."""
        full = self.layers == 0 and self.report is not None and self.report.metrics.get("grad_norm", 0.0) > 0
        return self.outputs or full

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
        self.layers, self.outputs = len(outputs), any(bool(tensor.any()) for tensor in outputs)

    def iteration_closed(self, report: IterationReport) -> None:
        """See Listener."""
        self.report = report
