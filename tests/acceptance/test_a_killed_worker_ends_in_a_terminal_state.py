"""A9. Symptom: a worker that was killed left its work pending for ever, and retries were ignored.

Rule: killed once, the unit is done elsewhere and the run completes (integration/workers/test_lost_workers.py). Killed
every time, the run fails before a deadline, and the error names unit, worker and how the worker ended. A unit that
raises every time fails the run after three attempts with what it raised.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from faults import Faults, faulty, faulty_config, installed
from runs import Ground, Outcome, small
from workers.courier import RunFailed

CONFIG = faulty_config(small("evaluation.every=0"))
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    with installed(found, Faults()):
        yield found
    found.close()


def fails(ground: Ground, fault: str) -> tuple[str, Outcome]:
    outcome = Outcome()
    prompts = faulty({2: fault}, CONFIG.algorithm.prompts_per_iteration)
    began = time.monotonic()
    with pytest.raises(RunFailed) as caught:
        ground.do(ground.drive, CONFIG, outcome, prompts=prompts)
    assert time.monotonic() - began < DEADLINE_S
    return str(caught.value), outcome


def test_a_unit_that_always_kills_its_worker_fails_the_run(ground: Ground) -> None:
    message, outcome = fails(ground, "kill")
    assert re.match(r"score i0 m\d was running on 5 workers when they were lost, the last of them worker \d; ", message)
    assert len(re.findall(r"worker \d \(pid \d+, was killed by signal 9\)", message)) >= 4
    assert not outcome.versions
    ground.settle(2)


def test_a_unit_that_always_raises_fails_the_run(ground: Ground) -> None:
    message, outcome = fails(ground, "raise")
    assert re.fullmatch(
        r"score i0 m\d failed 3 times, the last time on worker \d: ValueError: this picture cannot be scored", message
    )
    assert not outcome.versions
