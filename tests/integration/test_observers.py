"""Task runs end as their units end: what failed, was withdrawn or never started shows as such in Prefect."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from flows.services import ServicesHandle, drain_prefect
from program import task_runs

FLOW = """
import asyncio, json
from prefect import flow
from prefect.runtime import flow_run
from digenrl import runspec
from digenrl.config.load import load_config
from digenrl.scheduling.messages import Run
from tasks.observers import Observers
from workers.engine import role_of
from workers.listener import Dispatched

@flow(persist_result=False)
async def observed():
    config = load_config("tiny-smoke")
    shape = runspec.shape(config, 16)
    observers = Observers(config.schedule.observe, shape)
    first, second, *_ = (shape.rollout_units(m) for m in shape.micro_batches(0))

    def dispatch(unit, worker):
        outcome = asyncio.get_running_loop().create_future()
        observers.dispatched(Dispatched(Run(unit, worker, 0, 0), worker, role_of(unit), outcome))
        return outcome

    async def opened(count):
        # The page of the iteration counts too.
        async with asyncio.timeout(60):
            while observers.emitted < 1 + count:
                await asyncio.sleep(0.01)

    # One worker: a unit succeeds; the next one fails, is tried again and succeeds; the one after that follows.
    queued = [dispatch(first[0], "worker 0"), dispatch(first[1], "worker 0")]
    await opened(1)
    queued[0].set_result(None)
    await opened(2)
    queued[1].set_exception(RuntimeError("the device is out of memory"))
    again, after = dispatch(first[1], "worker 0"), dispatch(first[2], "worker 0")
    await opened(3)
    again.set_result(None)
    await opened(4)
    after.set_result(None)
    # Another worker is lost with one unit running and one queued.
    lost = [dispatch(unit, "worker 1") for unit in second[:2]]
    await opened(5)
    for outcome in lost:
        outcome.cancel()
    await observers.close()
    print(json.dumps({"flow_runs": [str(flow_run.id), *map(str, observers.flow_runs)], "emitted": observers.emitted}))

asyncio.run(observed())
"""


def test_task_runs_end_as_their_units_end(services: ServicesHandle) -> None:
    env = {**os.environ, **services.client_env()}
    done = subprocess.run([sys.executable, "-c", FLOW], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    flow_run_id, emitted = said["flow_runs"][0], said["emitted"]
    assert drain_prefect(services.prefect_api, said["flow_runs"], emitted) == emitted

    runs = [run for run in task_runs(services.prefect_api, flow_run_id) if run["name"].startswith("rollout")]
    ends = sorted((run["name"], run["state"]["type"]) for run in runs)
    assert ends == [
        ("rollout i0 m0 t0", "COMPLETED"),
        ("rollout i0 m0 t1", "COMPLETED"),
        ("rollout i0 m0 t1", "FAILED"),
        ("rollout i0 m0 t2", "COMPLETED"),
        ("rollout i0 m1 t0", "CANCELLED"),
    ], "the unit that never started is not there"
    (failed,) = (run for run in runs if run["state"]["type"] == "FAILED")
    assert "the device is out of memory" in failed["state"]["message"]
    (after,) = (run for run in runs if run["name"] == "rollout i0 m0 t2")
    (again,) = (run for run in runs if run["name"] == "rollout i0 m0 t1" and run["state"]["type"] == "COMPLETED")
    assert [given["id"] for given in after["task_inputs"]["wait_for"]] == [again["id"]], "the attempt that counts"
