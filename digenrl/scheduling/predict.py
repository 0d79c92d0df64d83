"""How a schedule would go: one run on the virtual clock with the costs of a model.

    predict(model, pools, Disaggregated(4)) -> Prediction

The first iteration fills the pipeline and the last one empties it: figures are of those between.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from digenrl.algorithms.advantages import GroupStatistics
from digenrl.identity import SampleId
from digenrl.rewards.base import Scored
from digenrl.scheduling import messages as m
from digenrl.scheduling.bound import Pool
from digenrl.scheduling.bubbles import Bubble, Cause, Facts, bubbles, by_cause
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.policies import Colocated, Layout
from digenrl.scheduling.scheduler import Scheduler
from digenrl.scheduling.scopes import StdScope, Verdict
from digenrl.scheduling.simulate import Costs, Result, Simulation
from digenrl.scheduling.trace import ACTIVITIES, Activity, TracedUnit, traced
from digenrl.scheduling.units import Unit


@dataclass(frozen=True)
class Prediction:
    """One schedule.

    Attributes:
        iteration_s: mean seconds of an iteration, first and last left out.
        samples_per_s: the corresponding rate.
        utilisation: share of the device lanes' time that units ran.
        activity_s: device-seconds per iteration by activity, score on the cpu lanes.
        bubble_s: device-seconds per iteration the lanes stood still, by cause.
        window: begin and end of the iterations these figures are of.
        kinds: worker -> kind.
        spans: all units, for a timeline.
        bubbles: all bubbles, for a timeline.
        cost_per_1000_samples: in the currency of the prices, None if a price is unknown.
    """

    iteration_s: float
    samples_per_s: float
    utilisation: float
    activity_s: Mapping[Activity, float]
    bubble_s: Mapping[Cause, float]
    window: tuple[float, float]
    kinds: Mapping[str, str]
    spans: Sequence[TracedUnit]
    bubbles: Sequence[Bubble]
    cost_per_1000_samples: float | None


def predict(
    model: CostModel,
    pools: Sequence[Pool],
    layout: Layout,
    *,
    std_scope: StdScope = "group",
    iterations: int = 4,
    queue_depth: int = 2,
    gap: bool = True,
    search: bool = False,
    streaming: bool = False,
    watch: Callable[[int], None] | None = None,
) -> Prediction:
    """Simulate a few iterations without evaluation and without failures.

    Args:
        model: costs; its shape is what is run. It is not changed.
        pools: the fleet. Workers join in this order, so a layout that picks the first trainers picks them from here.
        layout: roles and order.
        std_scope: over which samples the standard deviation is taken.
        iterations: to simulate, at least 3.
        queue_depth: units outstanding per lane.
        gap: spread each group over all workers.
        search: a trainer helps only if the iteration is predicted to end earlier.
        streaming: train on scored samples before their group is complete.
        watch: hears now and then how many units have begun.

    Raises:
        ValueError: fewer than 3 iterations, or a run that does not come to its end, with what it waited for.
    """
    if iterations < 3:
        raise ValueError(f"iterations={iterations} must be at least 3: the first one and the last one do not count")
    start = model.shape.start_iteration
    shape = replace(model.shape, iterations=start + iterations, eval_prompts=0, detailed=lambda iteration: False)
    scheduler = Scheduler(
        shape,
        layout,
        _everybody,
        std_scope=std_scope,
        queue_depth=queue_depth,
        gap=gap,
        costs=CostModel.from_json(shape, model.to_json()),
        search=search,
        streaming=streaming,
    )
    joins = joining(pools)
    own = CostModel.from_json(shape, model.to_json())
    for event in joins:
        own.observe(event)
    unit_s = own.seconds if watch is None else _counted(own.seconds, watch)
    costs = Costs(unit_s, own.move_s, own.between_s, own.streamed)
    result = Simulation(scheduler, costs=costs, incidents=[(0.0, event) for event in joins]).run()
    if not result.finished:
        raise ValueError(f"the schedule does not come to its end: {result.failure or result.waiting_for}")
    kinds = {event.worker: event.kind for event in joins}
    at_once = not isinstance(layout, Colocated)
    return _summarise(result, scheduler, std_scope, at_once, kinds, _price_per_hour(pools), iterations)


def _counted(
    unit_s: Callable[[Unit, str], float], watch: Callable[[int], None], every: int = 1000
) -> Callable[[Unit, str], float]:
    """The same; tells how often it was asked, every so many times."""
    count = itertools.count(1)

    def counted(unit: Unit, kind: str) -> float:
        begun = next(count)
        if begun % every == 0:
            watch(begun)
        return unit_s(unit, kind)

    return counted


def joining(pools: Sequence[Pool]) -> list[m.WorkerJoined]:
    """The workers of a fleet, named kind-0, kind-1, ..., in order."""
    counts: dict[str, int] = {}
    events = []
    for pool in pools:
        for _ in range(pool.count):
            number = counts.get(pool.kind, 0)
            counts[pool.kind] = number + 1
            events.append(m.WorkerJoined(f"{pool.kind}-{number}", pool.kind, pool.capabilities))
    return events


def _summarise(
    result: Result,
    scheduler: Scheduler,
    std_scope: StdScope,
    at_once: bool,
    kinds: Mapping[str, str],
    price_per_hour: float | None,
    iterations: int,
) -> Prediction:
    shape = scheduler.shape
    closed = [at for at, command in result.commands if isinstance(command, m.CloseIteration)]
    window, counted = (closed[0], closed[-2]), iterations - 2
    iteration_s = (window[1] - window[0]) / counted
    spans = traced(shape, result.events, result.commands)
    found = bubbles(spans, Facts.from_log(shape, std_scope, result.events, gap=at_once))
    idle = by_cause([b for b in found if b.lane == "device"], window)
    activity: dict[Activity, float] = dict.fromkeys(ACTIVITIES, 0.0)
    for span in spans:
        activity[span.activity] += max(0.0, min(span.end_s, window[1]) - max(span.start_s, window[0]))
    busy = math.fsum(seconds for name, seconds in activity.items() if name != "score")
    samples_per_s = shape.groups * shape.group_size / iteration_s
    return Prediction(
        iteration_s=iteration_s,
        samples_per_s=samples_per_s,
        utilisation=busy / ((window[1] - window[0]) * len(kinds)),
        activity_s={name: seconds / counted for name, seconds in activity.items()},
        bubble_s={cause: seconds / counted for cause, seconds in idle.items()},
        window=window,
        kinds=kinds,
        spans=spans,
        bubbles=found,
        cost_per_1000_samples=None if price_per_hour is None else price_per_hour / 3600 / samples_per_s * 1000,
    )


def _price_per_hour(pools: Sequence[Pool]) -> float | None:
    prices = [pool.price_per_hour for pool in pools if pool.count]
    if any(price is None for price in prices):
        return None
    return math.fsum(pool.count * (pool.price_per_hour or 0.0) for pool in pools)


def _everybody(groups: Sequence[Mapping[SampleId, Scored]]) -> Verdict:
    """Every sample takes part, so that all work is done."""
    statistics = [GroupStatistics(0.0, 1.0)] * len(groups)
    return Verdict({sample: 1.0 for rewards in groups for sample in rewards}, statistics=statistics)
