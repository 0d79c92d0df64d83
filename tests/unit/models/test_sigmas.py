"""The sigma table equals what each family's diffusers pipeline denoises along."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from digenrl.models.sigmas import sigma_table

CASES = sorted((Path(__file__).parents[2] / "golden").glob("schedule__*.json"))


@pytest.mark.parametrize("sidecar", CASES, ids=lambda path: path.stem)
def test_equals_the_pipelines_schedule(sidecar: Path) -> None:
    parameters = json.loads(sidecar.read_text())["parameters"]
    expected = np.load(sidecar.with_suffix(".npz"))
    family = parameters["family"]
    kind = UniPCMultistepScheduler if family == "wan" else FlowMatchEulerDiscreteScheduler
    table = sigma_table(
        kind(**parameters["scheduler_config"]),
        parameters["num_steps"],
        parameters["image_seq_len"],
        spacing="scheduler" if family in ("sd3", "wan") else "uniform",
    )
    assert table.dtype == torch.float32
    torch.testing.assert_close(table, torch.from_numpy(expected["out_sigmas"]), rtol=2e-6, atol=1e-6)
    if family != "wan":  # whose timesteps are truncated to integers
        torch.testing.assert_close(table[:-1] * 1000, torch.from_numpy(expected["out_timesteps"]), rtol=2e-6, atol=0)


def test_every_case_is_there() -> None:
    assert {path.stem.split("_")[2] for path in CASES} == {"sd3", "flux", "qwen", "hunyuan", "wan"}


def test_the_given_scheduler_is_not_touched() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    before = scheduler.sigmas.clone()
    sigma_table(scheduler, 4)
    assert torch.equal(scheduler.sigmas, before)


def test_a_resolution_dependent_shift_needs_the_sequence_length() -> None:
    with pytest.raises(ValueError, match="image_seq_len is needed"):
        sigma_table(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), 4)


NOT_TO_ZERO = UniPCMultistepScheduler(
    prediction_type="flow_prediction", use_flow_sigmas=True, final_sigmas_type="sigma_min"
)


@pytest.mark.parametrize(
    "scheduler", [FlowMatchEulerDiscreteScheduler(invert_sigmas=True), NOT_TO_ZERO], ids=["inverted", "not-to-zero"]
)
def test_a_schedule_that_is_not_a_flow_is_refused(scheduler: object) -> None:
    with pytest.raises(ValueError, match="no flow schedule of 4 steps"):
        sigma_table(scheduler, 4)
