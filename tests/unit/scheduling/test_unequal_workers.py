"""Workers of unequal speed: the last units go to those who end them first, whoever is asked first."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import ALL, centred, shape, simulate

from digenrl.rewards.base import Scored
from digenrl.scheduling import Colocated, Disaggregated, Layout, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.simulate import Behaviour, Costs, Result
from digenrl.scheduling.units import RolloutUnit

#: Four fast workers, and as many slow ones.
KINDS = {"fast": 1.0, "slow": 2.7}
WORKERS = [f"{kind}{i}" for kind in KINDS for i in range(4)]
PROFILE = {
    kind: {"rollout_step_s": 0.3 * slower, "train_s": {2: 0.5 * slower}, "score_s": 0.2 * slower, "update_s": 0.01}
    for kind, slower in KINDS.items()
}
#: Seconds of a trajectory on a fast worker.
FAST_S = 0.9
SHAPE = shape(iterations=3, groups=8, group_size=8, trained_steps=lambda iteration: (0, 1), updates=2)


def run(layout: Layout, install_s: dict[str, float]) -> Result:
    """A run in which adapters arrive at different times."""
    costs = CostModel.from_profile(SHAPE, PROFILE)
    joins = [m.WorkerJoined(name, name[:4], ALL) for name in WORKERS]

    def move_s(command: m.Command) -> float:
        return install_s[command.worker] if isinstance(command, m.Install) else 0.01

    result = simulate(
        Scheduler(SHAPE, layout, centred, costs=CostModel.from_profile(SHAPE, PROFILE)),
        [(0.0, join) for join in joins],
        Behaviour(score=lambda sample: Scored(float(sample.generation))),
        Costs(costs.seconds, move_s),
    )
    assert result.finished
    return result


def longest_iteration_s(layout: Layout, install_s: dict[str, float]) -> float:
    """Seconds of the longest iteration but the first."""
    result = run(layout, install_s)
    closed = [at for at, command in result.commands if isinstance(command, m.CloseIteration)]
    return max(end - begin for begin, end in pairwise(closed))


@pytest.mark.parametrize("iteration", range(SHAPE.iterations))
def test_the_last_samples_go_to_the_worker_that_ends_them_first(iteration: int) -> None:
    ends: dict[str, float] = {}
    for span in run(Disaggregated(2), dict.fromkeys(WORKERS, 0.03)).spans:
        if isinstance(span.unit, RolloutUnit) and span.unit.micro_batch.iteration == iteration:
            ends[span.worker] = span.end_s
    assert {worker[:4] for worker in ends} == set(KINDS), "both kinds roll out"
    slow = max(end for worker, end in ends.items() if worker.startswith("slow"))
    fast = min(end for worker, end in ends.items() if worker.startswith("fast"))
    # No fast worker could have ended, after all of its own, what a slow one ended last.
    assert slow <= fast + FAST_S + 0.05


@pytest.mark.parametrize("layout", [Colocated(), Disaggregated(5)], ids=["colocated", "disaggregated"])
@pytest.mark.parametrize("first", KINDS)
def test_whoever_gets_the_adapter_first_leaves_units_to_those_who_end_them_first(layout: Layout, first: str) -> None:
    together = longest_iteration_s(layout, dict.fromkeys(WORKERS, 0.03))
    ahead = {name: 0.02 if name.startswith(first) else 0.03 for name in WORKERS}
    assert longest_iteration_s(layout, ahead) < 1.02 * together


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(20, 40), min_size=len(WORKERS), max_size=len(WORKERS)))
def test_no_order_in_which_adapters_arrive_costs_a_unit(milliseconds: list[int]) -> None:
    together = longest_iteration_s(Colocated(), dict.fromkeys(WORKERS, 0.03))
    apart = longest_iteration_s(Colocated(), {w: ms / 1000 for w, ms in zip(WORKERS, milliseconds, strict=True)})
    assert apart < 1.05 * together
