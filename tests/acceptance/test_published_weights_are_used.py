"""A7. Symptom: for months rollouts ran on the weights of the start, because publishing silently bound nothing.

Rule: what a worker holds as version v has the hash that was published; the same noise gives other pictures after
version 1. What arrives with another hash, without tensors or with other names is refused, loudly.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from digenrl.config.errors import ConfigError
from digenrl.policy import adapter_hash
from digenrl.scheduling.messages import AdapterRef
from digenrl.scheduling.units import ScoreUnit
from faults import Faults, installed
from runs import Ground, OnUnit, Outcome, assert_as_expected, small
from workers import process
from workers.courier import RunFailed
from workers.held import join_state
from workers.receipts import RunSetup
from workers.replica import Replica

WORKERS = 3


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(WORKERS)
    yield found
    found.close()


def _held() -> dict[int, str]:
    """Hash of every adapter this process holds, by theta."""
    from digenrl.policy import adapter_hash

    return {theta: adapter_hash(a) for r in process._REPLICAS.values() for theta, a in r._weights._adapters.items()}


def test_every_worker_holds_what_was_published(ground: Ground) -> None:
    config = small(f"cluster.workers={WORKERS}", "iterations=2", "schedule.layout=colocated", "evaluation.every=1")
    found: list[asyncio.Future[Any]] = []

    def look(_: object) -> None:
        found.append(asyncio.ensure_future(ground.client.run(_held)))

    last = OnUnit(
        lambda u: isinstance(u, ScoreUnit) and u.micro_batch.phase == "eval" and u.micro_batch.iteration == 2, look
    )
    outcome = ground.run(config, last)
    published = dict(outcome.versions)
    (held,) = (future.result() for future in found)
    assert len(held) == WORKERS
    holders = [thetas[4] for thetas in held.values() if 4 in thetas]
    assert len(holders) >= 2
    assert set(holders) == {published[2]}
    # The canary: fixed noise and prompts.
    first, second, third = (outcome.pictures[version] for version in range(3))
    assert all(first[i] != second[i] and second[i] != third[i] for i in range(6))
    # Every worker has trained and drawn; what they drew is what one process alone draws.
    assert_as_expected(outcome, config)


def test_rollouts_that_go_on_with_old_weights_end_the_run(ground: Ground) -> None:
    """What the symptom looks like with every hash right: installed, but not what is computed with."""
    outcome = Outcome()
    config = small(f"cluster.workers={WORKERS}", "evaluation.every=0", "optimizer.warmup_iterations=0")
    with installed(ground, Faults(stuck=True)), pytest.raises(RunFailed) as failed:
        ground.do(ground.drive, config, outcome)
    assert re.search(
        r"log-probs of train i1 .* on worker \d differ by up to .*: rollout and training", str(failed.value)
    )
    assert [version for version, _ in outcome.versions] == [1], "the first iteration is as it should be"


def test_weights_that_change_on_the_way_are_refused(ground: Ground) -> None:
    outcome = Outcome()
    with (
        installed(ground, Faults(tamper=True)),
        pytest.raises(RunFailed, match=r"theta \d arrived with hash .*: not installed"),
    ):
        ground.do(ground.drive, small(f"cluster.workers={WORKERS}", "cluster.trainers=2"), outcome)
    assert not outcome.versions


@pytest.fixture(scope="module")
def replica() -> Replica:
    torch.set_num_threads(1)
    return Replica(RunSetup("epoch", small(), 0), "here")


def test_a_renamed_tensor_is_refused(replica: Replica) -> None:
    adapter = replica.policy.initial_adapter()
    adapter["renamed"] = adapter.pop(next(iter(adapter)))
    with pytest.raises(ValueError, match=r"names are in one of them only, the first is"):
        replica.store(AdapterRef(1), None, join_state(adapter, None), "")


def test_no_tensors_at_all_are_refused(replica: Replica) -> None:
    with pytest.raises(ValueError, match="has 0 tensors where this policy has"):
        replica.store(AdapterRef(1), None, {}, "")


def test_zeros_in_place_of_what_was_published_are_refused(replica: Replica) -> None:
    adapter = replica.policy.initial_adapter()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in adapter.items()}
    with pytest.raises(ValueError, match=r"theta 1 arrived with hash .*: not installed"):
        replica.store(AdapterRef(1), None, join_state(zeros, None), adapter_hash(adapter))
    assert not replica.holds(AdapterRef(1))


def test_an_adapter_that_binds_nothing_is_refused() -> None:
    config = small()
    config = config.model_copy(update={"lora": config.lora.model_copy(update={"targets": ()})})
    with pytest.raises(ConfigError, match=r"lora.targets=\[\] binds no layer"):
        Replica(RunSetup("epoch", config, 0), "here")


def test_a_renamed_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'to_qq' matches no linear layer .* did you mean"):
        Replica(RunSetup("epoch", small("lora.targets=[to_qq]"), 0), "here")
