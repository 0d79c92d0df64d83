"""The sigma table of a checkpoint's own scheduler.

A diffusers scheduler is used for this table and nothing else: its hidden step index, and its search of a step by
comparing timesteps, are never involved. The given scheduler is not touched; a fresh copy is asked.

Source: `set_timesteps` as the families' diffusers pipelines call it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

#: What a pipeline hands its scheduler before shifting: nothing (the scheduler spaces steps itself: SD3, Wan), or
#: N equal steps from 1 to 1/N (FLUX, Qwen-Image, HunyuanVideo).
Spacing = Literal["scheduler", "uniform"]


def sigma_table(
    scheduler: Any, num_steps: int, image_seq_len: int | None = None, *, spacing: Spacing = "scheduler"
) -> torch.Tensor:
    """Noise levels of a rollout.

    Args:
        scheduler: a diffusers scheduler with flow sigmas, e.g. FlowMatchEulerDiscreteScheduler.
        num_steps: T.
        image_seq_len: packed latent tokens of the picture; needed if the scheduler shifts by resolution.
        spacing: what the family's pipeline passes.

    Returns:
        (T+1,) float32 on the CPU, strictly decreasing, ending in 0.

    Raises:
        ValueError: `image_seq_len` is missing, or the scheduler's table is not a decreasing flow schedule.
    """
    config = scheduler.config
    arguments: dict[str, Any] = {"num_inference_steps": num_steps}
    if spacing == "uniform":
        arguments["sigmas"] = np.linspace(1.0, 1 / num_steps, num_steps)
    if config.get("use_dynamic_shifting"):
        if image_seq_len is None:
            raise ValueError("this scheduler shifts its sigmas by resolution: image_seq_len is needed, got None")
        arguments["mu"] = resolution_shift(config, image_seq_len)
    fresh = type(scheduler).from_config(config)
    fresh.set_timesteps(**arguments)
    sigmas: torch.Tensor = fresh.sigmas.to("cpu", torch.float32, copy=True)
    if len(sigmas) != num_steps + 1 or sigmas[-1] != 0 or sigmas[0] > 1 or bool((sigmas.diff() >= 0).any()):
        raise ValueError(
            f"{type(scheduler).__name__} gives no flow schedule of {num_steps} steps, decreasing from at most 1 to 0: "
            f"{sigmas.tolist()}"
        )
    return sigmas


def resolution_shift(config: Mapping[str, Any], image_seq_len: int) -> float:
    """mu, the exponent of the resolution-dependent shift: linear in the number of latent tokens."""
    slope = (config["max_shift"] - config["base_shift"]) / (config["max_image_seq_len"] - config["base_image_seq_len"])
    return float(config["base_shift"] + slope * (image_seq_len - config["base_image_seq_len"]))
