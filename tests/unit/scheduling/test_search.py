"""Bubble search: what it predicts, that it finds the best plan, and what it decides in a running scheduler."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import ALL, centred, shape

from benchmarks.search_gap_cases import Case, simulate
from digenrl.scheduling import Digenrl, RunShape, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.fleet import Worker
from digenrl.scheduling.outlook import Hand, Outlook, Sizes
from digenrl.scheduling.search import _SHARE, _STEP_S, BubbleSearch, _best, survey
from digenrl.scheduling.simulate import Costs, Result, Simulation
from digenrl.scheduling.units import RolloutUnit, TrainUnit

ROLLS: frozenset[m.Capability] = frozenset({"rollout", "score"})

#: One iteration, two groups of four samples in micro-batches of one.
ONE = shape(iterations=1, group_size=4, micro_batch=1, num_steps=1, trained_steps=lambda iteration: (0,))


def times(rollout: float, train: float, score: float = 1.0) -> dict[str, object]:
    """Seconds of one kind of worker; nothing takes time between units."""
    return {"rollout_step_s": rollout, "train_s": {1: train}, "score_s": score}


class Ran:
    """A run on the virtual clock that takes exactly as long as the cost model says."""

    def __init__(
        self,
        run_shape: RunShape,
        profile: dict[str, dict[str, object]],
        fleet: list[tuple[str, frozenset[m.Capability]]],
        *,
        search: bool,
        trainers: int = 1,
        spent: float = 0.0,
    ) -> None:
        costs = CostModel.from_profile(run_shape, profile)
        self.scheduler = Scheduler(run_shape, Digenrl(trainers), centred, costs=costs, search=search)
        if self.scheduler._search is not None:
            self.scheduler._search.steps = spent
        joins = [(0.0, m.WorkerJoined(f"w{i}", kind, able)) for i, (kind, able) in enumerate(fleet)]
        simulation = Simulation(self.scheduler, costs=Costs(costs.seconds, costs.move_s), incidents=joins)
        self.result: Result = simulation.run()
        assert self.result.finished, self.result.waiting_for

    @property
    def makespan_s(self) -> float:
        return self.result.makespan_s

    def rollouts(self, worker: str) -> int:
        """Trajectories a worker generated."""
        runs = [c for _, c in self.result.commands if isinstance(c, m.Run)]
        return sum(run.worker == worker and isinstance(run.unit, RolloutUnit) for run in runs)


# --- the search itself, against trying everything ---


@st.composite
def outlooks(draw: st.DrawFn) -> Outlook:
    """A few workers, a few groups, one or two updates, in the middle of an iteration."""
    updates = draw(st.integers(1, 2))
    seconds = st.integers(1, 9).map(float)
    hands = []
    for trains in (True, False, *draw(st.lists(st.booleans(), max_size=2))):
        train = draw(seconds)
        helps, assists = (draw(st.booleans()), False) if trains else (False, draw(st.booleans()))
        hands.append(Hand(draw(seconds), (train,) * updates, 0.5, not trains, trains or assists, helps, assists))
    waiting = [draw(st.integers(0, 3)) for _ in range(updates)]
    pool = [draw(st.integers(0, 1)) for _ in range(updates)]
    sizes = Sizes(
        hands=tuple(hands),
        score_s=draw(st.sampled_from([0.0, 1.0])),
        step_s=0.25,
        scope_of=tuple(range(updates)),
        update_of=tuple(range(updates)),
        yields=tuple(((i, count),) for i, count in enumerate(waiting)),
    )
    return Outlook(
        sizes,
        10.0,
        free=[10.0 + draw(st.integers(0, 5)) for _ in hands],
        rollout=[draw(st.booleans()) for _ in hands],
        resting=frozenset(),
        waiting=waiting,
        ready_at=[10.0] * updates,
        scored=frozenset(),
        pool=pool,
        left=[count + ready for count, ready in zip(waiting, pool, strict=True)],
        trained=[10.0] * updates,
    )


def best_of_all(outlook: Outlook) -> float:
    """Try both answers at every decision."""
    place = outlook.advance()
    if place is None:
        return outlook.end
    inserted = outlook.copy()
    inserted.insert(place)
    outlook.rest(place)
    return min(best_of_all(inserted), best_of_all(outlook))


@settings(max_examples=200, deadline=None)
@given(outlooks())
def test_memory_and_pruning_lose_nothing(outlook: Outlook) -> None:
    assert _best(outlook.copy(), 99, math.inf, {}) == pytest.approx(best_of_all(outlook))


@settings(max_examples=100, deadline=None)
@given(outlooks(), st.integers(0, 4))
def test_more_depth_is_never_worse_and_includes_both_simple_rules(outlook: Outlook, depth: int) -> None:
    shallow, deep = (_best(outlook.copy(), d, math.inf, {}) for d in (depth, depth + 1))
    rules = [outlook.copy().finish(inserting=always) for always in (True, False)]
    assert deep <= shallow + 1e-6 and shallow <= min(rules) + 1e-6


@settings(max_examples=100, deadline=None)
@given(outlooks())
def test_copies_go_on_independently(outlook: Outlook) -> None:
    before = outlook.copy()
    first = outlook.copy().finish(inserting=True)
    outlook.finish(inserting=False)
    assert before.finish(inserting=True) == first


def test_bound_is_exact_where_everybody_is_busy_to_the_end() -> None:
    outlook = Outlook(
        Sizes((Hand(5.0, (2.0,), 0.0, rolls=False, trains=True),), 1.0, 0.25, (0,), (0,), (((0, 3),),)),
        10.0,
        free=[11.0],
        rollout=[False],
        resting=frozenset(),
        waiting=[0],
        ready_at=[10.0],
        scored=frozenset([0]),
        pool=[3],
        left=[3],
        trained=[11.0],
    )
    assert outlook.bound == outlook.copy().finish(inserting=False) == 10.0 + 1.0 + 3 * 2.0 + 0.25


# --- what is predicted ---


@pytest.mark.parametrize("workers", [2, 3, 5])
@pytest.mark.parametrize("train_s", [0.5, 3.0, 7.0])
def test_prediction_of_helping_always_is_what_greedy_assistance_takes(
    workers: int, train_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an Outlook leaves out costs nothing here, and nothing happens at the same time: the prediction is exact."""
    found: list[float] = []

    def inserts(self: BubbleSearch, worker: Worker, waiting: int) -> bool:
        staying = list(self._state.fleet.workers.values())
        base = survey(self._state, self._foresight, "group", staying, [worker])
        if len(staying) == workers and base.is_choice(0):
            base.insert(0)
            found.append(base.finish(inserting=True))
        return True

    monkeypatch.setattr(BubbleSearch, "inserts", inserts)
    fleet = [("a", ALL), *[("b", ROLLS)] * (workers - 1)]
    ran = Ran(ONE, {"a": times(4.0, train_s), "b": times(4.3, train_s)}, fleet, search=True)
    assert len(found) > 1
    assert found == pytest.approx([ran.makespan_s] * len(found))


# --- what is decided ---


def test_trainer_helps_where_the_iteration_ends_earlier() -> None:
    profile, fleet = {"a": times(4.0, 1.0)}, [("a", ALL), ("a", ROLLS)]
    with_search, greedy = (Ran(ONE, profile, fleet, search=search) for search in (True, False))
    assert with_search.rollouts("w0") > 0
    assert with_search.makespan_s <= greedy.makespan_s


def test_trainer_waits_where_helping_would_delay_the_training() -> None:
    """Training is the bottleneck, and a rollout on the trainer is so slow that train units would wait for it."""
    profile = {"slow": times(7.0, 4.0), "fast": times(2.0, 4.0)}
    fleet = [("slow", ALL), ("fast", ROLLS), ("fast", ROLLS)]
    with_search, greedy = (Ran(ONE, profile, fleet, search=search) for search in (True, False))
    assert (with_search.rollouts("w0"), greedy.rollouts("w0")) == (0, 1)
    # Two rollouts after each other, a score, and eight train units.
    assert with_search.makespan_s == pytest.approx(2 * 2.0 + 1.0 + 8 * 4.0)
    assert with_search.makespan_s < greedy.makespan_s


def test_trainers_that_only_help_together_do() -> None:
    """Whoever rests first, because the others do not suffice, is asked again when another one begins."""
    profile = {"a": times(7.8, 1.2), "b": times(13.0, 2.0), "c": times(22.3, 3.4)}
    fleet = [(kind, ALL) for kind in "acbc"] + [("c", ROLLS)]
    with_search, greedy = (Ran(ONE, profile, fleet, search=search, trainers=4) for search in (True, False))
    assert with_search.makespan_s <= greedy.makespan_s < 2 * 22.3


@pytest.mark.parametrize("seed", [10, 48, 130, 147])
def test_trainer_that_rests_is_asked_again_when_another_one_begins(seed: int) -> None:
    """Drawn cases that take up to 40 % longer than with greedy assistance if it is not, or only at the next event."""
    case = Case.of(seed)
    assert simulate(case, "search").ticks <= simulate(case, "greedy").ticks


def test_rollouts_are_not_left_to_a_trainer_that_rests() -> None:
    """A rollout worker with work to do leaves trajectories to trainers that help, but not to one that will not."""
    profile, fleet = {"a": times(4.8, 2.6)}, [("a", ALL), ("a", ROLLS), ("a", ROLLS)]
    run_shape = replace(ONE, groups=3)
    ran = Ran(run_shape, profile, fleet, search=True)
    starts = [t for t, c in ran.result.commands if isinstance(c, m.Run) and isinstance(c.unit, TrainUnit)]
    assert ran.rollouts("w0") == 0
    assert starts[0] == pytest.approx(2 * 4.8 + 1.0)
    assert ran.makespan_s == pytest.approx(starts[0] + 12 * 2.6)


def test_equal_runs_are_equal() -> None:
    profile = {"a": times(4.0, 2.0), "b": times(7.0, 3.0)}
    fleet = [("b", ALL), ("a", ALL), ("a", ROLLS), ("b", ROLLS)]
    one, two = (Ran(replace(ONE, iterations=3), profile, fleet, search=True, trainers=2).result for _ in range(2))
    assert one.events == two.events
    assert one.commands == two.commands


# --- what it costs ---


def test_searching_keeps_to_its_share_of_the_time() -> None:
    kinds = {"slow": times(15.0, 1.0, 0.2), "fast": times(6.0, 1.0, 0.2)}
    fleet = [("slow", ALL)] * 8 + [("fast", ROLLS)] * 8
    ran = Ran(replace(ONE, iterations=6, groups=8), kinds, fleet, search=True, trainers=8)
    search = ran.scheduler._search
    assert search is not None and search.searches > 50
    assert search.steps * _STEP_S <= _SHARE * ran.makespan_s


SHORT = {"a": times(0.004, 0.002, 0.0)}
LONG = {"slow": times(7.0, 4.0), "a": times(2.0, 4.0)}


@pytest.mark.parametrize(
    ("kinds", "trainer", "spent"),
    [(SHORT, "a", 0.0), (LONG, "slow", _SHARE / _STEP_S * 1000.0)],
    ids=["units are too short", "the share is used up"],
)
def test_trainers_help_greedily_where_there_is_no_time_to_search(
    kinds: dict[str, dict[str, object]], trainer: str, spent: float
) -> None:
    fleet = [(trainer, ALL), ("a", ROLLS), ("a", ROLLS)]
    searching, greedy = (Ran(ONE, kinds, fleet, search=search, spent=spent) for search in (True, False))
    assert searching.scheduler._search is not None and searching.scheduler._search.searches == 0
    assert searching.result.commands == greedy.result.commands


def test_search_needs_a_cost_model() -> None:
    with pytest.raises(ValueError, match="search=True needs `costs`"):
        Scheduler(ONE, Digenrl(1), centred, search=True)
