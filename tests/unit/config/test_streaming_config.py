"""advantage: streaming, and with what it is refused."""

from __future__ import annotations

import math

import pytest

from digenrl import runspec
from digenrl.algorithms.advantages import AdvantageRule, GroupStatistics, group_advantages
from digenrl.config import RunConfig
from digenrl.config.load import ConfigError, load_config, warnings_of
from digenrl.rewards.base import Scored

STREAMING = "schedule.advantage=streaming"


def _config(*overrides: str) -> RunConfig:
    return load_config("tiny-ocr", overrides)


def test_auto_waits_for_the_group() -> None:
    assert _config().schedule.advantage == "auto" and not _config().schedule.streams
    assert not _config("schedule.advantage=group").schedule.streams
    assert _config(STREAMING).schedule.streams


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["algorithm.std_scope=update"],
            "schedule.advantage=streaming cannot be combined with algorithm.std_scope=update: only a group's own "
            "standard deviation keeps advantages within adv_clip_max; use std_scope=group, or advantage=group",
        ),
        (["algorithm.std_scope=iteration"], "cannot be combined with algorithm.std_scope=iteration"),
        (
            ["algorithm.samples_per_prompt=27"],
            "schedule.advantage=streaming needs advantages that algorithm.adv_clip_max=5 never clips, but one sample "
            "of algorithm.samples_per_prompt=27 can be further from the mean; use at most 26 samples, a larger "
            "adv_clip_max, or advantage=group",
        ),
        (["algorithm.adv_clip_max=3.8"], "use at most 15 samples"),
        (["algorithm.adv_clip_max=0.5"], "can be further from the mean; use a larger adv_clip_max, or advantage=group"),
        (
            ["algorithm.std_scope=none"],
            "schedule.advantage=streaming needs advantages that algorithm.adv_clip_max=5 never clips, but with "
            "algorithm.std_scope=none they may be of any size; use adv_clip_max=null, or advantage=group",
        ),
        (["algorithm.trimmed_ratio=0.25"], "with algorithm.trimmed_ratio=0.25 they may be of any size"),
        (
            ["algorithm.best_of_n=8"],
            "schedule.advantage=streaming cannot be combined with algorithm.best_of_n=8: which samples take part is "
            "known only when their group is complete; use best_of_n=null, or advantage=group",
        ),
        (
            ["algorithm.reward_aggregation=advantages"],
            "cannot be combined with algorithm.reward_aggregation=advantages: each reward has a mean",
        ),
        (
            ["rewards=[{name: ocr, normalise: rank}]"],
            "cannot be combined with rewards.0.normalise=rank: what a reward counts is known only when its group is "
            "complete; use normalise=none, or advantage=group",
        ),
        (["rewards=[{name: ocr, normalise: std}]"], "cannot be combined with rewards.0.normalise=std"),
        (
            ["algorithm.name=flow_dppo", "algorithm.std_scope=update"],
            "cannot be combined with algorithm.std_scope=update",
        ),
        (
            ["algorithm.name=diffusion_nft", "algorithm.adv_mode=binary"],
            "cannot be combined with algorithm.adv_mode=binary, which makes of an advantage something else than a "
            "multiple of it; use adv_mode=all, or advantage=group",
        ),
        (
            ["algorithm.name=diffusion_nft", "algorithm.std_scope=none"],
            "with algorithm.std_scope=none they may be of any size; use std_scope=group, or advantage=group",
        ),
        (
            ["schedule.stale_fraction=0.25"],
            "schedule.advantage=streaming has nothing to act on: schedule.stale_fraction=0.25 makes all 2 groups of "
            "the first update stale, and only fresh ones can be streamed",
        ),
        (["schedule.max_open_groups=0"], "schedule.max_open_groups must be an integer >= 1, got 0"),
    ],
)
def test_refused_with_a_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(STREAMING, *overrides)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.samples_per_prompt=26"],
        ["algorithm.samples_per_prompt=27", "algorithm.adv_clip_max=5.1"],
        ["schedule.stale_fraction=0.125"],
        ["schedule.layout=colocated"],
        ["algorithm.kl_beta=0.1"],
        ["algorithm.std_scope=none", "algorithm.adv_clip_max=null"],
        ["algorithm.trimmed_ratio=0.25", "algorithm.adv_clip_max=null"],
        ["algorithm.name=flow_dppo", "algorithm.samples_per_prompt=64", "algorithm.adv_clip_max=null"],
        ["algorithm.name=dance_grpo"],
        ["algorithm.name=grpo_guard"],
        ["algorithm.name=mix_grpo", "algorithm.reward_aggregation=rewards"],
        ["algorithm.name=diffusion_nft"],
    ],
)
def test_allowed(overrides: list[str]) -> None:
    assert _config(STREAMING, *overrides).schedule.streams


@pytest.mark.parametrize("clip", [1.0, 1.5, math.sqrt(24), 4.9, 5.0, 10.0])
@pytest.mark.parametrize("ddof", [0, 1])
def test_bound_of_the_group_size_is_sharp(clip: float, ddof: int) -> None:
    """One success in a group is the extreme case."""

    def largest(size: int) -> float:
        rewards = {i: float(i == 0) for i in range(size)}
        found = group_advantages([rewards], AdvantageRule(ddof=ddof, eps=1e-12, adv_clip_max=None))
        return max(abs(a) for a in found.values.values())

    most = max(size for size in range(2, 110) if largest(size) <= clip)
    base = [STREAMING, f"algorithm.adv_clip_max={clip}", f"algorithm.std_ddof={ddof}"]
    assert _config(*base, f"algorithm.samples_per_prompt={most}").schedule.streams
    with pytest.raises(ConfigError, match=f"use at most {most} samples"):
        _config(*base, f"algorithm.samples_per_prompt={most + 1}")


def test_whole_groups_as_micro_batches_leave_nothing_to_stream() -> None:
    (warning,) = warnings_of(_config(STREAMING))
    assert warning.startswith("schedule.advantage=streaming has no effect: with schedule.micro_batch=16")
    assert not warnings_of(_config(STREAMING, "schedule.micro_batch=4"))


@pytest.mark.parametrize("kl_beta", [0.0, 0.1])
def test_advantage_rule_tells_the_statistics_of_every_group(kl_beta: float) -> None:
    groups = [{0: Scored(0.0), 1: Scored(1.0)}, {2: Scored(0.5), 3: Scored(0.5)}, {}]
    verdict = runspec.advantage_rule(_config(f"algorithm.kl_beta={kl_beta}"))(groups)  # type: ignore[arg-type]
    assert list(verdict.statistics) == [GroupStatistics(0.5, 0.5 + 1e-4), None, None]
    assert set(verdict.advantages) == ({0, 1, 2, 3} if kl_beta else {0, 1})


def test_without_likelihoods_equal_groups_take_part() -> None:
    """They are neither good nor bad, and hold the others back."""
    groups = [{0: Scored(0.0), 1: Scored(1.0)}, {2: Scored(0.5), 3: Scored(0.5)}]
    verdict = runspec.advantage_rule(_config("algorithm.name=diffusion_nft"))(groups)  # type: ignore[arg-type]
    assert verdict.advantages[2] == verdict.advantages[3] == 0 and not verdict.excluded
