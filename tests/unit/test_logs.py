"""The terminal gets our warnings as one line each, the run's log gets everything."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flows.logs import redirect_libraries, run_log


def test_only_our_warnings_reach_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log.txt"
    ours, theirs = logging.getLogger("storage.checkpoints"), logging.getLogger("some.library")
    with run_log(path):
        ours.info("saved")
        ours.warning("the checkpoint %s is damaged", "step-1")
        theirs.warning("deprecated")
        try:
            raise RuntimeError("no such device")
        except RuntimeError:
            theirs.exception("a task failed")
    assert capsys.readouterr() == ("", "note: the checkpoint step-1 is damaged\n")
    log = path.read_text()
    lines = ("INFO    storage.checkpoints: saved", "the checkpoint step-1 is damaged", "some.library: deprecated")
    for part in (*lines, "a task failed", "Traceback", "RuntimeError: no such device"):
        assert part in log

    ours.warning("afterwards")
    assert path.read_text() == log, "the log is closed"


def test_a_log_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    for attempt in ("first", "second"):
        with run_log(path):
            logging.getLogger("flows").info(attempt)
    assert [line.split()[-1] for line in path.read_text().splitlines()] == ["first", "second"]


def test_libraries_lose_their_own_way_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("prefect._internal")
    before = library.handlers[:], library.propagate
    library.addHandler(logging.StreamHandler())
    library.propagate = False
    try:
        with run_log(tmp_path / "log.txt"):
            redirect_libraries()
            library.error("the events client is disconnected")
            logging.getLogger("prefect.task_runs").info("Finished in state Completed()")
        assert capsys.readouterr().err == ""
        log = (tmp_path / "log.txt").read_text()
        assert "the events client is disconnected" in log
        assert "Finished in state" not in log, "one line a task run is too many"
    finally:
        library.handlers[:], library.propagate = before
