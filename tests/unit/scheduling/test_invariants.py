"""The invariants of the scheduler, over random runs on random fleets with random misfortune.

Every run is simulated against workers that keep books (digenrl.scheduling.simworker), so a command that a real worker
could not carry out, or a gradient counted twice, is an error wherever it happens. `Watcher` checks the rest as it goes.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schedules import ALL, centred, check_every_pair_has_one_fate, shape

from digenrl.identity import MicroBatchId, SampleId
from digenrl.rewards.base import Failed, Score, Scored
from digenrl.scheduling import Colocated, Digenrl, Disaggregated, Layout, RunShape, Scheduler, StdScope
from digenrl.scheduling import messages as m
from digenrl.scheduling.costs import CostModel
from digenrl.scheduling.ledger import Pair
from digenrl.scheduling.simulate import Behaviour, Costs, Result, Simulation
from digenrl.scheduling.state import AHEAD
from digenrl.scheduling.units import RolloutUnit, TrainUnit, Unit, UpdateUnit

QUEUE_DEPTHS = (1, 2, 3)

#: More in the profile `thorough`.
EXAMPLES = max(250, settings.default.max_examples)


class Watcher(Simulation):
    """Checks invariants 2, 3 and 4 while a run goes on."""

    def __init__(
        self,
        *args: object,
        std_scope: StdScope,
        queue_depth: int,
        echo: bool = False,
        open_groups: int = 0,
        redraws: int = 0,
        **kwargs: object,
    ) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.echo = echo
        self.std_scope = std_scope
        self.queue_depth = queue_depth
        self.open_groups = open_groups
        self.redraws = redraws
        self.outstanding: dict[tuple[str, str], set[Unit]] = defaultdict(set)
        self.scored: set[MicroBatchId] = set()
        self.version = self.scheduler.shape.start_iteration
        self.always_trained: dict[str, bool] = {}

    def _tell(self, event: m.Event) -> None:
        match event:
            case m.UnitFinished(unit, worker, _, outcome):
                self.outstanding[worker, unit.lane].discard(unit)
                if isinstance(outcome, m.ScoresDone) and not self._drawn_again(unit.micro_batch, outcome):
                    self.scored.add(replace(unit.micro_batch, draws=()))
            case m.UnitFailed(unit, worker, _):
                self.outstanding[worker, unit.lane].discard(unit)
        super()._tell(event)
        if self.echo and isinstance(event, m.UnitFinished | m.Transferred | m.Committed | m.WorkerLost):
            # News that is no news must change nothing, whatever has been decided since.
            super()._tell(event)
        self._check_no_train_unit_waits_for_others()
        for worker in self.workers.values():
            groups = {self.scheduler.shape.group_of(unit.micro_batch) for unit in worker.waiting}
            assert len(groups) <= self.open_groups

    def _check_no_train_unit_waits_for_others(self) -> None:
        state, training = self.scheduler._state, self.scheduler._training
        for worker in state.trainers:
            if "train" in state.layout.takes(worker, state.stage) and training.peek(worker) is not None:
                # With a cost model a trainer may leave it to another one, which then takes it over.
                assert len(worker.device) == self.queue_depth or worker.name in state.declined

    def _perform(self, command: m.Command) -> None:
        match command:
            case m.Run():
                self._check_run(command)
                self.outstanding[command.worker, command.unit.lane].add(command.unit)
            case m.Cancel(unit, worker):
                self.outstanding[worker, unit.lane].discard(unit)
            case m.Publish(version, theta, _):
                assert version == self.version + 1
                assert theta == self.scheduler.shape.theta_of_version(version)
                self.version = version
        super()._perform(command)

    def _check_run(self, run: m.Run) -> None:
        lane = self.outstanding[run.worker, run.unit.lane]
        state, worker = self.scheduler._state, self.scheduler._state.fleet.workers[run.worker]
        trains = "train" in worker.roles and "train" in state.layout.takes(worker, state.stage)
        if trains and isinstance(run.unit, RolloutUnit):
            # A trainer rolls out only while it has nothing else to do, so a train unit waits for that one unit at most.
            assert not lane
        assert len(lane) < self.queue_depth
        assert all(unit in lane for unit in run.depends_on)
        shape = self.scheduler.shape
        match run.unit:
            case RolloutUnit(micro_batch, first, _):
                ahead = micro_batch.iteration > self.version
                assert run.theta == self._theta_of(micro_batch) <= shape.theta_of_version(self.version)
                assert not ahead or (micro_batch.phase, micro_batch.iteration) == ("train", self.version + 1)
                assert first > 0 or (run.priority == AHEAD) == ahead
                before = {u for u in lane if isinstance(u, RolloutUnit) and u.micro_batch == micro_batch}
                assert all(unit.last <= first for unit in before)
            case TrainUnit(micro_batch, _):
                assert micro_batch.iteration == self.version
                assert run.old_theta == self._theta_of(micro_batch)
                group = shape.group_of(micro_batch)
                assert run.theta + 1 == shape.update_of_group(micro_batch.iteration, group)
                if run.rewards:
                    assert run.old_theta == run.theta and replace(micro_batch, draws=()) in self.scored
                    assert not self.scored >= set(self._scope(micro_batch))
                else:
                    assert self.scored >= set(self._scope(micro_batch))
            case UpdateUnit(theta):
                assert run.theta == theta - 1 in self.workers[run.worker].optimizers

    def _theta_of(self, micro_batch: MicroBatchId) -> int:
        """The adapter a trajectory must have, spelt out: the first groups of all iterations but the first are stale."""
        shape = self.scheduler.shape
        stale = micro_batch.phase == "train" and shape.group_of(micro_batch) < shape.stale_groups
        return shape.updates * max(micro_batch.iteration - stale, 0)

    def _drawn_again(self, micro_batch: MicroBatchId, outcome: m.ScoresDone) -> bool:
        failed = any(isinstance(score, Failed) for score in outcome.scores.values())
        return micro_batch.phase == "train" and failed and micro_batch.draw < self.redraws

    def _scope(self, micro_batch: MicroBatchId) -> Iterable[MicroBatchId]:
        shape = self.scheduler.shape
        for other in shape.micro_batches(micro_batch.iteration):
            one, two = shape.group_of(micro_batch), shape.group_of(other)
            if self.std_scope == "update":
                one, two = shape.update_of_group(0, one), shape.update_of_group(0, two)
            if one == two or self.std_scope == "iteration":
                yield other


class Luck(Behaviour):
    """Random durations and misfortunes that depend only on a seed and on what happens to whom."""

    def __init__(self, seed: int, share: float) -> None:
        super().__init__(
            self._score,
            self._left_out,
            self._skips,
            self._fails,
            self._move_fails,
            answers_cancelled=seed % 2 == 0,
            outlives_source=seed % 3 == 0,
        )
        object.__setattr__(self, "seed", seed)
        object.__setattr__(self, "share", share)

    def draw(self, *what: object) -> float:
        return random.Random(f"{self.seed}/{what}").random()

    def unit_s(self, unit: Unit, kind: str) -> float:
        return round(0.1 + 3 * self.draw("unit", unit.label, kind), 1)

    def move_s(self, command: m.Command) -> float:
        return round(2 * self.draw("move", type(command).__name__), 1)

    def _score(self, sample: SampleId) -> Score:
        draw = self.draw("score", sample)
        return Failed("the scorer broke") if draw < self.share else Scored(round(draw, 1))

    def _left_out(self, unit: TrainUnit, samples: Iterable[SampleId]) -> dict[Pair, str]:
        pairs = [(sample, step) for sample in samples for step in unit.steps]
        return {pair: "loss not finite" for pair in pairs if self.draw("loss", pair) < self.share / 4}

    def _skips(self, theta: int) -> bool:
        return self.draw("skip", theta) < self.share

    def _fails(self, unit: Unit, worker: str, attempt: int) -> str | None:
        return "out of memory" if self.draw("fail", unit.label, worker, attempt) < self.share else None

    def _move_fails(self, command: m.Command, attempt: int) -> str | None:
        if isinstance(command, m.Reduce):
            command = replace(command, contributions={})  # a set is printed in another order in every process
        return "connection reset" if self.draw("move", str(command), attempt) < self.share else None


capabilities = st.sampled_from(
    [ALL, ALL, ALL, frozenset({"rollout"}), frozenset({"train"}), frozenset({"score"}), frozenset({"rollout", "train"})]
)


@st.composite
def shapes(draw: st.DrawFn) -> RunShape:
    """Small runs with every way of cutting them."""
    updates = draw(st.sampled_from([1, 2, 4]))
    group_size, micro_batch = draw(st.sampled_from([(2, 1), (2, 2), (4, 2)]))
    steps = draw(st.sampled_from([(0,), (1, 2), (0, 1, 3)]))
    detailed = draw(st.sampled_from([lambda k: False, lambda k: True, lambda k: k % 2 == 0]))
    every = draw(st.integers(1, 2))
    start = draw(st.integers(0, 2))
    groups = updates * draw(st.integers(1, 2))
    return shape(
        start_iteration=start,
        iterations=start + draw(st.integers(1, 3)),
        groups=groups,
        stale_groups=int(draw(st.sampled_from([0, 0, 0.3, 0.5, 1])) * groups),
        group_size=group_size,
        micro_batch=micro_batch,
        num_steps=4,
        updates=updates,
        timestep_batch=draw(st.integers(1, 3)),
        trained_steps=lambda iteration: steps,
        detailed=detailed,
        eval_prompts=draw(st.integers(0, 3)),
        evaluated=lambda version: version % every == 0,
    )


@st.composite
def incidents(draw: st.DrawFn) -> list[tuple[float, m.Event]]:
    """Workers come, are drained and get lost; one that can do everything stays."""
    found: list[tuple[float, m.Event]] = []
    time = st.integers(0, 600).map(lambda tenths: tenths / 10)
    early = st.one_of(st.just(0.0), time)
    for i in range(draw(st.integers(0, 4))):
        joins_at = draw(early)
        found.append((joins_at, m.WorkerJoined(f"w{i}", draw(st.sampled_from("ab")), draw(capabilities))))
        end = draw(st.sampled_from(["stays", "lost", "drained", "drained and lost"]))
        leaves_at = joins_at + draw(time)
        if end.startswith("drained"):
            found.append((leaves_at, m.WorkerDraining(f"w{i}")))
            leaves_at += draw(time)
        if end.endswith("lost"):
            found.append((leaves_at, m.WorkerLost(f"w{i}")))
    found.append((draw(early), m.WorkerJoined("anchor", "a", ALL)))
    return sorted(found, key=lambda item: item[0])


layouts: st.SearchStrategy[Layout] = st.one_of(
    st.builds(Disaggregated, trainers=st.integers(1, 3)),
    st.builds(Digenrl, trainers=st.integers(1, 3)),
    st.builds(Colocated),
)


@st.composite
def storms(draw: st.DrawFn) -> list[tuple[float, m.Event]]:
    """Capable workers that live for seconds, so that leads and standbys are lost together; at last one stays."""
    found: list[tuple[float, m.Event]] = []
    lifetime = draw(st.integers(3, 60))
    rng = random.Random(draw(st.integers(0, 10**6)))
    for i in range(draw(st.integers(3, 12))):
        joins_at = round(rng.uniform(0, lifetime) if i > 3 else 0.0, 1)
        leaves_at = round(joins_at + rng.uniform(1, lifetime), 1)
        found.append((joins_at, m.WorkerJoined(f"w{i}", rng.choice("ab"), ALL)))
        if rng.random() < 0.2:
            found.append((round(leaves_at - rng.uniform(0, leaves_at - joins_at), 1), m.WorkerDraining(f"w{i}")))
        found.append((leaves_at, m.WorkerLost(f"w{i}")))
    found.append((float(draw(st.integers(0, 60))), m.WorkerJoined("anchor", "a", ALL)))
    return sorted(found, key=lambda item: item[0])


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    run_shape=shapes(),
    layout=layouts,
    incidents=st.one_of(incidents(), storms()),
    std_scope=st.sampled_from(["group", "update", "iteration"]),
    queue_depth=st.sampled_from(QUEUE_DEPTHS),
    open_groups=st.sampled_from([0, 0, 1, 2]),
    echo=st.booleans(),
    seed=st.integers(0, 10**6),
    share=st.sampled_from([0.0, 0.05, 0.2]),
    gap=st.booleans(),
    foresight=st.sampled_from(["none", "costs", "search"]),
    redraws=st.sampled_from([0, 1, 3]),
)
def test_invariants(
    run_shape: RunShape,
    layout: Layout,
    incidents: list[tuple[float, m.Event]],
    std_scope: StdScope,
    queue_depth: int,
    open_groups: int,
    echo: bool,
    seed: int,
    share: float,
    gap: bool,
    foresight: str,
    redraws: int,
) -> None:
    """1 one fate per pair, 2 one version, 3 lanes, 4 scopes close first, 5 the run ends, 6 it can be replayed."""

    def scheduler() -> Scheduler:
        return Scheduler(
            run_shape,
            layout,
            centred,
            std_scope=std_scope,
            queue_depth=queue_depth,
            max_attempts=100,
            max_losses=100,
            max_failed_share=1.0,
            redraws=redraws,
            max_bad_updates=100,
            streaming=std_scope == "group" and open_groups > 0,
            max_open_groups=open_groups,
            gap=gap,
            costs=guess(run_shape) if foresight != "none" else None,
            search=foresight == "search",
        )

    luck = Luck(seed, share)
    costs = Costs(luck.unit_s, luck.move_s)
    watcher = Watcher(
        scheduler(),
        costs=costs,
        incidents=incidents,
        behaviour=luck,
        std_scope=std_scope,
        queue_depth=queue_depth,
        echo=echo,
        open_groups=open_groups,
        redraws=redraws,
    )
    result = watcher.run()
    assert result.finished, result.failure or result.waiting_for
    check_every_pair_has_one_fate(run_shape, result, redraws)
    check_evaluations(run_shape, result)
    replayed = scheduler()
    assert [c for now, event in result.events for c in replayed.handle(event, now)] == [c for _, c in result.commands]


def guess(run_shape: RunShape) -> CostModel:
    """A model that knows nothing of the workers until they report."""
    return CostModel.from_profile(run_shape, {"guess": {"rollout_step_s": 0.4, "install_s": 0.5}})


def check_evaluations(run_shape: RunShape, result: Result) -> None:
    """Each version that is to be evaluated is, once, in order, with all its samples."""
    done = [c for _, c in result.commands if isinstance(c, m.EvaluationDone)]
    versions = range(run_shape.start_iteration, run_shape.iterations + 1)
    wanted = [v for v in versions if run_shape.eval_prompts and run_shape.evaluated(v)]
    assert [evaluation.version for evaluation in done] == wanted
    assert all(len(evaluation.scores) == run_shape.eval_prompts for evaluation in done)
