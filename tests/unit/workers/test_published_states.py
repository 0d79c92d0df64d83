"""What the driver keeps of the states it publishes, and what it publishes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from digenrl.config.load import load_config
from digenrl.policy import NumberedAdapter, adapter_hash
from digenrl.scheduling.messages import Publish
from workers.courier import Courier
from workers.listener import TrainerState
from workers.receipts import RunSetup


def state(theta: int, previous: NumberedAdapter | None = None) -> TrainerState:
    """2 optimiser steps make a version."""
    weights = {"w": torch.full((1,), float(theta))}
    return TrainerState(theta, weights, {"step": torch.tensor(theta)}, adapter_hash(weights), previous)


def courier(stale_fraction: float, start: TrainerState | None = None) -> Courier:
    """One that only keeps accounts: nothing is sent."""
    setup = RunSetup("epoch", load_config("tiny-smoke", [f"schedule.stale_fraction={stale_fraction}"]), 0)
    return Courier(None, None, setup, start=start, answer=lambda worker, event: None)  # type: ignore[arg-type]


def publish(post: Courier, version: int) -> TrainerState:
    post._states[2 * version] = state(2 * version)
    return post.publish(Publish(version, 2 * version, "w0"))


def test_without_stale_groups_one_version_is_published_and_two_are_kept() -> None:
    post = courier(0.0)
    for version in (1, 2, 3):
        assert publish(post, version).previous is None
    assert set(post._states) == {4, 6}


def test_with_stale_groups_the_version_before_is_published_along() -> None:
    post = courier(0.5)
    assert publish(post, 1).previous is None, "every worker makes theta 0 itself"
    for version in (2, 3, 4):
        before = publish(post, version).previous
        assert before is not None
        assert (before.theta, before.weights["w"].item()) == (2 * version - 2, 2 * version - 2)
    assert set(post._states) == {4, 6, 8}


def test_what_is_published_of_the_version_before_is_what_generated_its_samples() -> None:
    post = courier(0.5)
    for version in (1, 2):
        post._states[2 * version] = replace(state(2 * version), behaviour={"w": torch.full((1,), -1.0 * version)})
        published = post.publish(Publish(version, 2 * version, "w0"))
    assert published.previous is not None and published.previous.theta == 2
    assert published.previous.weights["w"].item() == -1


@pytest.mark.parametrize("version", [1, 2])
def test_a_resumed_run_begins_with_both(version: int) -> None:
    theta = 2 * version
    post = courier(0.5, state(theta, NumberedAdapter(theta - 2, state(theta - 2).adapter) if version > 1 else None))
    held = {theta: theta} | ({theta - 2: theta - 2} if version > 1 else {})
    assert {t: s.adapter["w"].item() for t, s in post._states.items()} == held
    assert post._hashes == {t: state(t).adapter_hash for t in held}
    before = publish(post, version + 1).previous
    assert before is not None and before.theta == theta
