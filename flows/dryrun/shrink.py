"""A configuration made small enough for a CPU, without changing what it exercises.

    shrink(config) -> RunConfig

Kept: algorithm, sampler, steps, window, updates, advantages, KL, guidance, LoRA, moving average, layout and techniques,
and prompts. Smaller: checkpoint, samples, groups, evaluation, workers. Rewards of a random checkpoint's noise would be
equal, or need weights of their own, so others take their place that noise differs in.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from digenrl.config import RunConfig
from digenrl.models.checkpoint import PACKAGE_PREFIX, TINY_PREFIX

#: Family -> its tiny checkpoint, height, width, frames.
TINY: dict[str, tuple[str, int, int, int]] = {
    "sd3": (f"{PACKAGE_PREFIX}tiny-sd3", 12, 24, 1),
    "flux": (f"{TINY_PREFIX}flux", 16, 32, 1),
    "qwen": (f"{TINY_PREFIX}qwen", 16, 32, 1),
    "wan": (f"{TINY_PREFIX}wan", 16, 32, 5),
    "hunyuan": (f"{TINY_PREFIX}hunyuan", 16, 32, 5),
}
#: Samples of a group, and of a micro-batch if a group has several.
GROUP, MICRO_BATCH = 4, 2
EVAL_PROMPTS, EVAL_STEPS = 2, 4


def is_tiny(config: RunConfig) -> bool:
    """Whether the configuration's own checkpoint is small enough."""
    return config.model.path.startswith((TINY_PREFIX, PACKAGE_PREFIX))


def shrink(config: RunConfig) -> RunConfig:
    """The small configuration, of one iteration.

    It has the fewest groups with which it is valid: at least two, and one for every update and for stale groups.
    """
    small = _small(config.model_dump(mode="json"), config)
    algorithm = config.algorithm
    updates = algorithm.updates_per_iteration
    for groups in range(updates * -(-2 // updates), algorithm.prompts_per_iteration + 1, updates):
        small["algorithm"]["prompts_per_iteration"] = groups
        try:
            return RunConfig.model_validate(small)
        except ValidationError:
            continue
    small["algorithm"]["prompts_per_iteration"] = algorithm.prompts_per_iteration
    return RunConfig.model_validate(small)


def _small(data: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """All that does not depend on the number of groups."""
    algorithm = config.algorithm
    group = min(GROUP, algorithm.samples_per_prompt)
    data["iterations"] = 1
    data["algorithm"]["samples_per_prompt"] = group
    if algorithm.best_of_n is not None:
        data["algorithm"]["best_of_n"] = min(algorithm.best_of_n, GROUP // 2)
    if config.micro_batch < algorithm.samples_per_prompt:
        data["schedule"]["micro_batch"] = min(config.micro_batch, MICRO_BATCH, group // 2)
    else:
        data["schedule"]["micro_batch"] = "auto"
    data["optimizer"]["warmup_iterations"] = min(config.optimizer.warmup_iterations, 1)
    alone = config.schedule.layout == "colocated" and config.cluster.workers == 1
    data["cluster"] |= {"address": "local", "workers": 1 if alone else 2, "trainers": 1, "device": "cpu"}
    evaluation = config.evaluation
    data["evaluation"]["prompts"] = min(evaluation.prompts, EVAL_PROMPTS)
    data["evaluation"]["num_steps"] = min(evaluation.num_steps, EVAL_STEPS)
    data["evaluation"]["micro_batch"] = min(evaluation.micro_batch, EVAL_PROMPTS)
    data["checkpoint"] |= {"url": None, "endpoint": None, "credentials_block": None}
    if config.tracking.uri != "none":
        data["tracking"]["uri"] = "managed"
    if not is_tiny(config):
        path, height, width, frames = TINY[config.model.family]
        size = {"path": path, "height": height, "width": width, "frames": frames}
        data["model"] |= {**size, "dtype": "float32", "max_sequence_length": None}
        data["rewards"] = _rewards(len(config.rewards))
    return data


def _rewards(terms: int) -> list[dict[str, Any]]:
    """As many terms as there can be, so that what is done with several rewards is done."""
    found = [{"name": "jpeg_compressibility"}, {"name": "jpeg_incompressibility", "weight": 0.5}]
    return found[:terms]
