"""What `digenrl doctor` makes of what it finds."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from flows.checks import machine, software
from flows.services.ports import claim_from
from flows.services.state import ServerState, ServicesDirectory, State
from storage.processes import identify


def test_every_requirement_is_looked_at() -> None:
    findings = {finding.name: finding for finding in software.packages()}
    assert {*software.HEADLINES, "onnxruntime", "other packages"} == findings.keys()
    assert {finding.status for finding in findings.values()} == {"ok"}
    assert findings["distributed"].detail == "2026.7.1  (==2026.7.1)"


@pytest.mark.parametrize(
    ("requirement", "detail", "remedy"),
    [
        ("torch>=99", "needed >=99", "pip install 'torch>=99'"),
        ("digenrl-no-such-package>=1", "not installed, needed >=1", "pip install -e ."),
    ],
)
def test_wrong_and_absent_packages_are_missing(requirement: str, detail: str, remedy: str) -> None:
    finding = software.check_package(Requirement(requirement))
    assert finding.status == "missing"
    assert detail in finding.detail
    assert finding.remedy == remedy


def test_optional_things_are_never_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert [finding.status for finding in software.tools()] == ["note"] * len(software.TOOLS)
    assert {finding.status for finding in software.extras()} <= {"ok", "note"}


def test_home_that_is_a_file_is_missing(tmp_path: Path) -> None:
    assert [finding.status for finding in machine.disk(tmp_path / "runs")] == ["ok"]
    (tmp_path / "runs").touch()
    (finding,) = machine.disk(tmp_path / "runs")
    assert finding.status == "missing"
    assert "is a file" in finding.detail
    assert "DIGENRL_HOME" in finding.remedy


def test_little_disk_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "DISK_BYTES", 10**18)
    assert [finding.status for finding in machine.disk(tmp_path)] == ["note"]


def test_a_port_is_free_ours_or_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        busy = listener.getsockname()[1]
        monkeypatch.setattr(machine, "DASK_PORT", busy)
        finding = next(f for f in machine.services(tmp_path) if f.name == f"port {busy}")
        assert (finding.status, finding.detail.split()[:4]) == ("note", ["used", "by", "another", "program"])
        assert list(tmp_path.iterdir()) == [], "looking creates nothing"

        directory = ServicesDirectory(tmp_path)
        directory.create()
        server = ServerState("healthy", busy, f"http://127.0.0.1:{busy}", "log")
        directory.write_state(State(identify(), {"mlflow": server}))
        directory.write_lease("train ocr-1", {"mlflow": None})
        findings = {finding.name: finding for finding in machine.services(tmp_path)}
        assert findings[f"port {busy}"].detail == "used by DigenRL's own mlflow server"
        assert findings["mlflow server"].detail == f"healthy at http://127.0.0.1:{busy}, used by train ocr-1"
    free = claim_from(busy)
    free.release()
    monkeypatch.setattr(machine, "DASK_PORT", free.port)
    assert any(f.name == f"port {free.port}" and f.status == "ok" for f in machine.services(tmp_path))


def test_processor_counts_what_this_process_may_use() -> None:
    cores = machine.processor()[0]
    assert cores.detail.split(";")[0] == str(len(os.sched_getaffinity(0)))
