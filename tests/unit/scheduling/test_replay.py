"""A recorded log of events replays to the same commands, in another process too."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

from schedules import ALL, centred, joins, shape
from test_invariants import Luck, guess

from digenrl.scheduling import Digenrl, Scheduler
from digenrl.scheduling import messages as m
from digenrl.scheduling.simulate import Costs, Result, Simulation

REPOSITORY = Path(__file__).parents[3]


def scheduler() -> Scheduler:
    """Of a run on which every technique is on."""
    run_shape = shape(
        iterations=3, groups=4, updates=2, stale_groups=1, group_size=4, micro_batch=1, eval_prompts=2, evaluated=bool
    )
    return Scheduler(
        run_shape, Digenrl(2), centred, max_attempts=100, streaming=True, costs=guess(run_shape), search=True
    )


def recorded() -> Result:
    """The run on four workers; three of them are lost, two of those come back, and units and copies fail."""
    luck = Luck(seed=3, share=0.05)
    incidents = [
        *joins(4),
        *((at, m.WorkerLost(name)) for at, name in ((11.0, "w0"), (30.0, "w2"), (40.0, "w1"))),
        *((at, m.WorkerJoined(name, "cpu", ALL)) for at, name in ((20.0, "w4"), (45.0, "w5"))),
    ]
    result = Simulation(scheduler(), costs=Costs(luck.unit_s, luck.move_s), incidents=incidents, behaviour=luck).run()
    assert result.finished, result.failure or result.waiting_for
    return result


def replay(events: list[tuple[float, m.Event]]) -> list[m.Command]:
    """What a fresh scheduler answers to them."""
    fresh = scheduler()
    return [command for now, event in events for command in fresh.handle(event, now)]


def test_a_log_replays_to_the_same_commands_in_another_process(tmp_path: Path) -> None:
    """Sets of names are in another order there: nothing may depend on it."""
    result = recorded()
    log, answers = tmp_path / "log", tmp_path / "answers"
    log.write_bytes(pickle.dumps(result.events))
    paths = [str(REPOSITORY), str(REPOSITORY / "tests" / "unit" / "scheduling")]
    environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, __file__, str(log), str(answers)], env=environment, check=True, timeout=60)
    commands = [command for _, command in result.commands]
    assert len(commands) > 500
    assert pickle.loads(answers.read_bytes()) == commands == replay(result.events)


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(pickle.dumps(replay(pickle.loads(Path(sys.argv[1]).read_bytes()))))
