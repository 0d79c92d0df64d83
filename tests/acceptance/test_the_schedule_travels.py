"""A2. Symptom: trainers rebuilt the sigma table, with one value more or another shift than the rollout's.

Rule: a trajectory carries its table and nobody rebuilds it. A table of another length than the run trains on is an
error naming both, before any gradient; a micro-batch with several tables is refused with the samples that differ. A
table of the same length with other values, and steps of another window, are refused where a trajectory is received.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.gates import ScheduleGate
from digenrl.identity import MicroBatchId
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.registry import load_model
from digenrl.policy import NumberedAdapter, Policy
from digenrl.rewards.base import PromptRecord
from digenrl.rollout import advance, finish, start_rollout
from digenrl.scheduling.messages import Run
from digenrl.training import train_unit
from digenrl.trajectory import Trajectory
from runs import small
from workers.receipts import Assignment, RunSetup
from workers.replica import Replica

FOURTEEN, FIFTEEN = small("algorithm.num_steps=13"), small("algorithm.num_steps=14")


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.set_num_threads(1)
    found = Policy(load_model(FOURTEEN.model), FOURTEEN.lora, seed=0)
    found.bind(found.initial_adapter(), 0)
    return found


@pytest.fixture(scope="module")
def trajectory(policy: Policy) -> Trajectory:
    shape = runspec.shape(FOURTEEN, 0)
    spec = runspec.rollout_spec(FOURTEEN, shape, policy.model, MicroBatchId("train", 0, 0), 0)
    embeddings = EmbeddingCache(policy.model).encode(["042"] * len(spec.samples))
    state = advance(policy, spec, start_rollout(policy, spec), embeddings, 0, spec.num_steps)
    return finish(policy, spec, state)[0]


def train(policy: Policy, trajectory: Trajectory, config: RunConfig) -> int:
    start = NumberedAdapter(0, policy.initial_adapter())
    return train_unit(
        policy,
        trajectory,
        EmbeddingCache(policy.model).encode(["042"] * len(trajectory.samples)),
        trajectory.steps,
        dict.fromkeys(trajectory.samples, 1.0),
        current=start,
        old=start,
        algorithm=config.algorithm,
        guidance_scale=config.model.guidance_scale,
        normaliser=runspec.normaliser(config),
    ).metrics.pairs


def test_the_right_schedule_is_trained_on(policy: Policy, trajectory: Trajectory) -> None:
    assert train(policy, trajectory, FOURTEEN) == len(trajectory.samples) * len(trajectory.steps)


def test_another_length_is_refused_with_both(policy: Policy, trajectory: Trajectory) -> None:
    with pytest.raises(ValueError, match=r"i0 m0 was generated along 14 sigmas, this run trains on 15"):
        train(policy, trajectory, FIFTEEN)


def test_two_schedules_in_one_batch_are_refused_with_the_samples(policy: Policy, trajectory: Trajectory) -> None:
    tables = trajectory.sigmas.repeat(len(trajectory.samples), 1)
    tables[2, 3] += 0.01
    with pytest.raises(ValueError, match=r"4 sigma tables.*SampleId\(.*generation=2") as caught:
        train(policy, replace(trajectory, sigmas=tables), FOURTEEN)
    assert "generation=1" not in str(caught.value)


def test_another_table_of_the_same_length_is_refused_with_both_hashes(policy: Policy, trajectory: Trajectory) -> None:
    gate = ScheduleGate(FOURTEEN, runspec.shape(FOURTEEN, 0), policy.model)
    gate.check(trajectory)
    shifted = trajectory.sigmas.clone()
    shifted[4] += 1e-6
    with pytest.raises(ValueError, match=r"i0 m0 was generated along a sigma table with hash \w{12}, that of this run"):
        gate.check(replace(trajectory, sigmas=shifted))


def test_another_window_is_refused_with_both(policy: Policy, trajectory: Trajectory) -> None:
    gate = ScheduleGate(FOURTEEN, runspec.shape(FOURTEEN, 0), policy.model)
    moved = tuple(step + 1 for step in trajectory.steps)
    with pytest.raises(ValueError, match=rf"drawn at the steps \({moved[0]}, .*\), this run trains \({moved[0] - 1}, "):
        gate.check(replace(trajectory, steps=moved))


def test_a_run_whose_rollouts_follow_another_schedule_ends() -> None:
    torch.set_num_threads(1)
    config = small("iterations=1", "evaluation.every=0")
    replica = Replica(RunSetup("epoch", config, 0), "here")
    replica.initialise()
    prompts = (PromptRecord("a", "042", {"target": "042"}),) * config.micro_batch
    micro_batch = MicroBatchId("train", 0, 0)
    for unit in replica.shape.rollout_units(micro_batch):
        replica.run(Assignment("epoch", Run(unit, "here", theta=0, priority=0), prompts))
    done = replica._finished[micro_batch]
    table = done.trajectory.sigmas * 0.999
    replica._finished[micro_batch] = replace(done, trajectory=replace(done.trajectory, sigmas=table))
    unit = replica.shape.train_units(micro_batch)[0]
    with pytest.raises(ValueError, match="sigma table with hash"):
        replica.run(Assignment("epoch", Run(unit, "here", theta=0, priority=0, old_theta=0), prompts))
