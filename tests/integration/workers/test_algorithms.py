"""Every algorithm, orchestrated, is the plain loop bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from digenrl.policy import adapter_hash
from runs import Ground, assert_as_expected, expected, small

#: Steps that show in the pictures, and a reward that sees it.
BOLD = ("optimizer.learning_rate=0.03", "rewards=[{name: jpeg_compressibility}]", "evaluation.every=1")
AVERAGED = ("optimizer.ema_decay=0.9", "optimizer.ema_every=3")
TWO_REWARDS = "rewards=[{name: ocr}, {name: jpeg_compressibility, weight: 0.01}]"


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


def test_evaluations_use_the_moving_average_wherever_they_run(ground: Ground) -> None:
    """The same samples and weights as without one, other held-out scores; a continued run goes on with it."""
    averaged, plain = (small("iterations=2", *BOLD, *o) for o in (AVERAGED, ()))
    outcome = ground.run(averaged)
    assert_as_expected(outcome, averaged)
    without = expected(plain)
    assert outcome.adapter == without.adapter and outcome.fingerprints == without.fingerprints
    # The average moves at the third of four steps.
    assert outcome.evaluations[0] == outcome.evaluations[1] == without.evaluations[0] != without.evaluations[1]
    assert outcome.evaluations[2] not in (without.evaluations[0], without.evaluations[2])
    continued = ground.run(averaged, start=outcome.states[0])
    assert continued.adapter == outcome.adapter
    assert continued.evaluations[2] == outcome.evaluations[2]
    optimizers = (run.state.optimizer for run in (outcome, continued) if run.state)
    assert len({adapter_hash(state) for state in optimizers}) == 1


def test_samples_that_are_neither_best_nor_worst_are_excluded_by_name(ground: Ground) -> None:
    """Two of the four of every group that says anything."""
    outcome = ground.run(small("iterations=1", "algorithm.best_of_n=2"))
    (report,) = outcome.reports
    assert report.excluded["not among the best and worst"] == report.trained > 0
