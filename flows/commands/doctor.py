"""`digenrl doctor`: look at this machine and say what is missing and what to type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.checks import machine, model, software, trial
from flows.checks.finding import Finding
from storage.home import home

MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("missing", "bold red")}
#: Width where the output is not a terminal.
PLAIN_WIDTH = 120


def run() -> None:
    """Print every finding.

    Raises:
        typer.Exit: 1 if something that is required is missing.
    """
    console = _console()
    found = []
    for title, checks in sections().items():
        with console.status(f"checking: {title.lower()}"):
            findings = [finding for check in checks for finding in check()]
        console.print(Text(title, "bold"))
        console.print(_table(findings))
        found += findings
    missing = [finding.name for finding in found if finding.status == "missing"]
    if missing:
        console.print(Text(f"missing: {', '.join(missing)}", "bold red"))
        raise typer.Exit(1)
    console.print(Text("nothing that is required is missing; try: digenrl train tiny-smoke", "green"))


def run_model(path: str, family: str | None, dtype: str, device: str) -> None:
    """Print a line per check of a checkpoint, as they are made.

    Raises:
        ConfigError: it cannot be loaded.
        typer.Exit: 1 if a check failed.
    """
    console = _console()
    console.print(Text(f"{path} on {device}", "bold"))
    failed = []
    for finding in model.findings(path, family, dtype, device):
        console.print(_table([finding], marks={**MARKS, "missing": ("FAILED", "bold red")}))
        if finding.status == "missing":
            failed.append(finding.name)
    if failed:
        console.print(Text(f"failed: {', '.join(failed)}", "bold red"))
        raise typer.Exit(1)
    console.print(Text("computed here as by its own pipeline", "green"))


def sections() -> Mapping[str, Sequence[Callable[[], list[Finding]]]]:
    """What is looked at, by heading, quick things first."""
    place = home()
    return {
        "Software": (software.python, software.packages, software.shadowing),
        "Machine": (machine.processor, machine.torch_devices, lambda: machine.disk(place)),
        "Servers and ports": (lambda: machine.services(place),),
        "Trial": (trial.model, trial.ocr),
        "Optional": (software.extras, software.tools),
    }


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PLAIN_WIDTH)


def _table(findings: Sequence[Finding], marks: Mapping[str, tuple[str, str]] = MARKS) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=7, no_wrap=True)
    table.add_column(width=20 if marks is MARKS else 30, no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        word, style = marks[finding.status]
        table.add_row(Text(word, style), finding.name, finding.detail)
        if finding.remedy:
            table.add_row("", "", Text(f"→ {finding.remedy}", "bold" if finding.status == "missing" else "dim"))
    return table
