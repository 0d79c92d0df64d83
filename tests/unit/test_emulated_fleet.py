"""benchmarks/emulated_fleet.py: what is emulated, and what is read from the log of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import emulated_fleet
from benchmarks.emulated_plan import planned_s
from benchmarks.emulated_run import Log, Orchestration, figures, moves_s, pauses_s, twin
from benchmarks.emulated_tables import MARKS
from benchmarks.overhead_tables import replace_block
from digenrl.identity import MicroBatchId
from digenrl.scheduling import messages as m
from digenrl.scheduling.units import RolloutUnit, Unit
from flows.plan.costs import GAP_S

PAGE = Path(__file__).resolve().parents[2] / "docs" / "fleets.md"
PLAN = emulated_fleet.cases(quick=True)[0].plan()
BATCH = MicroBatchId("train", 1, 0)
ROLLOUT = RolloutUnit(BATCH, 0, 10)


def test_the_whole_emulation_has_two_workloads_two_fleets_four_policies() -> None:
    cases = emulated_fleet.cases(quick=False)
    assert len({(case.workload, case.fleet.name, case.policy.name) for case in cases}) == len(cases) == 2 * 2 * 4
    assert {case.fleet.workers for case in cases} == {16}
    assert all(case.iterations - 2 >= 4 for case in cases)
    assert min(case.plan().shortest_unit_s for case in cases) >= 0.5
    assert [case.policy.name for case in emulated_fleet.cases(quick=True)] == ["colocated", "+TCSS"]


def test_a_plan_knows_no_more_than_the_costs_and_a_pause() -> None:
    none = Orchestration(0.0, {"device": 0.0, "cpu": 0.0}, {}, 0.0, 0.0)
    paused = Orchestration(GAP_S, {"device": GAP_S, "cpu": GAP_S}, {}, 0.0, 0.0)
    assert twin(PLAN, none).iteration_s < planned_s(PLAN) <= twin(PLAN, paused).iteration_s


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cell", "qwen/16/TAG"], "qwen/16/TAG is not emulated; known are wan2.1-14b/16-homogeneous/colocated"),
        (["--cell", "wan2.1-14b/16-mixed/+TSP", "--page", str(PAGE)], "add --emulated FILE"),
    ],
)
def test_cells_that_cannot_be_run_alone_are_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        emulated_fleet.main(arguments)
    assert sentence in capsys.readouterr().err


def test_the_page_has_its_marks() -> None:
    replace_block(PAGE.read_text(), "", MARKS)


def log(*entries: tuple[float, m.Event, list[m.Command]]) -> Log:
    """Begins with a worker, and the end of the first iteration."""
    closing = m.CloseIteration(0, 0, {}, 0)
    return Log([(0.0, m.WorkerJoined("w", "rate-1.0", frozenset()), [closing]), *entries])


def finished(unit: Unit, seconds: float, gap_s: float | None = None) -> m.UnitFinished:
    return m.UnitFinished(unit, "w", seconds, m.RolloutDone(), gap_s)


def test_a_unit_is_held_up_on_its_way_or_behind_another() -> None:
    second = RolloutUnit(MicroBatchId("train", 1, 1), 0, 10)
    sent: list[m.Command] = [m.Run(unit, "w", 0, 0) for unit in (ROLLOUT, second)]
    found = log((1.0, m.Tick(), sent), (2.5, finished(ROLLOUT, 1.25), []), (4.0, finished(second, 1.0, 0.125), []))
    assert pauses_s(found, PLAN.costs) == (0.125, {"device": 0.25, "cpu": 0.0})


def test_sources_of_a_reduce_arrive_one_after_the_other() -> None:
    reduce = m.Reduce(1, "w", ("a", "b"), {})
    each = PLAN.costs.move_s(reduce)
    a, b = (m.Transferred(m.AccumulatorRef(1, source), "w") for source in ("a", "b"))
    found = log((1.0, m.Tick(), [reduce]), (1.5 + each, a, []), (1.75 + 2 * each, b, []))
    assert moves_s(found, PLAN.costs) == {"merge": pytest.approx((0.5 + 0.25) / 2)}


def test_figures_leave_out_the_first_and_the_last_iteration() -> None:
    close = [m.CloseIteration(i, 0, {}, 0) for i in range(3)]
    train = PLAN.shape.train_units(BATCH)[0]
    ends = [(2.0, finished(ROLLOUT, 4.0), []), (4.0, finished(train, 1.0), [close[1]]), (9.0, m.Tick(), [close[2]])]
    found = figures(log(*ends), PLAN.shape, devices=2)
    assert (found.iteration_s, found.utilisation, found.stale_share) == (4.0, (2.0 + 1.0) / 8.0, 0.0)
    with pytest.raises(ValueError, match="none between"):
        figures(log(), PLAN.shape, devices=2)


def test_the_twin_takes_longer_by_what_orchestration_takes() -> None:
    none = Orchestration(0.0, {"device": 0.0, "cpu": 0.0}, {}, 0.0, 0.0)
    slow = Orchestration(0.1, {"device": 0.1, "cpu": 0.1}, {"install": 0.1}, 0.0, 0.0)
    assert twin(PLAN, slow).iteration_s > twin(PLAN, none).iteration_s + 0.3
