"""Every algorithm, orchestrated, is the plain loop bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runs import Ground, assert_as_expected, small

TWO_REWARDS = "rewards=[{name: ocr}, {name: jpeg_compressibility, weight: 0.01}]"
#: The second iteration trains other steps than the first.
MOVING_WINDOW = ("algorithm.window.size=2", "algorithm.window.iterations=1", "schedule.timestep_batch=1")


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("algorithm.sde_window_size=0",), id="all-steps"),
        pytest.param(("algorithm.sampler=cps",), id="cps"),
        pytest.param(("algorithm.sampler=wan_sde", "algorithm.noise_level=1"), id="wan_sde"),
        pytest.param(("algorithm.kl_beta=0.04", "algorithm.kl_convention=transition"), id="transition-kl"),
        pytest.param(("algorithm.name=dance_grpo",), id="dance_grpo"),
        pytest.param(("algorithm.name=dance_grpo", "algorithm.sigma_shift=3"), id="dance_grpo-own-schedule"),
        pytest.param(("algorithm.name=grpo_guard", "schedule.timestep_batch=2"), id="grpo_guard"),
        pytest.param(("algorithm.name=flow_dppo",), id="flow_dppo"),
        pytest.param(("algorithm.name=mix_grpo", *MOVING_WINDOW), id="mix_grpo"),
        pytest.param(("algorithm.std_scope=none", "algorithm.trimmed_ratio=0.25"), id="centred-trimmed"),
        pytest.param(("algorithm.best_of_n=2",), id="best-of-n"),
        pytest.param(("algorithm.reward_aggregation=advantages", TWO_REWARDS), id="weighted-advantages"),
    ],
)
def test_equals_the_plain_loop(ground: Ground, overrides: tuple[str, ...]) -> None:
    config = small("iterations=2", "schedule.micro_batch=2", *overrides)
    outcome = ground.run(config)
    assert outcome.versions[0][1] != outcome.adapter
    assert all(report.trained for report in outcome.reports)
    assert_as_expected(outcome, config)


def test_samples_that_are_neither_best_nor_worst_are_excluded_by_name(ground: Ground) -> None:
    """Two of the four of every group that says anything."""
    outcome = ground.run(small("iterations=1", "algorithm.best_of_n=2"))
    (report,) = outcome.reports
    assert report.excluded["not among the best and worst"] == report.trained > 0
