"""A8. Symptom: after a worker died, Dask computed again everything whose future was still held, results and all.

Rule: units leave small receipts and their futures are released; what had ended on other workers is not executed again,
and what has to be done again is counted once.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from digenrl.scheduling.units import RolloutUnit, TrainUnit, Unit
from faults import Faults, installed
from runs import Ground, OnUnit, assert_as_expected, kill, small
from workers.listener import Dispatched

CONFIG = small("cluster.workers=2", "iterations=2", "schedule.layout=colocated", "evaluation.every=0")


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


def executions(path: Path) -> dict[str, list[int]]:
    """Process ids that executed each unit, in order."""
    found: dict[str, list[int]] = defaultdict(list)
    for line in path.read_text().splitlines():
        pid, label = line.split(" ", 1)
        found[label].append(int(pid))
    return found


def test_every_unit_is_executed_once(ground: Ground, tmp_path: Path) -> None:
    with installed(ground, Faults(executions=tmp_path / "log")):
        outcome = ground.run(CONFIG)
    assert_as_expected(outcome, CONFIG)
    found = executions(tmp_path / "log")
    assert {len(pids) for pids in found.values()} == {1}
    assert sorted(found) == sorted(unit.label for unit, _ in outcome.units)


@pytest.mark.parametrize("kind", [RolloutUnit, TrainUnit])
def test_only_what_died_with_a_worker_is_executed_again(ground: Ground, tmp_path: Path, kind: type[Unit]) -> None:
    pids = {name: card.pid for name, card in ground.cards().items()}
    killed: list[int] = []

    def strike(event: Dispatched) -> None:
        killed.append(pids[event.worker_name])
        kill(killed[0])

    with installed(ground, Faults(executions=tmp_path / "log")):
        outcome = ground.run(CONFIG, OnUnit(lambda unit: isinstance(unit, kind), strike, nth=5))
        ground.settle(2)
    assert_as_expected(outcome, CONFIG)
    for label, where in executions(tmp_path / "log").items():
        survivors = [pid for pid in where if pid != killed[0]]
        assert len(survivors) <= 1, f"{label} was executed by {where}; {killed[0]} was killed"
    counted = Counter(unit.micro_batch for unit in outcome.receipts if isinstance(unit, RolloutUnit))
    assert len(counted) == len(outcome.fingerprints)
