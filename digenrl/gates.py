"""Checks of what a run computes: beyond their limits it would learn the wrong thing.

    LogProbGate    rollout and training see the same transitions

Others lie where what they check is made: adapters that arrive are hashed (workers), gradients that are not finite never
enter an accumulator (training), staleness is asserted where the loss is computed.
"""

from __future__ import annotations

from digenrl.config import RunConfig
from digenrl.contributions import UnitMetrics
from digenrl.scheduling.units import TrainUnit

#: How many times larger than in the first update a gap may become, and what it may be in any case.
FACTOR, LEAST_LIMIT = 5.0, 1e-6


class LogProbGate:
    """Log-probs at training, under the weights of the rollout, against those noted at rollout.

    They are never put into the ratio (`digenrl.training`), so a gap does not bias the loss by itself. But they differ
    by rounding alone: kernels depend on the shape of the batch. How much that is, with this model on this hardware, the
    first update shows that trains on anything. More means that what is trained is no longer what was drawn: other
    weights, another schedule, other embeddings.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._first_theta: int | None = None  # the adapter that this update was computed under
        self._floor = 0.0
        self._cautioned = False

    def violation(self, unit: TrainUnit, theta: int, worker: str, metrics: UnitMetrics) -> str | None:
        """A sentence for people if the run must not go on.

        Args:
            unit: that ended.
            theta: adapter it was computed under.
            worker: where, as people call it.
            metrics: what it reported.
        """
        gap, given = metrics.logp_gap_max, self._config.gates.max_logp_gap
        if not metrics.pairs:
            return None
        if self._first_theta is None:
            self._first_theta = theta
        if given is None and theta == self._first_theta:
            self._floor = max(self._floor, gap)
            return None
        if given is not None:
            limit, allowed = given, f"gates.max_logp_gap={given:g}"
        else:
            limit = FACTOR * self._floor
            allowed = f"{FACTOR:g} times the {self._floor:.2g} of the first update"
            if limit < LEAST_LIMIT:
                limit, allowed = LEAST_LIMIT, f"the {LEAST_LIMIT:g} of rounding"
        if gap <= limit:
            return None
        return (
            f"log-probs of {unit.label} on {worker} differ by up to {gap:.2g} from those noted at rollout, more than "
            f"{allowed}: rollout and training do not compute the same ({self._computed}); gates.max_logp_gap sets "
            f"another limit"
        )

    def caution(self) -> str | None:
        """A sentence for people, once, if rounding alone is of the size of what the loss tells apart."""
        algorithm = self._config.algorithm
        if self._cautioned or algorithm.trust_region is None:
            return None
        region = float(getattr(algorithm, algorithm.trust_region))
        if self._floor <= region / 2:
            return None
        self._cautioned = True
        return (
            f"log-probs at training differ by up to {self._floor:.2g} from those at rollout through rounding alone "
            f"({self._computed}), more than half of algorithm.{algorithm.trust_region}={region:g}; they are computed "
            f"again for the ratio, which it does not change"
        )

    @property
    def _computed(self) -> str:
        model, schedule = self._config.model, self._config.schedule
        size = f"{model.height} x {model.width}" + (f" x {model.frames}" if model.frames > 1 else "")
        batches = f"micro-batches of {self._config.micro_batch}, timestep batches of {schedule.timestep_batch}"
        return f"model.dtype={model.dtype}, {size}, {batches}"
