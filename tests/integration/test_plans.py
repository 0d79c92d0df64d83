"""`digenrl plan` and `simulate` through the command line, on costs that are derived or come from a file."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from flows.cli import app

FLEET = """\
- {kind: h100, count: 2, rate: 1.0, memory_gib: 80, price_per_hour: 2.5}
- {kind: a100, count: 2, rate: 0.4, memory_gib: 80, price_per_hour: 1.0}
"""
COSTS = {"rollout_step_s": 0.1, "decode_s": 0.2, "train_s": {"3": 0.9}, "score_s": 0.4, "update_s": 0.05}
#: A workload that is simulated in a moment.
SMALL = ("flux.1-12b", "algorithm.prompts_per_iteration=2", "algorithm.samples_per_prompt=8")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a fleet and a profile, and a home without runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIGENRL_HOME", str(tmp_path / "runs"))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "profile.json").write_text(json.dumps({"cpu": COSTS}))
    return tmp_path


def digenrl(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(argv))
    assert result.exit_code == code, result.output
    return result


def test_plan_says_everything_about_a_fleet_and_draws_it(place: Path) -> None:
    output = digenrl("plan", *SMALL, "--fleet", "fleet.yaml", "--compare").stdout
    assert all(len(line.rstrip()) <= 100 for line in output.splitlines())
    for part in (
        "flux.1-12b: 2 groups of 8 samples, 5 of 6 steps trained",
        "costs: derived from FLOPs and bytes",
        "fleet: 2 x h100, 2 x a100",
        "memory to train",
        "36.7 GiB",
        "waits for weights",
        "TAG ",
        "std scope ",
        "best role split",
        "of the work bound",
        "per 1,000 samples",
    ):
        assert part in output, part
    assert re.search(r"^binds +[a-z ]+: .*(busy|wait)", output, re.MULTILINE)
    rows = [line for line in output.splitlines() if re.match(r"(genrl|colocated|disaggregated|\+ )", line)]
    assert [row.split("  ")[0].split(" (")[0] for row in rows] == [
        *("genrl", "colocated", "disaggregated", "+ GAP", "+ TAG ◀", "+ TCSS"),
    ]
    with Image.open(place / "plan-flux.1-12b.png") as picture:
        assert picture.width > 1000
    assert "<svg" in (place / "plan-flux.1-12b.html").read_text()
    assert not (place / "runs").exists(), "nothing is started or left"


def test_plan_names_the_workers_for_a_rate_and_for_a_budget(place: Path) -> None:
    whole = digenrl("plan", *SMALL, "--fleet", "fleet.yaml").stdout
    rate = float(re.search(r"s, ([\d.]+) samples/s", whole)[1])  # type: ignore[index]
    fast = ("plan", *SMALL, "--fleet", "fleet.yaml", "--target-samples-per-s", f"{0.4 * rate:.3g}")
    output = digenrl(*fast).stdout
    part = output[output.index(f"for {0.4 * rate:.3g} samples/s") :]
    assert "train" in part and float(re.search(r"s, ([\d.]+) samples/s", part)[1]) >= 0.99 * 0.4 * rate  # type: ignore[index]
    cost = float(re.search(r"([\d.]+) an hour", part)[1])  # type: ignore[index]
    assert cost < 7.0, "less than the whole fleet"
    cheap = digenrl("plan", *SMALL, "--fleet", "fleet.yaml", "--budget-per-hour", "3.5").stdout
    part = cheap[cheap.index("for 3.5 an hour") :]
    assert float(re.search(r"([\d.]+) an hour,", part)[1]) <= 3.5  # type: ignore[index]
    assert re.search(r"^binds +[a-z ]+: ", part, re.MULTILINE)


def test_plan_of_a_preset_takes_costs_and_a_directory(place: Path) -> None:
    (place / "charts").mkdir()
    output = digenrl("plan", "tiny-smoke", "--profile", "profile.json", "--gantt", "charts").stdout
    assert "costs: profile profile.json" in output
    assert "1 of 2 workers train, as planned here" in output
    # 4 micro-batches of 10 steps of 0.1 s and 0.2 s decoding on one device.
    assert re.search(r"rollout +4\.8 ", output)
    assert {path.name for path in (place / "charts").iterdir()} == {"plan-tiny-smoke.png", "plan-tiny-smoke.html"}


def test_a_single_worker_has_one_layout(place: Path) -> None:
    one = ("schedule.layout=colocated", "cluster.workers=1", "--profile", "profile.json", "--compare")
    output = digenrl("plan", "tiny-smoke", *one).stdout
    assert re.search(r"^colocated ◀ +all ", output, re.MULTILINE)
    assert "not possible here: + GAP: no plan has a worker for every role" in output


def test_simulate_counts_and_writes_a_trace(place: Path) -> None:
    argv = ("simulate", "tiny-smoke", "--profile", "profile.json", "--workers", "5", "--timeline", "out.json")
    output = digenrl(*argv, "--iterations", "3", "--trainers", "2").stdout
    assert "fleet: 5 x cpu" in output and "2 of 5 workers train" in output
    # 4 micro-batches are rolled out, scored and trained, and 2 updates are made, three times.
    assert "3 iterations, 42 units" in output
    events = json.loads((place / "out.json").read_bytes())["traceEvents"]
    units = [e["name"] for e in events if e["ph"] == "X" and e["cat"] != "bubble"]
    assert len(units) == len(set(units)) == 42
    names = {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    assert names == {"trainer cpu-0", "trainer cpu-1", "rollout cpu-2", "rollout cpu-3", "rollout cpu-4"}


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (("plan", "tiny-smoke"), "nobody has measured what tiny-smoke costs"),
        (("plan", "wan2.1-14"), "did you mean wan2.1-14b?"),
        (("plan", "tiny-smoke", "schedule.gap=maybe"), "schedule.gap must be true or false"),
        (("plan", "wan2.1-14b", "--fleet", "flet.yaml"), "flet.yaml cannot be read"),
        (("plan", "wan2.1-14b", "--gantt", "charts"), "--gantt charts: expected a directory that exists"),
        (("plan", "tiny-smoke", "--profile", "profile.json", "--budget-per-hour", "9"), "write price_per_hour of cpu"),
        (("plan", "tiny-smoke", "--profile", "fleet.yaml"), "must map kinds of worker to their costs"),
        (("simulate", "wan2.1-14b", "--workers", "4", "--fleet", "fleet.yaml"), "give one of the two"),
        (("simulate", "wan2.1-14b", "--trainers", "16"), "--trainers 16 leaves no rollout worker of 16"),
        (("simulate", "wan2.1-14b", "--timeline", "no/out.json"), "there is no directory no"),
    ],
)
def test_mistakes_are_refused(argv: tuple[str, ...], fragment: str) -> None:
    result = digenrl(*argv, code=2)
    assert result.stderr.startswith("digenrl: ")
    assert fragment in result.stderr
    assert result.stdout == ""


def test_a_preset_of_a_published_model_is_planned_from_its_sizes(place: Path) -> None:
    sizes = ("algorithm.prompts_per_iteration=4", "algorithm.samples_per_prompt=8", "cluster.workers=4")
    output = digenrl("plan", "flux1-dev-flow_grpo_fast", *sizes).stdout
    assert "4 groups of 8 samples, 1 of 10 steps trained" in output
    assert "costs: derived from FLOPs and bytes for NVIDIA H100" in output
    assert re.search(r"^rate-1\.0 +4 +1 +3 +27\.4 GiB +22\.8 GiB", output, re.MULTILINE)


def test_a_preset_that_does_not_fit_says_what_would(place: Path) -> None:
    result = digenrl("plan", "wan2.1-14b-dance_grpo", "schedule.micro_batch=16", code=2)
    assert "memory of NVIDIA H100 SXM5 80 GB: micro_batch=16 does not fit" in result.stderr
