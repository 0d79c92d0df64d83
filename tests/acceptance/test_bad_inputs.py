"""What people type by mistake is refused before anything starts.

Symptom in comparable systems: a misspelt key is ignored, or a traceback appears minutes later in a worker's log.
Rule: exit code 2 and one message with the field, the value, what was expected or the nearest valid name, within two
seconds; no server, no worker, no file.

Every row of the table goes through the command line in this process, and one of each kind through the program.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_inputs import BAD_INPUTS, BadInput
from typer.testing import CliRunner

from flows.cli import app

PROGRAM = Path(sys.executable).parent / "digenrl"
#: The target is 2 s; a machine that runs other tests beside this one gets more.
LIMIT_S = 10.0

OF_EACH_KIND = (
    *("misspelt preset", "not YAML", "unknown key in a file", "wrong type", "two mistakes", "prompts without target"),
    *("misspelt layer", "path as name", "unknown run", "sample of an unknown run", "explain an unknown key"),
)
BY_NAME = {row.name: row for row in BAD_INPUTS}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, with DIGENRL_HOME at its default below it and a home directory of its own."""
    work, user = tmp_path / "work", tmp_path / "user"
    work.mkdir()
    user.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.delenv("DIGENRL_HOME", raising=False)
    return work


def write_files(row: BadInput, place: Path) -> set[Path]:
    for name, content in row.files.items():
        (place / name).write_bytes(content)
    return everything(place)


def everything(place: Path) -> set[Path]:
    return set(place.parent.rglob("*"))


def program(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run the program as a person does: without PYTHONSAFEPATH."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run([PROGRAM, *argv], capture_output=True, text=True, env=env, timeout=60)


def assert_refused(row: BadInput, code: int, out: str, err: str) -> None:
    assert code == 2, out + err
    assert out == ""
    assert err.startswith("digenrl: ")
    assert "Traceback" not in err
    missing = [fragment for fragment in row.fragments if fragment not in err]
    assert not missing, err


@pytest.mark.parametrize("row", BAD_INPUTS, ids=lambda row: row.name)
def test_command_line_refuses(row: BadInput, place: Path) -> None:
    before = write_files(row, place)
    result = CliRunner().invoke(app, list(row.argv))
    assert_refused(row, result.exit_code, result.stdout, result.stderr)
    assert everything(place) == before


@pytest.mark.parametrize("option", ["--prefect-port=99999", "--mlflow-port=-1", "--mlflow-port=0"])
def test_ports_that_do_not_exist_are_refused(option: str, place: Path) -> None:
    result = CliRunner().invoke(app, ["serve", option])
    assert result.exit_code == 2
    assert f"Invalid value for '{option.partition('=')[0]}'" in result.stderr
    assert everything(place) == {place, place.parent / "user"}


def test_what_is_no_file_is_not_read(place: Path) -> None:
    os.mkfifo("pipe.yaml")
    Path("a.yaml").symlink_to("b.yaml")
    Path("b.yaml").symlink_to("a.yaml")
    for name, reason in (("pipe.yaml", "is a device or pipe"), ("a.yaml", "go round in a circle")):
        result = CliRunner().invoke(app, ["config", "show", name])
        assert result.exit_code == 2
        assert f"digenrl: {name} " in result.stderr
        assert reason in result.stderr


@pytest.mark.parametrize("command", [["train", "tiny-smoke"], ["serve"]])
@pytest.mark.parametrize(
    ("home", "reason"),
    [
        ("x" * 256, "is too long"),
        ("x/" * 400, "is too long"),
        ("~nobody-of-that-name/runs", "is no possible directory"),
        pytest.param("/proc/runs", "must be writable", marks=pytest.mark.skipif(not Path("/proc").exists(), reason="")),
        ("file/runs", "must be a directory, but"),
    ],
)
def test_a_home_that_cannot_be_is_refused(
    command: list[str], home: str, reason: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "file").touch()
    before = everything(place)
    monkeypatch.setenv("DIGENRL_HOME", home)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2, result.output
    assert "digenrl: DIGENRL_HOME=" in result.stderr
    assert reason in result.stderr
    assert everything(place) == before


def test_output_that_nobody_reads_ends_the_program_quietly(place: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([PROGRAM, "config", "show", "tiny-smoke"], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_program_refuses_at_once(name: str, place: Path) -> None:
    row = BY_NAME[name]
    before = write_files(row, place)
    started = time.monotonic()
    done = program(*row.argv)
    seconds = time.monotonic() - started
    assert_refused(row, done.returncode, done.stdout, done.stderr)
    assert everything(place) == before, "nothing was written, so no server's supervisor was started either"
    assert seconds < LIMIT_S


def test_refusing_imports_neither_torch_nor_a_server(place: Path) -> None:
    """What keeps it quick, said without a clock."""
    script = (
        "import sys\nfrom flows.cli import app\n"
        "try:\n    app(['train', 'tiny-smoke', 'lora.targets=[to_z]'])\n"
        "except SystemExit as end:\n    assert end.code == 2\n"
        "print(*sorted({'torch', 'diffusers', 'prefect', 'distributed', 'mlflow'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


def test_debug_adds_the_traceback_and_keeps_the_rest(place: Path) -> None:
    done = program("train", "nonsense", "--debug")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback (most recent call last):")
    assert "digenrl: no preset or file 'nonsense'" in done.stderr.splitlines()[-1]
    assert everything(place) == set(place.parent.iterdir())
