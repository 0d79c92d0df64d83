"""A2. Symptom: trainers rebuilt the sigma table, with one value more or another shift than the rollout's.

Rule: a trajectory carries its table and nobody rebuilds it. A table of another length than the run trains on is an
error naming both, before any gradient; a micro-batch with several tables is refused with the samples that differ.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.identity import MicroBatchId
from digenrl.models.embeddings import EmbeddingCache
from digenrl.models.registry import load_model
from digenrl.policy import NumberedAdapter, Policy
from digenrl.rollout import advance, finish, start_rollout
from digenrl.training import train_unit
from digenrl.trajectory import Trajectory
from runs import small

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
