"""The recorded constants of the published checkpoints, the golden schedules and the installed diffusers agree."""

from __future__ import annotations

import inspect
import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE

from digenrl.models.published import published
from digenrl.models.registry import FAMILIES
from digenrl.models.sigmas import sigma_table
from digenrl.models.tiny import build
from digenrl.models.tiny.parts import scheduler_of

SCHEDULES = sorted((Path(__file__).parents[2] / "golden").glob("schedule__*.json"))
SPACING = {"sd3": "scheduler", "wan": "scheduler"}


@pytest.mark.parametrize("sidecar", SCHEDULES, ids=lambda path: path.stem)
def test_the_published_scheduler_gives_the_golden_table(sidecar: Path) -> None:
    parameters = json.loads(sidecar.read_text())["parameters"]
    family = parameters["family"]
    recorded = published(family).scheduler
    for name, value in parameters["scheduler_config"].items():
        assert recorded.get(name, value) == value
    table = sigma_table(
        scheduler_of(family),
        parameters["num_steps"],
        parameters["image_seq_len"],
        spacing=SPACING.get(family, "uniform"),
    )
    expected = torch.from_numpy(np.load(sidecar.with_suffix(".npz"))["out_sigmas"])
    torch.testing.assert_close(table, expected, rtol=2e-6, atol=1e-6)


def test_every_family_is_recorded() -> None:
    for family in map(published, FAMILIES):
        assert "/" in family.repository and family.source
        assert family.revision is None or len(family.revision) == 40


@pytest.mark.parametrize("family", ["qwen", "hunyuan"])
def test_prompt_templates_are_those_of_diffusers_and_tiny_tokenizers_cut_them_alike(family: str) -> None:
    recorded, pipeline = published(family), build(family)
    template, tokens = (
        (pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx)
        if family == "qwen"
        else (DEFAULT_PROMPT_TEMPLATE["template"], DEFAULT_PROMPT_TEMPLATE["crop_start"])
    )
    assert (recorded.prompt_template, recorded.template_tokens) == (template, tokens)
    assert len(pipeline.tokenizer(template.split("{}")[0])["input_ids"]) == tokens


def test_default_lengths_are_those_of_the_calls() -> None:
    for family in FAMILIES.values():
        module, _, name = family.model.partition(":")
        model_class = getattr(import_module(module), name)
        call = inspect.signature(model_class.pipeline_class.__call__).parameters["max_sequence_length"]
        assert model_class.default_tokens == call.default
        assert model_class.pipeline_class.__name__ == family.pipeline


@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_wans_timesteps_are_sigmas_truncated(shift: float) -> None:
    scheduler = UniPCMultistepScheduler.from_config(scheduler_of("wan").config, flow_shift=shift)
    for num_steps in range(1, 101):
        scheduler.set_timesteps(num_steps)
        assert torch.equal((sigma_table(scheduler, num_steps)[:-1] * 1000).long(), scheduler.timesteps)
