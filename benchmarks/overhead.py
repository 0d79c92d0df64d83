"""What orchestration costs: the plain loop against engine, Dask and Prefect, on tiny-ocr, side by side in one session.

    python benchmarks/overhead.py --page docs/performance.md      (about 25 minutes; --quick: less than one)

Explained in docs/performance.md: samples per second, gaps between units on a device, CPU time per unit in the flow
process and in the Prefect server, how busy the devices are, and gaps and CPU time with 32 emulated workers. Sides
alternate (A B C A B C ...), figures are medians over the repeats. The first iteration of every run is left out. Homes
and servers are temporary.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from types import FrameType
from typing import Any

import psutil

# What is measured is the checkout this file lies in, here and in every process started from here.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.overhead_figures import Reading, Side, row_of
from benchmarks.overhead_probe import Probe
from benchmarks.overhead_tables import cpu_table, fleet_table, gap_table, replace_block, throughput_table
from flows.services import ServicesHandle, drain_prefect, ensure
from flows.services.state import ServicesDirectory
from storage.processes import descendants

DETAILS = ("iteration", "microbatch", "auto", "unit")
LAYOUTS = ("colocated", "disaggregated")
EVERYWHERE = (*LAYOUTS, "emulated")
#: Above this load average, or this many cores of other processes, figures are not to be trusted.
QUIET_LOAD, QUIET_CORES = 0.5, 0.1
DRAIN_S, SETTLE_S = 180.0, 30.0

QUICK = ("algorithm.prompts_per_iteration=4", "algorithm.samples_per_prompt=4", "algorithm.updates_per_iteration=2")


def sides(quick: bool, where: Sequence[str] = EVERYWHERE) -> list[Side]:
    """What is compared, in the order of one repeat: the loop, and the layouts `where`."""
    bare = [
        Side(layout, stepwise=stepwise, queue_depth=depth)
        for layout in LAYOUTS
        for stepwise in (False, True)
        for depth in (2, 1)
        if not quick or layout == "colocated" or (depth == 2 and not stepwise)
    ]
    bare += [Side("emulated", queue_depth=depth) for depth in (2, 1) if not quick or depth == 2]
    observed_layouts = LAYOUTS[1:] if quick else EVERYWHERE
    first = [Side(layout, "iteration", warm_up_only=True) for layout in observed_layouts]
    observed = [
        Side(layout, detail)
        for layout in observed_layouts
        for detail in DETAILS
        if (layout, detail) != ("emulated", "unit")  # Prefect does not keep up
    ]
    return [Side("loop"), *(side for side in (*bare, *first, *observed) if side.layout in where)]


class Server:
    """The Prefect server's processes."""

    def __init__(self, handle: ServicesHandle, idle_for_s: float) -> None:
        found = ServicesDirectory(handle.home).read_state().servers["prefect"].processes
        self.processes = [psutil.Process(process.pid) for process in found]
        self._api = handle.prefect_api
        self.idle_cores = 0.05
        self.settle()
        self.idle_cores = self._cores(idle_for_s)

    def cpu_s(self) -> float:
        """CPU time so far."""
        return sum(map(_cpu_s, self.processes))

    def settle(self) -> None:
        """Wait until it has nothing left to do, at most SETTLE_S."""
        deadline = time.monotonic() + SETTLE_S
        while self._cores(0.5) > self.idle_cores + 0.05 and time.monotonic() < deadline:
            pass

    def drain(self, flow_run_ids: Sequence[str], task_runs: int) -> None:
        """Wait until it has recorded a flow run whole.

        Raises:
            RuntimeError: it has not after DRAIN_S.
        """
        recorded = drain_prefect(self._api, flow_run_ids, task_runs, DRAIN_S)
        if recorded < task_runs:
            raise RuntimeError(f"Prefect recorded {recorded} of {task_runs} task runs within {DRAIN_S:.0f} s")
        self.settle()

    def _cores(self, seconds: float) -> float:
        before = self.cpu_s()
        time.sleep(seconds)
        return (self.cpu_s() - before) / seconds


class Bench:
    """Runs sides and takes what only the parent can see: the server and the rest of the machine."""

    def __init__(self, probes: dict[str, Probe], server: Server) -> None:
        self._probes = probes
        self._server = server
        roots = [os.getpid(), *(probe.pid for probe in probes.values())]
        self._ours = {process for pid in roots for process in descendants(pid)} | set(server.processes)

    def run(self, side: Side, iterations: int) -> Reading:
        """One run of a side."""
        began, ours, whole, server_s = time.monotonic(), self._ours_s(), _machine_s(), self._server.cpu_s()
        reading, flow_run = self._probes[side.layout].run(side, iterations)
        if flow_run is not None:
            self._server.drain(flow_run.ids, flow_run.task_runs)
        seconds = time.monotonic() - began
        others = (_machine_s() - whole) - (self._ours_s() - ours)
        reading = replace(reading, others_cores=max(others / seconds, 0.0))
        if flow_run is None:
            return reading
        used = self._server.cpu_s() - server_s - seconds * self._server.idle_cores
        return replace(reading, server_cpu_s=used, task_runs=flow_run.task_runs)

    def _ours_s(self) -> float:
        return sum(map(_cpu_s, self._ours))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _machine_s() -> float:
    times = psutil.cpu_times()
    return sum(times[:3])  # user, nice, system


def measure(
    plan: Sequence[Side], iterations: int, repeats: int, quick: bool, say: Callable[[str], None]
) -> tuple[dict[Side, list[Reading]], float]:
    """Readings by side, one per repeat, and what the server needs when idle, in cores."""
    overrides = QUICK if quick else ()
    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(prefix="digenrl-overhead-"))
        handle = stack.enter_context(ensure(("prefect",), owner="benchmarks/overhead.py", home=Path(home), wait=False))
        python_path = os.pathsep.join([sys.path[0], *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = handle.client_env() | {"DIGENRL_HOME": home, "TMPDIR": home, "PYTHONPATH": python_path}
        say("starting the Prefect server and one process per layout")
        layouts = dict.fromkeys(side.layout for side in plan)
        cut = {layout: () if layout == "emulated" else overrides for layout in layouts}
        probes = {layout: stack.enter_context(Probe(layout, cut[layout], environment)) for layout in layouts}
        handle.wait()
        _warm_up(probes)
        server = Server(handle, idle_for_s=2.0 if quick else 10.0)
        bench = Bench(probes, server)
        readings: dict[Side, list[Reading]] = {side: [] for side in plan}
        for repeat in range(repeats):
            for side in plan:
                reading = bench.run(side, iterations)
                readings[side].append(reading)
                if not side.warm_up_only:
                    rate = reading.samples / reading.seconds
                    what = f"{side.label}, observed: {side.observed}, {side.cut}, depth {side.queue_depth}"
                    say(f"repeat {repeat + 1}/{repeats}  {rate:6.1f} samples/s  {what}")
        return readings, server.idle_cores


def _warm_up(probes: dict[str, Probe]) -> None:
    """Let everybody import and load, side by side: the server's first flow run costs it more than the next ones."""
    for layout, probe in probes.items():
        probe.ask(Side(layout, None if layout == "loop" else "iteration", warm_up_only=True), 1)
    for probe in probes.values():
        probe.answer()


def machine() -> dict[str, Any]:
    """Where this is measured."""
    packages = ("digenrl", "torch", "dask", "distributed", "prefect")
    return {
        "architecture": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def rows_of(readings: dict[Side, list[Reading]]) -> list[dict[str, Any]]:
    """One row of figures per side."""
    warm_up = {side.layout: found for side, found in readings.items() if side.warm_up_only}
    counted = {side: found for side, found in readings.items() if not side.warm_up_only}
    return [row_of(side, found, warm_up[side.layout] if side.detail else ()) for side, found in counted.items()]


def block(result: dict[str, Any]) -> str:
    """What goes on the page: circumstances, then the tables."""
    where, rows = result["machine"], result["rows"]
    memory = where["memory_bytes"] / 2**30
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    lines = [
        f"`{where['command']}` on {time.strftime('%Y-%m-%d')}: {where['processor']} ({where['architecture']}), "
        f"{where['cores']} cores, {memory:.0f} GiB, {where['system']}, Python {where['python']}, {versions}. "
        f"{len(rows)} sides, {where['iterations']} counted iterations per run, repeats: {rows[0]['repeats']}, "
        f"{where['seconds']:.0f} s in all. {circumstances(where)}"
    ]
    tables = (throughput_table, gap_table, cpu_table, fleet_table)
    titles = ("Throughput and busy devices", "Gaps between units on a device", "CPU time per unit, queue depth 2")
    titles += ("32 emulated workers, units of 200 ms",)
    for title, table in zip(titles, tables, strict=True):
        if found := table(rows):
            lines += [f"**{title}**", found]
    lines.append(f"The Prefect server needs {1000 * where['server_idle_cores']:.0f} ms of CPU per second when idle.")
    return "\n\n".join(lines)


def circumstances(where: dict[str, Any]) -> str:
    """How quiet the machine was."""
    before, after = where["load_average_before"], where["load_average_after"]
    others = where["others_cores"]
    quiet = before <= QUIET_LOAD and others <= QUIET_CORES
    verdict = (
        "The machine was quiet" if quiet else "**The machine was shared; expect no more than orders of magnitude**"
    )
    return (
        f"{verdict}: load average {before:.2f} at the start and {after:.2f} at the end (which is ours as well); other "
        f"processes used {others:.2f} cores."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, help="counted iterations of a run (10; --quick: 2)")
    parser.add_argument("--repeats", type=int, help="runs of every side (3; --quick: 1)")
    parser.add_argument("--layouts", nargs="+", choices=EVERYWHERE, default=EVERYWHERE, help="only these, and the loop")
    parser.add_argument("--quick", action="store_true", help="fewer sides, 16 instead of 128 samples per iteration")
    parser.add_argument("--json", type=Path, help="also write rows and machine here")
    parser.add_argument("--page", type=Path, help="also rewrite the marked block of this page")
    options = parser.parse_args(arguments)
    iterations, repeats = (
        options.iterations or (2 if options.quick else 10),
        options.repeats or (1 if options.quick else 3),
    )
    if iterations < 1 or repeats < 1:
        parser.error("--iterations and --repeats must be at least 1")
    if options.page is not None:
        replace_block(options.page.read_text(), "")  # better now than after half an hour

    signal.signal(signal.SIGTERM, _leave)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)

    load = os.getloadavg()[0]
    say(f"load average {load:.2f}")
    if load > QUIET_LOAD:
        say(f"warning: the machine is not quiet (load average above {QUIET_LOAD}); the figures will say so")
    try:
        readings, idle_cores = measure(sides(options.quick, options.layouts), iterations, repeats, options.quick, say)
    except RuntimeError as error:
        print(f"not measured: {error}", file=sys.stderr)
        return 1
    where = machine() | {
        "command": " ".join(["python benchmarks/overhead.py", *_named(options)]),
        "iterations": iterations,
        "seconds": time.monotonic() - began,
        "load_average_before": load,
        "load_average_after": os.getloadavg()[0],
        "others_cores": fmean(reading.others_cores for found in readings.values() for reading in found),
        "server_idle_cores": idle_cores,
    }
    result = {"rows": rows_of(readings), "machine": where}
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1))
    if options.page is not None:
        options.page.write_text(replace_block(options.page.read_text(), block(result)))
    print(block(result))
    return 0


def _named(options: argparse.Namespace) -> list[str]:
    """The options that decide what is measured, as they were given."""
    named = [f"--{name} {value}" for name in ("iterations", "repeats") if (value := getattr(options, name))]
    some = ["--layouts", *options.layouts] if tuple(options.layouts) != EVERYWHERE else []
    return [*named, *some, *(["--quick"] if options.quick else [])]


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
