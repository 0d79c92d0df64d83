"""A process of its own that runs one layout of benchmarks/overhead.py, one run per request, workers kept.

with Probe("colocated", overrides, environment) as probe:
    reading, flow_run = probe.run(side, iterations)

Everything heavy is imported in the process itself, after its environment is set.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.overhead_figures import WORKERS, FlowRun, Reading, Side
from storage.processes import terminate_tree

if TYPE_CHECKING:
    from digenrl.config import RunConfig

PRESET = "tiny-ocr"
#: As many compute threads as a worker has.
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
#: Emulated devices get four trajectories and four train units each per iteration.
EMULATED = (
    "schedule.layout=colocated",
    "algorithm.prompts_per_iteration=32",
    "algorithm.samples_per_prompt=16",
    "schedule.micro_batch=4",
    "schedule.timestep_batch=auto",
)
RUN_S, STOP_S = 1800.0, 15.0


class Probe:
    """The parent's end. Use it as a context manager.

    Args:
        layout: loop, colocated, disaggregated or emulated.
        overrides: of the preset, e.g. `algorithm.samples_per_prompt=4`.
        environment: set before anything is imported: the Prefect server's address and DIGENRL_HOME.
    """

    def __init__(self, layout: str, overrides: Sequence[str], environment: Mapping[str, str]) -> None:
        self._layout = layout
        context = multiprocessing.get_context("spawn")
        self._end, there = context.Pipe()
        arguments = (there, layout, tuple(overrides), dict(environment), os.getpid())
        # Not a daemon: it has children of its own.
        self._process = context.Process(target=_main, args=arguments, name=f"probe {layout}", daemon=False)
        self._process.start()
        there.close()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end.close()
        self._process.join(STOP_S if kind is None else 0)
        if self._process.is_alive() and self._process.pid is not None:
            terminate_tree(self._process.pid)
        self._process.join()

    @property
    def pid(self) -> int:
        """Of the process."""
        assert self._process.pid is not None
        return self._process.pid

    def run(self, side: Side, iterations: int) -> tuple[Reading, FlowRun | None]:
        """One run of a side; `iterations` are the counted ones."""
        self.ask(side, iterations)
        return self.answer()

    def ask(self, side: Side, iterations: int) -> None:
        """`run` without waiting: `answer` must follow."""
        self._end.send((side, iterations))

    def answer(self) -> tuple[Reading, FlowRun | None]:
        """Wait for a run.

        Raises:
            RuntimeError: the process or the run failed.
        """
        try:
            if not self._end.poll(RUN_S):
                raise RuntimeError(f"the process for {self._layout} did not answer within {RUN_S:.0f} s")
            answer: tuple[Reading, FlowRun | None] | str = self._end.recv()
        except EOFError:
            raise RuntimeError(f"the process for {self._layout} ended; what it wrote above says why") from None
        if isinstance(answer, str):
            raise RuntimeError(f"the process for {self._layout}: {answer}")
        return answer


def _main(end: Connection, layout: str, overrides: tuple[str, ...], environment: dict[str, str], parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.environ.update(THREADS | environment)
    try:
        if layout == "loop":
            _serve_loop(end, overrides)
        else:
            asyncio.run(_serve_cluster(end, layout, overrides))
    except EOFError:
        return  # the parent is done with us
    except Exception as error:
        end.send(f"{type(error).__name__}: {error}")
        raise


def _end_with(parent: int) -> None:
    """End this process when its parent is gone; Dask's workers end with their nanny."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _config(side: Side, iterations: int, overrides: Sequence[str]) -> RunConfig:
    from digenrl.config.load import load_config

    total = 1 if side.warm_up_only else iterations + 1
    cut = side.detail or ("unit" if side.stepwise else "iteration")
    mine = [
        f"iterations={total}",
        f"optimizer.warmup_iterations={min(3, total)}",
        "evaluation.every=0",
        "tracking.uri=none",
        f"schedule.observe.detail={cut}",
        # `auto` as it is by default; the others show nothing but the detail asked for.
        *(["schedule.observe.every=0"] if side.detail != "auto" else []),
    ]
    if side.layout == "emulated":
        mine += EMULATED
    elif side.layout != "loop":
        mine += [f"schedule.layout={side.layout}", f"cluster.workers={WORKERS[side.layout]}"]
    return load_config(PRESET, [*mine, *overrides])


def _serve_loop(end: Connection, overrides: Sequence[str]) -> None:
    from benchmarks.overhead_run import run_loop

    while True:
        side, iterations = end.recv()
        end.send((run_loop(_config(side, iterations, overrides)), None))


async def _serve_cluster(end: Connection, layout: str, overrides: Sequence[str]) -> None:
    from flows.logs import redirect_libraries, run_log

    # As in a training run: what Prefect says about every task run goes to a file.
    with run_log(Path(os.environ["DIGENRL_HOME"]) / f"{layout}.log"):
        from benchmarks.overhead_run import open_workers, run_bare, run_observed

        redirect_libraries()
        async with open_workers(layout, _config(Side(layout), 1, overrides).cluster) as client:
            while True:
                side, iterations = await asyncio.to_thread(end.recv)
                config = _config(side, iterations, overrides)
                if side.detail is None:
                    end.send((await run_bare(client, side, config), None))
                else:
                    end.send(await run_observed(client, side, config))
