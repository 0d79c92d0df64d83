"""A11. Symptom: a "random" rollout of a prompt that was seen before came from a cache, of the runner or of Dask.

Rule: a prompt drawn twice gives two different samples; one identity gives one sample, whoever computes it, and a unit
that is sent twice is executed once.
"""

from __future__ import annotations

import pytest
import torch

from digenrl import runspec
from digenrl.identity import MicroBatchId
from digenrl.rewards.base import PromptRecord
from digenrl.scheduling.messages import Run, TrajectoryRef
from digenrl.scheduling.units import RolloutUnit
from runs import small
from workers.receipts import Assignment, Receipt, RunSetup
from workers.replica import Replica

CONFIG = small("iterations=2", "schedule.observe.every=0")
PROMPT = PromptRecord("n042", "042", {"target": "042"})


@pytest.fixture(scope="module")
def replicas() -> tuple[Replica, Replica]:
    torch.set_num_threads(1)
    made = tuple(Replica(RunSetup("epoch", CONFIG, 0), incarnation) for incarnation in ("one", "other"))
    for replica in made:
        replica.initialise()
    return made


def roll_out(replica: Replica, group: int, iteration: int = 1) -> Receipt:
    """Group `group` of an iteration, always of the same prompt and under theta 0."""
    micro_batch = MicroBatchId("train", iteration, group)
    unit = RolloutUnit(micro_batch, 0, CONFIG.algorithm.num_steps)
    run = Run(unit, replica.incarnation, theta=0, priority=0)
    return replica.run(Assignment("epoch", run, (PROMPT,) * CONFIG.micro_batch))


def test_one_prompt_twice_is_two_groups_of_different_samples(replicas: tuple[Replica, Replica]) -> None:
    one, _ = replicas
    assert roll_out(one, 0).fingerprint != roll_out(one, 1).fingerprint
    first, second = (one.load(TrajectoryRef(MicroBatchId("train", 1, group)))[1] for group in (0, 1))
    latents = torch.cat([first["latents"][0], second["latents"][0]])
    assert len({tuple(sample.flatten().tolist()) for sample in latents}) == 2 * CONFIG.micro_batch


def test_one_identity_is_one_sample_and_one_execution(replicas: tuple[Replica, Replica]) -> None:
    one, other = replicas
    receipt = roll_out(one, 2)
    assert roll_out(one, 2) is receipt
    assert roll_out(other, 2).fingerprint == receipt.fingerprint
    assert runspec.shape(CONFIG, 0).samples(MicroBatchId("train", 1, 2))[0].iteration == 1
