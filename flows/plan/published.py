"""A configuration of a published checkpoint as a workload: memory and time follow from sizes, without the weights.

    workload_of(config) -> Workload | None      None: its checkpoint is none of those in workloads.yaml

Architecture and decoder are the workload's, everything else is the configuration's. Rewards are not counted: what they
take depends on where they run.
"""

from __future__ import annotations

from dataclasses import replace

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.models.registry import family_of
from digenrl.scheduling.roofline import Geometry, Reward, Sampling, Training
from digenrl.scheduling.workloads import Workload, load

_SOURCE = "the configuration"
#: CLIP's part of an SD3 prompt.
_CLIP_TOKENS = 77


def workload_of(config: RunConfig) -> Workload | None:
    """The workload of a run on the published checkpoint it names."""
    by_repository = {found.checkpoint.repository: found for found in load().values()}
    base = by_repository.get(config.model.path)
    if base is None:
        return None
    model, algorithm, family = config.model, config.algorithm, family_of(config.model.family)
    text = base.model.text_tokens
    if model.max_sequence_length is not None:
        text = model.max_sequence_length + (_CLIP_TOKENS if model.family == "sd3" else 0)
    pixels = model.height * model.width * model.frames
    share = pixels / (base.geometry.height * base.geometry.width * base.geometry.frames)
    return replace(
        base,
        model=replace(base.model, text_tokens=text),
        geometry=Geometry(model.height, model.width, model.frames, base.geometry.decode_flops * share, _SOURCE),
        run=Sampling(
            groups=algorithm.prompts_per_iteration,
            group_size=algorithm.samples_per_prompt,
            updates=algorithm.updates_per_iteration,
            num_steps=algorithm.num_steps,
            trained_steps=runspec.trained_step_count(config),
            std_scope=algorithm.closing_scope,
            guidance_passes=2 if model.guidance_scale > 1 and not family.distilled else 1,
            micro_batch=config.micro_batch,
            source=_SOURCE,
        ),
        training=Training(config.method, 1, config.lora.rank, base.checkpoint.adapted_layers, _SOURCE),
        reward=Reward(0.0, 0, 0.0, "not counted"),
    )
