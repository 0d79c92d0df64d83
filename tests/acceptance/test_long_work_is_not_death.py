"""A13. Symptom: a worker that computed for longer than the scheduler's patience was taken for dead and its work redone.

Rule: a unit may take longer than `cluster.worker_ttl_s`, for it runs beside the thread that answers the scheduler; it
is neither killed nor done twice. A process that does not answer for that long counts as lost: it is replaced, the run
completes with the same weights, and the message names the setting.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from digenrl.scheduling.units import TrainUnit
from faults import Faults, faulty, faulty_config, installed
from runs import Ground, OnUnit, assert_as_expected, small
from workers.listener import Dispatched

TTL_S = 5.0
CONFIG = small(f"cluster.worker_ttl_s={TTL_S}", "iterations=2", "evaluation.every=0")


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2, worker_ttl_s=TTL_S)
    yield found
    found.close()


def test_a_unit_may_take_longer_than_the_limit(ground: Ground, tmp_path: Path) -> None:
    config = faulty_config(CONFIG.model_copy(update={"iterations": 1}))
    prompts = faulty({0: f"sleep {TTL_S * 1.5}"}, config.algorithm.prompts_per_iteration)
    with installed(ground, Faults(executions=tmp_path / "executions")):
        outcome = ground.run(config, prompts=prompts)
    assert outcome.finished
    assert not [message for message in outcome.messages if "joined" not in message]
    executed = Counter(line.split(" ", 1)[1] for line in (tmp_path / "executions").read_text().splitlines())
    assert set(executed.values()) == {1}


def test_a_silent_worker_is_replaced(ground: Ground) -> None:
    before = {name: card.pid for name, card in ground.cards().items()}
    silenced: list[str] = []

    def silence(event: Dispatched) -> None:
        os.kill(before[event.worker_name], signal.SIGSTOP)
        silenced.append(event.worker_name)

    outcome = ground.run(CONFIG, OnUnit(lambda unit: isinstance(unit, TrainUnit), silence, nth=3))
    assert_as_expected(outcome, CONFIG)
    name = silenced[0]
    assert f"{name} (pid {before[name]}) was silent for longer than cluster.worker_ttl_s=5" in outcome.messages
    ground.settle(2)
    assert ground.cards()[name].pid != before[name]
