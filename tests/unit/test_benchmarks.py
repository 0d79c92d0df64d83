"""The benchmark scripts: their command lines, and what they make of what they measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, learn, memory, overhead, rollout, search_gap, train_step
from benchmarks.overhead_figures import Gap, Ran, Reading, Side, busy_shares, gaps, row_of, side_of
from benchmarks.overhead_tables import (
    BEGIN,
    END,
    aligned,
    cpu_table,
    fleet_table,
    gap_table,
    replace_block,
    throughput_table,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "script",
    [
        *("learn.py", "overhead.py", "emulated_fleet.py", "prediction.py", "rewards.py", "prompts.py"),
        "checkpoints.py",
    ],
)
def test_help_works_from_any_directory(script: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--help"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--json" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_overhead_refuses_what_it_could_not_finish(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        overhead.main(["--repeats", "-1"])
    assert ended.value.code == 2
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    with pytest.raises(ValueError, match="must have the line"):
        overhead.main(["--page", str(page)])


def test_every_layout_and_detail_is_measured() -> None:
    full, quick = overhead.sides(quick=False), overhead.sides(quick=True)
    assert len(set(full)) == len(full) and set(quick) < set(full)
    details = {None, "unit", "microbatch", "iteration", "auto"}
    for layout in ("colocated", "disaggregated", "emulated"):
        shown = details - {"unit"} if layout == "emulated" else details
        assert {side.detail for side in full if side.layout == layout} == shown
        assert {(s.stepwise, s.queue_depth) for s in full if s.layout == layout and s.detail is None} == {
            (cut, depth) for cut in ((False,) if layout == "emulated" else (False, True)) for depth in (1, 2)
        }
    # Server time is counted beyond the first iteration, so every observed layout must have that one alone, too.
    for plan in (full, quick):
        assert {s.layout for s in plan if s.detail} == {s.layout for s in plan if s.warm_up_only}


# --- gaps and busy shares ---


def ran(label: str, start: float, end: float, **changes: Any) -> Ran:
    values: dict[str, Any] = {
        "slot": "worker 0",
        "lane": "device",
        "kind": "rollout",
        "label": label,
        "iteration": 1,
        "theta": 4,
        "inputs": (),
        "sent_at": start - 0.5,
        "started_at": start,
        "ended_at": end,
    }
    return Ran(**values | changes)


def test_a_gap_is_measured_between_neighbours_of_one_lane() -> None:
    units = [
        ran("b", 1.25, 2.0, sent_at=0.1),
        ran("a", 0.0, 1.0),
        ran("c", 2.5, 3.0, sent_at=2.25),
        ran("elsewhere", 1.0, 1.25, slot="worker 1"),
        ran("beside", 1.0, 2.25, lane="cpu", kind="score"),
    ]
    assert gaps(units) == [Gap(0.25, queued=True), Gap(0.5, queued=False)]


def test_a_unit_that_continues_the_one_before_counts() -> None:
    assert gaps([ran("t0", 0.0, 1.0), ran("t1", 1.5, 2.0, inputs=("t0",))]) == [Gap(0.5, queued=True)]


@pytest.mark.parametrize(
    "second",
    [
        ran("update", 2.0, 3.0, kind="update"),
        ran("next iteration", 2.0, 3.0, iteration=2),
        ran("another adapter", 2.0, 3.0, theta=5),
        ran("waited for a score", 2.0, 3.0, inputs=("score",)),
        ran("waited for what never ran", 2.0, 3.0, inputs=("unknown",)),
    ],
    ids=lambda unit: unit.label,
)
def test_a_wait_for_anything_but_orchestration_does_not_count(second: Ran) -> None:
    score = ran("score", 0.25, 0.5, lane="cpu", kind="score")  # ends after the first unit began
    assert gaps([ran("first", 0.0, 1.0), score, second]) == []


def test_an_input_that_was_there_in_time_does_not_matter() -> None:
    score = ran("score", 0.0, 1.0, lane="cpu", kind="score")
    units = [score, ran("first", 1.0, 2.0), ran("second", 2.5, 3.0, inputs=("score", "first"))]
    assert gaps(units) == [Gap(0.5, queued=True)]


def test_busy_shares_cut_off_what_lies_outside() -> None:
    units = [
        ran("a", 8.0, 11.0),  # one second of it counts
        ran("b", 12.0, 14.0),
        ran("c", 19.0, 25.0),  # likewise
        ran("score", 10.0, 20.0, lane="cpu"),
        ran("d", 10.0, 15.0, slot="worker 1"),
        ran("early", 0.0, 5.0, slot="worker 2"),
    ]
    assert busy_shares(units, 10.0, 20.0) == pytest.approx({"worker 0": 0.4, "worker 1": 0.5, "worker 2": 0.0})


# --- rows and tables ---


def reading(**changes: Any) -> Reading:
    values: dict[str, Any] = {"samples": 100, "iterations": 2, "seconds": 10.0, "units": 50, "flow_cpu_s": 0.5}
    return Reading(**values | {"busy": {"worker 0": 0.5}} | changes)


def test_a_row_holds_medians_and_pools_gaps() -> None:
    row = row_of(
        Side("colocated"),
        [
            reading(gaps=tuple(Gap(s / 1000, queued=s < 3) for s in (1, 2, 3)), busy={"worker 0": 0.2}),
            reading(seconds=20.0, flow_cpu_s=1.0, gaps=(Gap(0.004, True), Gap(0.005, True)), busy={"worker 0": 0.4}),
            reading(seconds=5.0, flow_cpu_s=0.1, busy={"worker 0": 0.9}),
        ],
    )
    assert row["samples_per_s"] == 10.0 and row["samples_per_s_all"] == [10.0, 5.0, 20.0]
    assert row["iteration_s"] == 5.0 and row["units_per_iteration"] == 25
    assert (row["gaps"], row["gaps_queued"], row["gap_p50_ms"]) == (5, 4, pytest.approx(3.0))
    assert row["gap_p95_ms"] == pytest.approx(4.8)
    assert row["flow_cpu_ms_per_unit"] == 10.0 and row["flow_cpu_cores"] == 0.05
    assert row["busy"] == {"worker 0": 0.4}
    assert row["server_cpu_ms_per_unit"] is None and row["task_runs_per_iteration"] is None
    assert side_of(row) == Side("colocated")


def test_the_first_iteration_is_taken_off_the_server() -> None:
    side = Side("colocated", "unit")
    runs = [reading(server_cpu_s=1.5, task_runs=130), reading(server_cpu_s=2.0, task_runs=130)]
    first = [reading(server_cpu_s=0.5, task_runs=30), reading(server_cpu_s=0.5, task_runs=30)]
    row = row_of(side, runs, first)
    assert row["server_cpu_ms_per_unit"] == pytest.approx(25.0)  # of 20 and 30
    assert row["task_runs_per_iteration"] == 50.0
    with pytest.raises(ValueError, match="zip"):
        row_of(side, runs, first[:1])


def test_tables_show_each_side_where_it_belongs() -> None:
    loop = row_of(Side("loop"), [Reading(100, 2, 5.0)])
    bare = row_of(Side("colocated"), [reading(gaps=(Gap(0.002, True),))])
    shallow = row_of(Side("colocated", queue_depth=1), [reading(gaps=(Gap(0.02, False),))])
    shown = row_of(Side("colocated", "unit"), [reading(server_cpu_s=1.0, observing=0.05)], [reading(server_cpu_s=0.5)])
    rows = [loop, bare, shallow, shown]

    lines = throughput_table(rows).splitlines()
    assert len(lines) == 2 + 4 and len(set(map(len, lines))) == 1
    assert cells(lines[2])[4:7] == ["20.0", "20.0 - 20.0", "100"]
    assert cells(lines[3]) == [
        "colocated, 1 worker",
        "no",
        "trajectory",
        "2",
        "10.0",
        "10.0 - 10.0",
        "50",
        "5.00",
        "50",
    ]

    found = [cells(line) for line in gap_table(rows).splitlines()[2:]]
    assert [line[2:] for line in found] == [["2", "1", "100", "2.0", "2.0"], ["1", "1", "0", "20.0", "20.0"]]

    found = [cells(line) for line in cpu_table(rows).splitlines()[2:]]
    assert [line[1] for line in found] == ["no", "unit"]
    assert found[1][2:] == ["1 timestep", "25", "0.0", "10.0", "5.0", "5.0", "10.0"]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_columns_are_aligned() -> None:
    assert aligned(("name", "time, ms"), [("a", "1.0"), ("longer", "12.5")]).splitlines() == [
        "| name   | time, ms |",
        "| :----- | -------: |",
        "| a      |      1.0 |",
        "| longer |     12.5 |",
    ]


def test_only_the_marked_block_of_a_page_changes() -> None:
    page = f"above\n\n{BEGIN}\nold\n{END}\n\nbelow\n"
    changed = replace_block(page, "new")
    assert changed == f"above\n\n{BEGIN}\n\nnew\n\n{END}\n\nbelow\n"
    assert replace_block(changed, "new") == changed


@pytest.mark.parametrize("page", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}\n{BEGIN}\n{END}"])
def test_a_page_without_its_marks_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="overhead: begin"):
        replace_block(page, "new")


def test_the_page_in_docs_has_its_marks() -> None:
    replace_block((ROOT / "docs" / "performance.md").read_text(), "")


def test_emulated_workers_have_a_table_of_their_own() -> None:
    loop = row_of(Side("loop"), [Reading(100, 2, 5.0)])
    fleet = row_of(Side("emulated"), [reading(gaps=(Gap(0.002, True),), busy={"a": 0.5, "b": 0.7})])
    assert len(throughput_table([loop, fleet]).splitlines()) == 2 + 1
    (line,) = [cells(line) for line in fleet_table([loop, fleet]).splitlines()[2:]]
    assert line == ["no", "trajectory", "2", "5", "100", "2.0", "2.0", "1.0", "10.0", "5", "60"]


# --- learn.py ---


def summary(seed: int, after: float, low: float = 0.01, guard: str = "ok") -> dict[str, Any]:
    return {
        "seed": seed,
        "eval_after": after,
        "eval_curve": {"0": 0.6, "10": after},
        "eval_rise": after - 0.6,
        "eval_rise_ci95": [low, 0.3],
        "guard": {"states": {"0": "ok", "10": guard}, "gold": {"judge": {"0": 0.4, "10": 0.7}}},
    }


def test_learning_passes_by_its_mean_and_every_interval() -> None:
    assert learn.passes([summary(0, learn.TARGET - 0.01), summary(1, learn.TARGET + 0.02)])
    assert not learn.passes([summary(0, learn.TARGET - 0.03), summary(1, learn.TARGET + 0.02)])
    assert not learn.passes([summary(0, 0.9), summary(1, 0.9, low=0.0)])
    assert not learn.passes([summary(0, 0.9), summary(1, 0.9, guard="warn")])


def test_the_guard_table_counts_states_and_shows_gold_rewards() -> None:
    assert learn.guard_table([summary(3, 0.8), summary(4, 0.9, guard="warn")]).splitlines() == [
        "| seed | guard | judge, not trained on |",
        "|---|---|---|",
        "| 3 | ok 2 times | 0.400 → 0.700 |",
        "| 4 | ok 1 times, warn 1 times | 0.400 → 0.700 |",
    ]


def test_the_learning_table_has_a_row_per_seed_and_their_mean() -> None:
    assert learn.table([summary(3, 0.8), summary(4, 0.9, low=-0.02)]).splitlines() == [
        "| seed | it 0 | it 10 | rise [95 % interval] |",
        "|---|---|---|---|",
        "| 3 | 0.600 | 0.800 | +0.200 [+0.010, +0.300] |",
        "| 4 | 0.600 | 0.900 | +0.300 [-0.020, +0.300] |",
        "| mean | 0.600 | 0.850 | |",
    ]


# --- search_gap.py ---


def test_no_schedule_is_shorter_than_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "gap.json"
    search_gap.main(["--quick", "--json", str(page)])
    found = json.loads(page.read_text())
    assert len(found["rows"]) == found["summary"]["cases"] == search_gap.QUICK_CASES
    for row in found["rows"]:
        ticks = [row["outcomes"][assist]["ticks"] for assist in ("off", "greedy", "search")]
        assert 0 < row["exact"]["bound"] <= row["exact"]["best"] <= min(ticks)
    assert found["summary"]["proven"] > 0
    assert 0 < found["summary"]["search"]["share_of_time"] < 0.01
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[2:5]] == ["off", "greedy", "search"]


def gap_row(seed: int, greedy: int, search: int, best: int, bound: int) -> search_gap.Row:
    outcomes: dict[search_gap.Assist, search_gap.Outcome] = {
        "off": search_gap.Outcome(400, 0.1),
        "greedy": search_gap.Outcome(greedy, 0.1),
        "search": search_gap.Outcome(search, 0.3),
    }
    return search_gap.Row(seed, seed % 2 == 1, search_gap.Exact(best, bound), outcomes)


def test_gaps_are_of_the_best_schedule_known_and_of_the_bound() -> None:
    found = search_gap.summary([gap_row(0, 200, 150, 100, 100), gap_row(1, 100, 110, 100, 50)])
    assert found["proven"] == 1 and found["worse_than_greedy"] == 1
    assert found["search"]["gap"] == pytest.approx({"mean": 0.3, "p95": 0.48, "max": 0.5})
    assert found["search"]["gap_to_bound"]["mean"] == pytest.approx(0.85)
    assert found["greedy"]["shortest"] == 1
    assert found["gain_over_greedy"] == pytest.approx({"all": 0.075, "separate": 0.25, "shared": -0.1})
    assert found["search"]["share_of_time"] == pytest.approx(0.6 / 26.0)
    assert found["search_share_of_time"] == pytest.approx(0.6 / 26.0 - 0.2 / 30.0)
    assert "missed" in search_gap.verdict(found) and "shortens greedy iterations by 7.5%" in search_gap.verdict(found)


# --- the model's own speed and memory ---


def test_train_step_compares_equal_gradients(tmp_path: Path) -> None:
    train_step.main(["--quick", "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())
    assert [row["micro_batch"] for row in rows] == [1, 2]
    assert all(row["gradient_off"] < 1e-4 and row["ours"] > 0 and row["published"] > 0 for row in rows)


def test_rollout_is_compared_with_the_pipelines_call(tmp_path: Path) -> None:
    rollout.main(["--quick", "--json", str(tmp_path / "found.json")])
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert row["pipeline"] > 0 and row["ours"] > 0


def test_memory_is_compared_with_the_allocator(tmp_path: Path) -> None:
    memory.main(["--quick", "--json", str(tmp_path / "found.json")])
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert abs(row["off"]) < 0.15 and row["measured"] > 1e7


def test_gpu_runs_at_tiny_sizes_and_says_where_there_is_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.main(["--device", "cpu", "--quick", "--json", str(tmp_path / "found.json")])
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["model"] for row in rows] == list(gpu.CASES) and all(row["flops"] > 1e6 for row in rows)
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cpu"])
    if not torch.cuda.is_available():
        capsys.readouterr()
        gpu.main([])
        assert "sees no CUDA device here" in capsys.readouterr().out
