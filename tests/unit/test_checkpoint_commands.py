"""`digenrl checkpoints`: what a person sees of a run's checkpoints, and what goes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.config.load import ConfigError, load_config
from digenrl.guard.evidence import Sighting
from digenrl.guard.pictures import PictureStatistics
from digenrl.guard.watch import Guard
from flows.commands.checkpoints import prune, show, verify
from flows.errors import ExpectedError
from flows.history import History
from storage import checkpoints
from storage.runs import RunDirectory


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with checkpoints after 4, 7, 8, 9 and 10 iterations, of which `keep` names 7, 9 and 10."""
    monkeypatch.setenv("DIGENRL_HOME", str(tmp_path))
    keep = ["checkpoint.keep.last=2", "checkpoint.keep.best=1", "evaluation.every=1"]
    config = load_config("tiny-smoke", keep)
    directory = RunDirectory.create(tmp_path, "tiny-smoke", config, "mine")
    history = History(evaluations={version: {0: 0.1} for version in range(11)} | {7: {0: 0.5, 1: 0.7}})
    for iteration in (4, 7, 8, 9, 10):
        state = {"config": config.model_dump(mode="json"), "history": history.until(iteration).to_state()}
        checkpoints.save(directory.checkpoints, iteration, {"adapter": {"w": torch.ones(iteration)}}, state)
    return directory


def iterations(run: RunDirectory) -> list[int]:
    return sorted(info.iteration for info in checkpoints.committed(run.checkpoints))


def test_they_are_listed_with_their_reward(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoints / "step-000099-0123abcd").mkdir()
    show("mine")
    heading, *rows, rest = capsys.readouterr().out.splitlines()
    assert heading.split() == ["iterations", "saved", "size", "held-out", "reward", "where"]
    assert [row.split()[0] for row in rows] == ["4", "7", "8", "9", "10"]
    assert [row.split()[-2] for row in rows] == ["0.100", "0.600", "0.100", "0.100", "0.100"]
    assert all(Path(row.split("file://")[1]).is_dir() for row in rows)
    assert "step-000099-0123abcd" in rest and "prune" in rest


def test_damage_is_found(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    verify("mine")
    assert capsys.readouterr().out.count("whole  file://") == 5
    first, second, *_ = sorted(run.checkpoints.iterdir())
    (first / "adapter.safetensors").write_bytes(b"cut")
    (second / "manifest.json").write_bytes(b"cut")
    with pytest.raises(ExpectedError, match="2 of 5 checkpoints are damaged"):
        verify("mine")
    shown = capsys.readouterr().out
    assert "adapter.safetensors has 3 bytes" in shown and "its manifest is not readable" in shown


def test_what_is_not_to_stay_goes(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    with run.held(), pytest.raises(ConfigError, match="'mine' is being trained"):
        prune("mine")
    assert len(iterations(run)) == 5
    (run.checkpoints / "step-000099-0123abcd").mkdir()
    prune("mine")
    assert "3 removed  step-" in capsys.readouterr().out
    assert iterations(run) == [7, 9, 10]
    prune(str(run.checkpoints))
    assert "0 removed" in capsys.readouterr().out


def test_what_the_guard_may_go_back_to_stays(run: RunDirectory) -> None:
    """As the newest checkpoint has it: all was well after 7 iterations, and from 8 on the pictures were black."""
    guard = Guard(config := run.read_config())
    for version in range(11):
        dark = PictureStatistics(1.0 if version > 7 else 0.1, 0.0, 0.2, 0.2, 0.0)
        guard.evaluation(Sighting(version, {0: 0.5}, {}, {0: dark}))
    assert guard.last is not None and guard.last.good == 7
    state = {"config": config.model_dump(mode="json"), "history": History().to_state(), "guard": guard.until(10)}
    checkpoints.save(run.checkpoints, 11, {"adapter": {"w": torch.ones(11)}}, state)
    prune("mine")
    assert iterations(run) == [7, 10, 11]


def test_there_may_be_none(run: RunDirectory) -> None:
    prune("mine")
    for folder in run.checkpoints.iterdir():
        (folder / "manifest.json").unlink()
    with pytest.raises(ExpectedError, match=r"'mine' has no checkpoints in .*/mine/checkpoints"):
        show("mine")
