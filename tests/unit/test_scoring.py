"""A failed image is a missing reward, and the group is trained on the others."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from digenrl.config import DataConfig, RewardConfig, RunConfig
from digenrl.identity import SampleId
from digenrl.rewards.base import Failed, PromptRecord, Scored
from digenrl.rewards.mix import RewardMix
from digenrl.rollout import advance, finish, start_rollout
from digenrl.runspec import advantages_of, group_scores
from digenrl.scoring import mean_reward, score_micro_batch
from digenrl.training import train_unit
from tiny_policy import algorithm, embeddings_for, moved, rollout_spec, tiny_policy


def _config(**changes: object) -> RunConfig:
    return RunConfig(
        data=DataConfig(prompts="package:numbers-train"),
        rewards=(RewardConfig(name="jpeg_compressibility"),),
        algorithm=algorithm(**changes),
        schedule={"micro_batch": 4, "layout": "colocated"},
    )


def test_a_nan_latent_fails_its_sample_and_the_group_trains_on_the_rest() -> None:
    policy = tiny_policy()
    adapter = moved(policy, 1)
    policy.bind(adapter.weights, adapter.theta)
    spec = rollout_spec(policy, size=8)
    state = start_rollout(policy, spec)
    state.latents[5, 0, 0, 0] = float("nan")
    embeddings = embeddings_for(policy, spec)
    trajectory, images = finish(policy, spec, advance(policy, spec, state, embeddings, 0, 6))
    reward = RewardMix.of([RewardConfig(name="jpeg_compressibility")])
    scores = score_micro_batch(reward, trajectory, images, [PromptRecord("a", "042")] * 8)
    assert scores[spec.samples[5]] == Failed("non-finite image")
    assert sum(isinstance(score, Scored) for score in scores.values()) == 7

    advantages = advantages_of(_config(), group_scores(0, [0], scores)).values
    assert set(advantages) == set(spec.samples) - {spec.samples[5]}
    assert sum(advantages.values()) == pytest.approx(0, abs=1e-6)
    contribution = train_unit(
        policy,
        trajectory,
        embeddings,
        (0, 1, 2),
        advantages,
        current=adapter,
        old=adapter,
        algorithm=algorithm(),
        guidance_scale=1.0,
        normaliser=24,
    )
    assert contribution.metrics.pairs == 21
    assert all(bool(t.isfinite().all()) for t in contribution.gradient.values())

    nobody = replace(trajectory, finite=torch.zeros(8, dtype=torch.bool))
    failed = score_micro_batch(reward, nobody, np.zeros_like(images), [PromptRecord("a", "042")] * 8)
    assert set(failed.values()) == {Failed("non-finite image")} and math.isnan(mean_reward(failed))


def test_groups_of_zero_variance_take_part_only_for_their_kl() -> None:
    samples = [[SampleId(0, 2, group, i) for i in range(3)] for group in range(2)]
    scores = {s: Scored(float(s.generation)) for s in samples[0]} | {s: Scored(0.5) for s in samples[1]}
    scores[samples[0][2]] = Failed("no answer")
    rewards = group_scores(2, range(2), scores)
    assert [len(group) for group in rewards] == [2, 3] and group_scores(1, range(2), scores) == [{}, {}]
    without = advantages_of(_config(), rewards)
    assert set(without.values) == set(samples[0][:2]) and without.zero_variance == {1}
    with_kl = advantages_of(_config(kl_beta=0.1), rewards).values
    assert all(with_kl[s] == 0.0 for s in samples[1]) and len(with_kl) == 5
