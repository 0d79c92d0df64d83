"""Workers die, hang or leave in the middle of a run: it completes with the same samples and the same weights."""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Callable, Iterator

import pytest

from digenrl.policy import adapter_hash
from digenrl.scheduling.units import RolloutUnit, TrainUnit, Unit, UpdateUnit
from runs import Ground, OnUnit, assert_as_expected, kill, small
from workers.listener import Dispatched

WORKERS = 3


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(WORKERS)
    yield found
    found.close()


@pytest.fixture(autouse=True)
def all_workers_there(ground: Ground) -> None:
    ground.settle(WORKERS)


class Killer:
    """Kills the worker that a unit was handed to."""

    def __init__(self, ground: Ground) -> None:
        self._pids = {name: card.pid for name, card in ground.cards().items()}
        self.killed: list[str] = []

    def __call__(self, event: Dispatched) -> None:
        kill(self._pids[event.worker_name])
        self.killed.append(event.run.worker)


def a(kind: type[Unit]) -> Callable[[Unit], bool]:
    return lambda unit: isinstance(unit, kind)


def step(theta: int) -> Callable[[Unit], bool]:
    return lambda unit: unit == UpdateUnit(theta)


#: What is killed when, in a run with two trainers. The moments within a kind are drawn once.
draw = random.Random(20)
MOMENTS = [
    pytest.param(a(RolloutUnit), draw.randrange(2, 40), False, id="rollout-begins"),
    pytest.param(a(RolloutUnit), draw.randrange(2, 40), True, id="rollout-ends"),
    pytest.param(a(TrainUnit), draw.randrange(2, 12), False, id="training-begins"),
    pytest.param(a(TrainUnit), draw.randrange(2, 12), True, id="training-ends"),
    pytest.param(step(3), 1, False, id="lead-steps"),
    pytest.param(step(3), 1, True, id="lead-commits"),
    pytest.param(step(4), 1, True, id="lead-publishes"),
]


@pytest.mark.parametrize(("matches", "nth", "ended"), MOMENTS)
def test_a_killed_worker_changes_nothing(
    ground: Ground, matches: Callable[[Unit], bool], nth: int, ended: bool
) -> None:
    config = small("cluster.workers=3", "cluster.trainers=2", "schedule.micro_batch=2", "iterations=2")
    killer = Killer(ground)
    outcome = ground.run(config, OnUnit(matches, killer, nth=nth, ended=ended))
    assert len(killer.killed) == 1
    assert_as_expected(outcome, config)
    assert any(re.fullmatch(r"worker \d \(pid \d+\) is gone", message) for message in outcome.messages)


@pytest.mark.parametrize(("theta", "ended"), [(2, False), (2, True), (3, True)])
def test_a_killed_lead_takes_neither_behaviour_policy_nor_average_with_it(
    ground: Ground, theta: int, ended: bool
) -> None:
    """DiffusionNFT has three sets of weights: trained, generating, averaged. Update 2 is where they part."""
    config = small(
        "cluster.workers=3",
        "cluster.trainers=2",
        "schedule.micro_batch=2",
        "iterations=2",
        "algorithm.name=diffusion_nft",
        "algorithm.nft_beta=0.1",
        "optimizer.ema_decay=0.9",
        "optimizer.ema_every=1",
    )
    killer = Killer(ground)
    outcome = ground.run(config, OnUnit(step(theta), killer, ended=ended))
    assert len(killer.killed) == 1
    assert_as_expected(outcome, config)
    assert outcome.state is not None and outcome.state.behaviour is not None
    assert adapter_hash(outcome.state.behaviour) != outcome.adapter


def test_a_killed_worker_may_have_held_the_whole_model(ground: Ground) -> None:
    full = ("method=full", "algorithm.updates_per_iteration=1", "optimizer.learning_rate=1e-4")
    config = small("cluster.workers=3", "cluster.trainers=2", "schedule.micro_batch=2", "iterations=2", *full)
    killer = Killer(ground)
    outcome = ground.run(config, OnUnit(step(2), killer, ended=True))
    assert len(killer.killed) == 1
    assert_as_expected(outcome, config)


def test_the_replacement_of_a_killed_worker_joins_and_works(ground: Ground) -> None:
    """A8: what had ended before is not done again; what died with the worker is, once."""
    config = small("cluster.workers=3", "iterations=6", "evaluation.every=0")
    killer = Killer(ground)
    outcome = ground.run(config, OnUnit(a(RolloutUnit), killer, nth=3))
    assert_as_expected(outcome, config)
    incarnations = list(dict.fromkeys(worker for _, worker in outcome.units))
    assert len(incarnations) == WORKERS + 1
    assert incarnations.index(killer.killed[0]) < WORKERS
    assert sum("joined" in message for message in outcome.messages) == WORKERS + 1
    again = [unit for unit, receipts in outcome.receipts.items() if len(receipts) > 1]
    assert {unit.micro_batch.iteration for unit in again} <= {0}
    on_dead = {unit for unit, worker in outcome.units if worker == killer.killed[0]}
    assert set(again) <= on_dead


def test_all_workers_killed_at_once(ground: Ground) -> None:
    config = small("cluster.workers=3", "cluster.trainers=2", "iterations=2")
    pids = [card.pid for card in ground.cards().values()]
    outcome = ground.run(config, OnUnit(step(4), lambda _: [kill(pid) for pid in pids]))
    assert_as_expected(outcome, config)


def test_a_worker_that_is_retired_leaves_without_harm(ground: Ground) -> None:
    config = small("cluster.workers=3", "cluster.trainers=2", "iterations=2")
    outcome = ground.run(config, OnUnit(step(1), lambda _: ground.client.cluster.scale(WORKERS - 1)))
    ground.scale(WORKERS)
    assert_as_expected(outcome, config)
    assert sum(message.endswith("is gone") for message in outcome.messages) == 1


def test_an_interrupt_of_the_process_group_reaches_no_worker(ground: Ground) -> None:
    """A Ctrl-C is the driver's affair: workers and the server they come from go on."""
    before = {name: card.pid for name, card in ground.cards().items()}
    for pid in before.values():
        os.kill(pid, signal.SIGINT)
    config = small("cluster.workers=3", "iterations=2")
    outcome = ground.run(config)
    assert_as_expected(outcome, config)
    assert {name: card.pid for name, card in ground.cards().items()} == before
