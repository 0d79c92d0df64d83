"""A user's own file named like one of our packages is named in a sentence, not met as an ImportError later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.startup import PACKAGES, check_shadowing

PROGRAM = Path(sys.executable).parent / "digenrl"


def run(*command: str | Path, cwd: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    return subprocess.run(command, capture_output=True, text=True, env={**env, **changes}, cwd=cwd, timeout=60)


def test_nothing_is_hidden_here() -> None:
    assert check_shadowing() is None


@pytest.mark.parametrize("package", [p for p in PACKAGES if p != "flows"])
def test_a_hidden_package_is_named(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"{package}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, package, raising=False)
    problem = check_shadowing()
    assert problem is not None
    assert f"'{package}'" in problem
    assert str(tmp_path / f"{package}.py") in problem


def test_program_names_the_file_on_pythonpath(tmp_path: Path) -> None:
    own = tmp_path / "tasks.py"
    own.write_text("raise SystemExit('imported')\n")
    done = run(PROGRAM, "config", "presets", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2, done.stderr
    assert str(own) in done.stderr
    assert "rename that file or take its directory off PYTHONPATH" in done.stderr
    assert "Traceback" not in done.stderr


def test_working_directory_hides_nothing_from_the_program(tmp_path: Path) -> None:
    (tmp_path / "tasks.py").write_text("raise SystemExit('imported')\n")
    done = run(PROGRAM, "config", "presets", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tiny-ocr" in done.stdout.split()


def test_working_directory_hides_packages_from_python_m_unless_it_is_safe(tmp_path: Path) -> None:
    own = tmp_path / "storage.py"
    own.touch()
    command = (sys.executable, "-m", "flows.cli", "config", "presets")
    done = run(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert str(own) in done.stderr
    assert run(*command, cwd=tmp_path, PYTHONSAFEPATH="1").returncode == 0
