"""The loop with the real tiny checkpoint and the real OCR reward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from digenrl.config.load import load_config
from digenrl.data.evaluate_tiny_sd3 import load
from digenrl.loop import LoopResult, train
from digenrl.models.checkpoint import locate
from digenrl.policy import adapter_hash
from digenrl.rewards.base import Scored

#: 2 iterations of 4 groups of 4 samples in 2 updates, 16 held-out prompts.
SMALL = ("evaluation.every=1",)


def _small(*overrides: str) -> LoopResult:
    return train(load_config("tiny-smoke", [*SMALL, *overrides]))


@pytest.fixture(scope="module")
def result() -> LoopResult:
    return _small()


def test_two_runs_are_bit_equal(result: LoopResult) -> None:
    again = _small()
    assert [i.hashes for i in again.iterations] == [i.hashes for i in result.iterations]
    assert len({h for i in result.iterations for h in i.hashes.values()}) == 8
    assert adapter_hash(again.adapter.weights) == adapter_hash(result.adapter.weights)
    assert adapter_hash(again.optimizer.exp_avg) == adapter_hash(result.optimizer.exp_avg)
    assert again.evaluations == result.evaluations


def test_another_seed_is_another_run(result: LoopResult) -> None:
    other = _small("seed=1", "iterations=1", "evaluation.every=0")
    assert not set(other.iterations[0].hashes.values()) & set(result.iterations[0].hashes.values())


def test_the_first_update_of_an_iteration_has_ratio_one_and_the_others_have_not(result: LoopResult) -> None:
    for iteration in result.iterations:
        first, second = (update.metrics for update in iteration.updates)
        assert first.pairs and first.ratio == first.pairs and first.ratio_max == 1 and first.clipped == 0
        assert second.pairs and second.ratio_max != 1 and second.approx_kl > 0
        assert max(first.logp_gap_max, second.logp_gap_max) < 1e-6


def test_what_a_run_leaves(result: LoopResult) -> None:
    assert [i.iteration for i in result.iterations] == [0, 1] and set(result.evaluations) == {0, 1, 2}
    assert [u.theta for i in result.iterations for u in i.updates] == [1, 2, 3, 4] and result.adapter.theta == 4
    assert result.optimizer.step == 4
    for iteration in result.iterations:
        assert len(iteration.scores) == 16 and all(isinstance(s, Scored) for s in iteration.scores.values())
        assert min(iteration.seconds.values()) > 0 and all(u.grad_norm > 0 for u in iteration.updates)
    assert all(len(scores) == 16 for scores in result.evaluations.values())
    assert any(bool(t.any()) for name, t in result.adapter.weights.items() if "lora_B" in name)


def test_timestep_batches_change_the_units_not_the_update(result: LoopResult) -> None:
    """Same samples bit for bit; the first gradient agrees to rounding."""
    single = _small("schedule.timestep_batch=1", "iterations=1", "evaluation.every=0")
    assert single.iterations[0].hashes == result.iterations[0].hashes
    ours, theirs = single.iterations[0].updates[0], result.iterations[0].updates[0]
    assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-6)
    assert ours.metrics.pairs == theirs.metrics.pairs


def test_an_update_that_nobody_takes_part_in_changes_nothing(result: LoopResult) -> None:
    """All groups count as equal: no advantage, no step, no decay, and nothing is wrong."""
    idle = _small("algorithm.zero_variance_tolerance=10", "gates.max_bad_updates=0", "evaluation.every=0")
    assert idle.adapter.theta == 4 and idle.optimizer.step == 0
    assert not any(bool(t.any()) for name, t in idle.adapter.weights.items() if "lora_B" in name)
    assert {u.metrics.pairs for i in idle.iterations for u in i.updates} == {0}
    assert idle.iterations[0].hashes == result.iterations[0].hashes


@pytest.mark.parametrize("scope", ["update", "iteration"])
def test_std_scopes_share_the_samples(result: LoopResult, scope: str) -> None:
    other = _small(f"algorithm.std_scope={scope}", "iterations=1", "evaluation.every=0")
    assert other.iterations[0].hashes == result.iterations[0].hashes
    assert other.iterations[0].updates[0].grad_norm != result.iterations[0].updates[0].grad_norm


@pytest.mark.parametrize("name", ["dance_grpo", "grpo_guard", "flow_dppo", "mix_grpo"])
def test_every_algorithm_trains(result: LoopResult, name: str) -> None:
    other = _small(f"algorithm.name={name}", "evaluation.every=0")
    assert other.optimizer.step == 4 and not any(u.skipped for i in other.iterations for u in i.updates)
    same_samples = other.iterations[0].hashes == result.iterations[0].hashes
    assert same_samples is (name not in ("dance_grpo", "mix_grpo"))  # which draw other steps
    for iteration in other.iterations:
        first, second = (update.metrics for update in iteration.updates)
        assert first.pairs and first.ratio == first.pairs and first.clipped == 0
        assert second.ratio_max != 1 and max(first.logp_gap_max, second.logp_gap_max) < 1e-6


def test_diffusion_nft_trains_on_what_its_behaviour_policy_generates(result: LoopResult) -> None:
    """The first iteration ends with d = 0.002, so that the second has samples of its own."""
    lagging, following = (_small("algorithm.name=diffusion_nft", f"algorithm.old_policy_decay={d}") for d in (1, 0))
    assert lagging.optimizer.step == 4 and not any(u.skipped for i in lagging.iterations for u in i.updates)
    assert lagging.iterations[0].hashes == following.iterations[0].hashes
    assert not set(lagging.iterations[1].hashes.values()) & set(following.iterations[1].hashes.values())
    assert (lagging.behaviour.tag, following.behaviour.tag) == ((4, "behaviour"), 4)
    # Evaluations are of the trained weights, which are the same after the first iteration, by the same Euler steps.
    assert lagging.evaluations[1] == following.evaluations[1] and lagging.evaluations[0] == result.evaluations[0]
    assert {u.metrics.pairs for i in lagging.iterations for u in i.updates} == {8 * 9}


def test_stale_groups_are_generated_by_the_weights_of_the_iteration_before(result: LoopResult) -> None:
    """Half of the groups of iteration 1, and their update: the first iteration knows nothing older."""
    stale = _small("schedule.stale_fraction=0.5")
    assert stale.iterations[0] == replace(result.iterations[0], seconds=stale.iterations[0].seconds)
    first, second = (update.metrics for update in stale.iterations[1].updates)
    assert (first.staleness, second.staleness) == ({0: 0, 1: 24}, {0: 24, 1: 0})
    assert first.ratio_max != 1 and first.logp_gap_max < 1e-6
    ours, theirs = (sorted(r.iterations[1].hashes.items()) for r in (stale, result))
    assert [a == b for a, b in zip(ours, theirs, strict=True)] == [False, False, True, True]
    assert stale.previous is not None and stale.previous.theta == 2


def test_nothing_stale_is_the_run_as_it_was(result: LoopResult) -> None:
    strict = _small("schedule.stale_fraction=0")
    assert adapter_hash(strict.adapter.weights) == adapter_hash(result.adapter.weights)
    assert [u.metrics.stale for i in strict.iterations for u in i.updates] == [0] * 4


def test_streaming_is_the_same_step_up_to_rounding() -> None:
    """Several micro-batches per group, KL on, the second iteration with a baseline."""
    overrides = ("schedule.micro_batch=1", "algorithm.kl_beta=0.04", "evaluation.every=0")
    streamed, grouped = (_small(*overrides, f"schedule.advantage={a}") for a in ("streaming", "group"))
    ours, theirs = streamed.iterations[0], grouped.iterations[0]
    assert ours.hashes == theirs.hashes and ours.scores == theirs.scores
    first, wanted = ours.updates[0], theirs.updates[0]
    assert first.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-6)
    assert first.metrics.pairs == wanted.metrics.pairs and first.metrics.kl == pytest.approx(wanted.metrics.kl)
    assert first.metrics.loss == pytest.approx(wanted.metrics.loss, abs=1e-4)
    assert streamed.adapter.theta == 4 and streamed.optimizer.step == 4
    assert adapter_hash(streamed.adapter.weights) != adapter_hash(grouped.adapter.weights)


def test_streaming_with_nobody_taking_part_changes_nothing() -> None:
    overrides = ("schedule.advantage=streaming", "schedule.micro_batch=2", "algorithm.zero_variance_tolerance=10")
    idle = _small(*overrides, "iterations=1", "gates.max_bad_updates=0", "evaluation.every=0")
    assert idle.optimizer.step == 0 and {u.metrics.pairs for u in idle.iterations[0].updates} == {0}


def test_callback_sees_every_version() -> None:
    seen: list[tuple[int, int]] = []
    train(
        load_config("tiny-smoke", ["iterations=1", "evaluation.prompts=2"]),
        on_iteration=lambda result: seen.append((len(result.iterations), len(result.evaluations))),
    )
    assert seen == [(0, 1), (1, 2)]


def _pipeline_with_nan_decoder(directory: Path) -> None:
    pipeline: StableDiffusion3Pipeline = load(locate("package:tiny-sd3"))
    with torch.no_grad():
        pipeline.vae.decoder.conv_out.bias[0] = float("nan")
    pipeline.save_pretrained(directory)


def test_too_many_failed_samples_stop_the_run(tmp_path: Path) -> None:
    _pipeline_with_nan_decoder(tmp_path / "nan")
    with pytest.raises(RuntimeError, match=r"iteration 0: 16 of 16 samples have no reward.*non-finite image"):
        _small(f"model.path={tmp_path / 'nan'}", "evaluation.every=0")


def test_too_many_skipped_updates_stop_the_run() -> None:
    """A learning rate that throws the weights out of range: the second update's loss is not finite."""
    overrides = ("optimizer.learning_rate=1e30", "optimizer.warmup_iterations=0", "evaluation.every=0")
    skipping = _small(*overrides, "iterations=1", "gates.max_bad_updates=1")
    first, second = skipping.iterations[0].updates
    assert first.skipped is None and second.skipped is not None and "not finite" in second.skipped
    assert skipping.optimizer.step == 1
    with pytest.raises(RuntimeError, match=r"1 updates were skipped, more than gates.max_bad_updates=0.*theta 2"):
        _small(*overrides, "gates.max_bad_updates=0")
