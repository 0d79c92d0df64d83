"""Drops are repeated until they are known to have arrived, and take effect once, in the order they were issued."""

from __future__ import annotations

import pytest
import torch

from digenrl.config.load import load_config
from digenrl.identity import MicroBatchId
from digenrl.policy import adapter_hash
from digenrl.prompts import load_prompts
from digenrl.scheduling.messages import AdapterRef, Drop, Run, TrajectoryRef
from digenrl.scheduling.units import RolloutUnit
from workers.courier import Courier
from workers.forgetting import Forgetting
from workers.held import split_state
from workers.receipts import Assignment, RunSetup
from workers.replica import Replica

CONFIG = load_config("tiny-smoke", ["algorithm.num_steps=6"])
SETUP = RunSetup("epoch", CONFIG, 0)


@pytest.fixture(scope="module")
def shared() -> Replica:
    torch.set_num_threads(1)
    return Replica(SETUP, "here")


@pytest.fixture
def replica(shared: Replica) -> Replica:
    """With the adapter of theta 0 and nothing else."""
    for theta in range(5):
        shared._drop(AdapterRef(theta))
    shared._forgetting = Forgetting()
    shared.initialise()
    return shared


def courier() -> Courier:
    """One that only keeps accounts: nothing is sent."""
    return Courier(None, None, SETUP, start=None, answer=lambda worker, event: None)  # type: ignore[arg-type]


def test_what_is_not_acknowledged_is_repeated() -> None:
    keeper = courier()
    for theta in range(3):
        keeper.drop(Drop(AdapterRef(theta), "a"))
    first = keeper.pending_drops("a")
    keeper.drop(Drop(AdapterRef(3), "a"))
    assert [ref.theta for _, ref in keeper.pending_drops("a")] == [0, 1, 2, 3]
    keeper.acknowledge("a", first)
    assert [ref.theta for _, ref in keeper.pending_drops("a")] == [3]
    # An answer that comes late says nothing about what was dropped since.
    keeper.acknowledge("a", first[:1])
    assert [ref.theta for _, ref in keeper.pending_drops("a")] == [3]


def test_every_worker_has_its_own_account() -> None:
    keeper = courier()
    keeper.drop(Drop(AdapterRef(0), "a"))
    assert keeper.pending_drops("b") == ()
    keeper.acknowledge("b", ())
    assert len(keeper.pending_drops("a")) == 1


def test_a_repeated_drop_does_not_take_what_came_after_it(replica: Replica) -> None:
    """An adapter is dropped, installed again, and then an older message repeats the drop."""
    adapter = replica.load(AdapterRef(0))[1]
    drops = ((1, AdapterRef(0)),)
    replica.drop(drops)
    assert not replica.holds(AdapterRef(0))
    replica.store(AdapterRef(0), None, adapter, adapter_hash(split_state(adapter)[0]))
    replica.drop(drops)
    assert replica.holds(AdapterRef(0))
    replica.drop((*drops, (2, AdapterRef(0))))
    assert not replica.holds(AdapterRef(0))


def test_messages_may_overtake_each_other(replica: Replica) -> None:
    adapter = replica.load(AdapterRef(0))[1]
    replica.store(AdapterRef(1), None, adapter, "")
    early, late = ((1, AdapterRef(0)),), ((1, AdapterRef(0)), (2, AdapterRef(1)))
    replica.drop(late)
    assert not replica.holds(AdapterRef(0)) and not replica.holds(AdapterRef(1))
    replica.store(AdapterRef(0), None, adapter, "")
    replica.drop(early)
    assert replica.holds(AdapterRef(0))


def test_a_unit_whose_result_was_dropped_is_done_again(replica: Replica) -> None:
    """The receipt goes with what it is about; a unit that is repeated without a drop is not executed twice."""
    batch = MicroBatchId("train", 1, 0)
    unit = RolloutUnit(batch, 0, CONFIG.algorithm.num_steps)
    prompts = load_prompts(CONFIG.data.prompts)[: CONFIG.micro_batch]
    run = Run(unit, "here", theta=0, priority=0)
    first = replica.run(Assignment("epoch", run, prompts))
    assert replica.run(Assignment("epoch", run, prompts)) is first
    again = replica.run(Assignment("epoch", run, prompts, drops=((1, TrajectoryRef(batch)),)))
    assert again is not first
    assert again.fingerprint == first.fingerprint
    replica.drop(((2, TrajectoryRef(batch)),))
    assert not replica.holds(TrajectoryRef(batch))
    assert not replica._receipts
