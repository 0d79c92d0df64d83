"""What holds for every test: no process left behind, one compute thread, and a summary of skips by cause."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["PYTHONSAFEPATH"] = "1"

settings.register_profile("thorough", max_examples=10_000, deadline=None)
if profile := os.environ.get("HYPOTHESIS_PROFILE"):
    settings.load_profile(profile)

#: In CI a test may be skipped for these causes only.
ALLOWED_SKIPS = ("gpu",)

GRACE_S = 10.0


def _children() -> dict[int, psutil.Process]:
    found = {p.pid: p for p in psutil.Process().children(recursive=True)}
    return {pid: p for pid, p in found.items() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}


@pytest.fixture(autouse=True, scope="module")
def no_process_left_behind() -> Iterator[None]:
    """Processes that a module's tests start must be gone when it ends (session-wide servers excepted)."""
    before = set(_children())
    yield
    left = {pid: p for pid, p in _children().items() if pid not in before and not _is_session_wide(p)}
    _, alive = psutil.wait_procs(list(left.values()), timeout=GRACE_S)
    assert not alive, "processes left behind: " + "; ".join(_describe(p) for p in alive)


def _is_session_wide(process: psutil.Process) -> bool:
    # multiprocessing's resource tracker and fork server live as long as the interpreter, by design. Workers have the
    # fork server's command line, but are its children, not ours.
    line = _describe(process)
    server = "multiprocessing.forkserver" in line and process.ppid() == os.getpid()
    return server or "multiprocessing.resource_tracker" in line


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (gone)"


@pytest.hookimpl(hookwrapper=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Count skips by cause; in CI a cause outside the allow-list fails the run."""
    yield
    causes = Counter(_cause(report) for report in terminalreporter.stats.get("skipped", []))
    for cause, count in sorted(causes.items()):
        terminalreporter.write_line(f"skipped {count}: {cause}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """See pytest_terminal_summary."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI") != "true":
        return
    refused = {c for c in map(_cause, reporter.stats.get("skipped", [])) if not c.startswith(ALLOWED_SKIPS)}
    if refused:
        reporter.write_line(f"skips that CI does not allow: {sorted(refused)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _cause(report: pytest.TestReport | pytest.CollectReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return reason.removeprefix("Skipped: ")
