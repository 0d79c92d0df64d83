"""Run directories: names are claimed by one process only and cannot lead out of the home directory."""

from __future__ import annotations

import multiprocessing
import os
import re
from pathlib import Path

import pytest

from digenrl.config.load import ConfigError, load_config
from storage.runs import RunDirectory, run_names

CONFIG = load_config("tiny-smoke")


def create(home: Path, preset: str = "tiny-smoke", name: str | None = None) -> RunDirectory:
    return RunDirectory.create(home, preset, CONFIG, name)


def test_numbers_go_up(tmp_path: Path) -> None:
    home = tmp_path / "deep" / "runs"
    assert [create(home).name for _ in range(3)] == ["tiny-smoke-1", "tiny-smoke-2", "tiny-smoke-3"]
    assert create(home, "tiny-ocr").name == "tiny-ocr-1"
    assert create(home, name="tiny-smoke-9").name == "tiny-smoke-9"
    assert create(home).name == "tiny-smoke-10"


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("configs/My Run.yaml", "My-Run-1"),
        ("../x.v2.yml", "x.v2-1"),
        (".hidden.yaml", "hidden-1"),
        ("ünï.yaml", "n-1"),
        ("日本.yaml", "run-1"),
        ("y" * 200 + ".yaml", "y" * 54 + "-1"),
    ],
)
def test_the_name_comes_from_the_file(tmp_path: Path, preset: str, expected: str) -> None:
    assert create(tmp_path, preset).name == expected


def _claim(home: Path, barrier: object, names: object) -> None:
    barrier.wait(30)  # type: ignore[attr-defined]
    for _ in range(20):
        names.put(create(home).name)  # type: ignore[attr-defined]


def test_two_processes_never_get_the_same_name(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, names = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_claim, args=(tmp_path, barrier, names)) for _ in range(2)]
    for process in processes:
        process.start()
    claimed = [names.get(timeout=60) for _ in range(40)]
    for process in processes:
        process.join(30)
        assert process.exitcode == 0
    assert sorted(claimed) == sorted(f"tiny-smoke-{n}" for n in range(1, 41))


def test_a_taken_name_is_refused_and_names_resume(tmp_path: Path) -> None:
    run = create(tmp_path, name="mine")
    before = run.config_path.read_bytes()
    with pytest.raises(ConfigError, match="digenrl resume mine"):
        create(tmp_path, name="mine")
    assert run.config_path.read_bytes() == before


def attempt(run: RunDirectory, iterations: int) -> None:
    """An attempt that ends after so many iterations."""
    with run.held():
        assert run.is_held
        run.write_summary({"status": "failed", "iterations": iterations})
    assert not run.is_held


def test_an_attempt_that_computed_nothing_does_not_take_the_name(tmp_path: Path) -> None:
    run = create(tmp_path, name="mine")
    assert not run.is_held
    with pytest.raises(ConfigError, match="digenrl resume mine"):
        create(tmp_path, name="mine")  # somebody may be about to train it
    attempt(run, iterations=0)
    (run.checkpoints / "step-000000-0123abcd").mkdir(parents=True)
    with run.held(), pytest.raises(ConfigError, match="digenrl resume mine"):
        create(tmp_path, name="mine")
    create(tmp_path, name="mine")
    assert [entry.name for entry in tmp_path.iterdir()] == ["mine"]
    assert [entry.name for entry in run.path.iterdir()] == ["config.yaml"]

    attempt(run, iterations=1)
    with pytest.raises(ConfigError, match="digenrl resume mine"):
        create(tmp_path, name="mine")
    attempt(run, iterations=0)
    (run.checkpoints / "step-000010-0123abcd").mkdir(parents=True)  # saved by an attempt that was killed
    with pytest.raises(ConfigError, match="digenrl resume mine"):
        create(tmp_path, name="mine")


def test_a_killed_run_whose_checkpoints_are_elsewhere_keeps_its_name(tmp_path: Path) -> None:
    config = load_config("tiny-smoke", [f"checkpoint.url={tmp_path}/elsewhere"])
    run = RunDirectory.create(tmp_path, "tiny-smoke", config, "mine")
    with run.held():
        run.write_summary({"status": "running", "iterations": 0})
    with pytest.raises(ConfigError, match="digenrl resume mine"):
        create(tmp_path, name="mine")
    attempt(run, iterations=0)
    create(tmp_path, name="mine")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", ".services", "-x", "a b", "ä", "a\n", "a\0", "x" * 65]
)
def test_impossible_names_are_refused(tmp_path: Path, name: str) -> None:
    home = tmp_path / "runs"
    for use in (lambda: create(home, name=name), lambda: RunDirectory.open(home, name)):
        with pytest.raises(ConfigError, match="the name"):
            use()
    assert not list(home.glob("*"))
    assert list(tmp_path.iterdir()) == []


def test_the_longest_name_is_possible(tmp_path: Path) -> None:
    assert create(tmp_path, name="x" * 64).path.is_dir()


def test_open_gives_the_run_back(tmp_path: Path) -> None:
    run = create(tmp_path)
    again = RunDirectory.open(tmp_path, "tiny-smoke-1")
    assert again == run
    assert again.read_config() == CONFIG


def test_a_run_can_be_resumed_from_another_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_text("")
    monkeypatch.chdir(tmp_path)
    config = load_config("tiny-smoke", ["data.prompts=mine.jsonl", "model.path=owner/model"])
    read = RunDirectory.create(tmp_path / "runs", "tiny-smoke", config).read_config()
    assert read.data.prompts == str(tmp_path / "mine.jsonl")
    assert (read.data.held_out, read.model.path) == ("package:numbers-held-out", "owner/model")


def test_open_of_an_unknown_run_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no runs yet"):
        RunDirectory.open(tmp_path, "tiny")
    create(tmp_path)
    with pytest.raises(ConfigError, match="did you mean tiny-smoke-1"):
        RunDirectory.open(tmp_path, "tiny-smok-1")
    with pytest.raises(ConfigError, match="runs: tiny-smoke-1"):
        RunDirectory.open(tmp_path, "zzz")


def test_a_directory_without_configuration_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "half").mkdir()
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        RunDirectory.open(tmp_path, "half")
    assert run_names(tmp_path) == []


def test_services_are_no_run(tmp_path: Path) -> None:
    (tmp_path / ".services").mkdir()
    (tmp_path / ".services" / "config.yaml").write_text("")
    create(tmp_path)
    assert run_names(tmp_path) == ["tiny-smoke-1"]


def test_the_summary_is_replaced_whole(tmp_path: Path) -> None:
    run = create(tmp_path)
    assert run.read_summary() is None
    run.write_summary({"iterations": 1})
    run.write_summary({"iterations": 2, "reward": 0.5})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run.write_summary({"reward": float("nan")})
    assert run.read_summary() == {"iterations": 2, "reward": 0.5}
    assert sorted(entry.name for entry in run.path.iterdir()) == ["config.yaml", "summary.json"]


@pytest.mark.parametrize("content", [b"", b'{"status": "runn', b"[1]", b"\xff", b'{"status": "completed"}'])
def test_a_damaged_summary_is_named(tmp_path: Path, content: bytes) -> None:
    run = create(tmp_path, name="mine")
    with run.held():
        pass
    run.summary_path.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{run.summary_path} is damaged (")):
        run.read_summary()
    assert run.summary_if_whole() == {}
    with pytest.raises(ConfigError, match="digenrl resume mine"):
        create(tmp_path, name="mine")  # it may have computed something


def test_paths_lie_within_the_run(tmp_path: Path) -> None:
    run = create(tmp_path)
    picture = run.picture_path("held-out", 10)
    assert picture == run.path / "pictures" / "held-out-000010.png"
    assert picture.parent.is_dir()
    with pytest.raises(ConfigError):
        run.picture_path("../x", 10)
    assert run.checkpoints.parent == run.log_path.parent == run.timeline_path.parent == run.path


def test_a_run_has_one_trainer(tmp_path: Path) -> None:
    run = create(tmp_path)
    with run.held():
        message = rf"'tiny-smoke-1' is being trained by process {os.getpid()}"
        with pytest.raises(ConfigError, match=message), RunDirectory.open(tmp_path, run.name).held():
            pytest.fail("two trainers")
    with run.held():
        pass
