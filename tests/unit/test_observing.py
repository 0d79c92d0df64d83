"""How much of a run `observe.detail: auto` shows in Prefect."""

from __future__ import annotations

import time

import pytest

from digenrl import runspec
from digenrl.config.load import load_config
from tasks.observers import BUDGET, Observers

RUN_S = 100.0


@pytest.mark.parametrize(("share", "detail"), [(BUDGET / 2, "microbatch"), (2 * BUDGET, "iteration")])
def test_auto_shows_less_once_the_runs_budget_is_spent(share: float, detail: str) -> None:
    config = load_config("tiny-smoke")
    observers = Observers(config.schedule.observe, runspec.shape(config, 0))
    observers._started = time.monotonic() - RUN_S
    observers._cost_s = share * RUN_S
    observers.emitted = 100_000  # so that one more task run costs next to nothing
    observers._iteration_s = 1.0
    assert observers._detail(0) == "unit"
    assert observers._detail(1) == detail


def test_auto_shows_no_micro_batches_that_cost_more_than_their_iteration_allows() -> None:
    config = load_config("tiny-smoke")
    observers = Observers(config.schedule.observe, runspec.shape(config, 0))
    observers._started = time.monotonic() - RUN_S
    observers._cost_s, observers.emitted = 0.01 * RUN_S, 10
    observers._iteration_s = 1.0
    assert observers._detail(1) == "iteration"
