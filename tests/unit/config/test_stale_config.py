"""stale_fraction: what it means, and with what it is refused."""

from __future__ import annotations

import pytest

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.load import ConfigError, load_config, warnings_of


def _config(*overrides: str) -> RunConfig:
    return load_config("tiny-ocr", overrides)


@pytest.mark.parametrize(
    ("fraction", "groups", "stale"),
    [(0, 8, 0), (0.5, 8, 4), (0.99, 8, 7), (1, 8, 8), (0.29, 100, 29), (0.7, 10, 7), (0.125, 8, 1), (0.334, 3, 1)],
)
def test_fraction_is_rounded_down_to_whole_groups(fraction: float, groups: int, stale: int) -> None:
    config = _config(
        f"schedule.stale_fraction={fraction}",
        f"algorithm.prompts_per_iteration={groups}",
        "algorithm.updates_per_iteration=1",
    )
    shape = runspec.shape(config, 0)
    assert shape.stale_groups == stale
    assert [m for m in shape.micro_batches(0) if shape.staleness(m)] == []
    assert sum(shape.staleness(m) for m in shape.micro_batches(7)) == stale * shape.micro_batches_per_group


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["schedule.stale_fraction=0.5", "schedule.layout=colocated"],
            "stale_fraction=0.5 gains nothing with layout=colocated, where nobody generates while the others train",
        ),
        (
            ["schedule.stale_fraction=0.5", "schedule.layout=genrl", "schedule.timestep_batch=1"],
            "stale_fraction=0.5 gains nothing",
        ),
        (
            ["schedule.stale_fraction=0.1"],
            "schedule.stale_fraction=0.1 is less than one of algorithm.prompts_per_iteration=8 groups; "
            "use at least 0.125, or 0 for none",
        ),
        (["schedule.stale_fraction=1.5"], "schedule.stale_fraction must be a number >= 0 and <= 1, got 1.5"),
    ],
)
def test_refused_with_a_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(*overrides)
    assert sentence in str(caught.value)


def test_a_stale_sample_lets_the_clip_act_in_the_only_update() -> None:
    one = "algorithm.updates_per_iteration=1"
    assert len(warnings_of(_config(one))) == 1
    assert not warnings_of(_config(one, "schedule.stale_fraction=0.5"))
