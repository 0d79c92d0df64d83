"""The moving average equals the published one."""

import pytest
import torch
from golden_cases import Case, assert_close, golden

from digenrl.algorithms.ema import ema_decay, ema_update


@golden("ema_flowgrpo")
def test_ema_equals_the_published_one(case: Case) -> None:
    p = case.parameters
    average = {"w": case["in_params"][0]}
    for call in range(p["steps"]):
        step = p["start_step"] + call
        weights = {"w": case["in_params"][call + 1]}
        average = ema_update(average, weights, step, decay=p["decay"], interval=p["update_step_interval"])
        assert_close(average["w"], case["out_ema"][call])
        assert ema_decay(step, p["decay"]) == pytest.approx(float(case["out_decay"][call]), rel=1e-12)


def test_nothing_is_changed_in_place() -> None:
    average, weights = {"w": torch.zeros(2)}, {"w": torch.ones(2, requires_grad=True)}
    moved = ema_update(average, weights, 7)
    assert not average["w"].any()
    assert bool((moved["w"] > 0).all()) and not moved["w"].requires_grad


def test_different_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'w', 'x'"):
        ema_update({"w": torch.zeros(1)}, {"x": torch.zeros(1)}, 0)
