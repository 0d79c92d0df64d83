"""Checks of what a run computes: beyond their limits it would learn the wrong thing.

    LogProbGate     rollout and training see the same transitions
    ReferenceGate   before anything was trained, the policy is the base model
    ScheduleGate    a trajectory follows the run's noise levels, and was drawn at the run's steps

Others lie where what they check is made: adapters that arrive are hashed (workers), gradients that are not finite never
enter an accumulator (training), staleness is asserted where the loss is computed.
"""

from __future__ import annotations

import math
from functools import lru_cache

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.contributions import UnitMetrics
from digenrl.identity import MicroBatchId
from digenrl.models.base import FlowModel
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.units import TrainUnit
from digenrl.trajectory import Trajectory, tensor_hash

#: How many times larger than what rounding does, or the first update showed, a gap may be; and in any case this much.
FACTOR, LEAST_LIMIT = 5.0, 1e-6


class LogProbGate:
    """Log-probs at training, under the weights of the rollout, against those noted at rollout.

    They are never put into the ratio (`digenrl.training`), so a gap does not bias the loss by itself. But they differ
    by rounding alone: kernels depend on the shape of the batch. How much that is, with this model on this hardware, is
    looked for in the first unit of every trainer (`digenrl.training.replay_floor`), and the first update that trains on
    anything must not be far beyond it; later ones must not be far beyond the first. More means that what is trained is
    not what was drawn: other weights, another schedule, other embeddings.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._first_theta: int | None = None  # the adapter that this update was computed under
        self._rounding: float | None = None  # as the trainers found it
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
        if not metrics.pairs or metrics.forward:
            return None
        if metrics.probed:
            self._rounding = max(self._rounding or 0.0, metrics.logp_floor_max)
        if self._first_theta is None:
            self._first_theta = theta
        gap, first = metrics.logp_gap_max, theta == self._first_theta
        limit, allowed = self._limit(first)
        if first:
            self._floor = max(self._floor, gap)
        if gap <= limit:
            return None
        return (
            f"log-probs of {unit.label} on {worker} differ by up to {gap:.2g} from those noted at rollout, more than "
            f"{allowed}: rollout and training do not compute the same ({self._computed}); gates.max_logp_gap sets "
            f"another limit"
        )

    def _limit(self, first: bool) -> tuple[float, str]:
        """The largest gap in the first update, or in a later one, and what it is in words."""
        if (given := self._config.gates.max_logp_gap) is not None:
            return given, f"gates.max_logp_gap={given:g}"
        if first and self._rounding is None:  # nobody has looked
            return math.inf, ""
        known = self._rounding if first and self._rounding is not None else self._floor
        if FACTOR * known < LEAST_LIMIT:
            return LEAST_LIMIT, f"the {LEAST_LIMIT:g} of rounding"
        return FACTOR * known, f"{FACTOR:g} times the {known:.2g} {'of batching' if first else 'of the first update'}"

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


class ReferenceGate:
    """Before anything was trained the adapter changes nothing: its KL to the base model is 0, to the bit.

    If it is not, the two are computed differently (an adapter that was there before, dropout, other kernels), and the
    KL would pull towards something that is not the base model. GPUs may choose other kernels where no gradient is
    needed; there, rounding is allowed for.
    """

    def __init__(self, config: RunConfig) -> None:
        self._limit = 0.0 if config.cluster.device == "cpu" else LEAST_LIMIT

    def violation(self, unit: TrainUnit, theta: int, worker: str, metrics: UnitMetrics) -> str | None:
        """As of `LogProbGate`."""
        if theta or not metrics.pairs or metrics.kl / metrics.pairs <= self._limit:
            return None
        return (
            f"the KL to the base model is {metrics.kl / metrics.pairs:.2g} in {unit.label} on {worker}, before "
            f"anything was trained, where it must be {self._limit:g}: policy and reference do not compute the same"
        )


class ScheduleGate:
    """Every trajectory that is trained follows the noise levels that this configuration and this checkpoint give.

    It carries its own, and training uses those; but if they are not the run's, it was made by a process with another
    checkpoint, configuration or version of a library, whose samples are not the run's either.

    Args:
        config: of the run.
        run_shape: of the run.
        model: the checkpoint as it was loaded here.
    """

    def __init__(self, config: RunConfig, run_shape: RunShape, model: FlowModel) -> None:
        @lru_cache(maxsize=4)
        def wanted(iteration: int) -> tuple[str, tuple[int, ...]]:
            micro_batch = MicroBatchId("train", iteration, 0)
            spec = runspec.rollout_spec(config, run_shape, model, micro_batch, iteration)
            return tensor_hash(spec.sigmas), spec.steps

        self._wanted = wanted

    def check(self, trajectory: Trajectory) -> None:
        """See that a training trajectory is one of this run's.

        Raises:
            ValueError: it follows another table, or its steps are others; names both.
        """
        sigmas, steps = self._wanted(trajectory.micro_batch.iteration)
        label = trajectory.micro_batch.label
        if trajectory.steps != steps:
            raise ValueError(f"{label} was drawn at the steps {trajectory.steps}, this run trains {steps} there")
        if (found := tensor_hash(trajectory.sigmas.float())) != sigmas:
            raise ValueError(
                f"{label} was generated along a sigma table with hash {found[:12]}, that of this run here has "
                f"{sigmas[:12]}: the checkpoint, the configuration or diffusers differ between workers"
            )
