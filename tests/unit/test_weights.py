"""Which of the weights a run has saved are evaluated and drawn from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from digenrl.algorithms.optimizer import OptimizerState
from digenrl.config.load import load_config
from flows.weights import newest_weights
from storage import checkpoints
from storage.runs import RunDirectory


@pytest.mark.parametrize("averaged", [False, True])
def test_the_moving_average_if_the_run_keeps_one(tmp_path: Path, averaged: bool) -> None:
    directory = RunDirectory(tmp_path / "run")
    start = {"w": torch.zeros(2)}
    optimizer = OptimizerState.initial(start, averaged=averaged).to_tensors()
    checkpoints.save(directory.checkpoints, 3, {"adapter": {"w": torch.ones(2)}, "optimizer": optimizer}, {})
    found = newest_weights(directory, load_config("tiny-smoke"))
    assert found.iterations == 3
    assert found.adapter["w"].tolist() == ([0.0, 0.0] if averaged else [1.0, 1.0])
