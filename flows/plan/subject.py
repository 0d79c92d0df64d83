"""What is to be planned: a preset or file with overrides, as `train` takes it, or a workload by name.

    subject_of(name, overrides) -> Subject
    subject_from(name, config, workload)      the same of what has been read

A configuration that names a published checkpoint is a workload of its own sizes (flows.plan.published). A workload
(digenrl/data/workloads.yaml) becomes a configuration of its sizes, so the same overrides apply to both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from digenrl import runspec
from digenrl.config import RunConfig
from digenrl.config.errors import ConfigError, nearest, shown
from digenrl.config.load import load_config, preset_names
from digenrl.scheduling.shape import RunShape
from digenrl.scheduling.workloads import Workload, load
from flows.plan.published import workload_of

#: Workers of a workload unless others are asked for.
WORKLOAD_WORKERS = 16


@dataclass(frozen=True)
class Subject:
    """What is to be planned.

    Attributes:
        name: for titles and file names.
        config: sizes and schedule.
        shape: of its run, without evaluation.
        workload: where costs and memory are derived from; None: the configuration's own model.
        trainers: as configured; None: the best number is to be found.
    """

    name: str
    config: RunConfig
    shape: RunShape
    workload: Workload | None
    trainers: int | None


def subject_of(name: str, overrides: Sequence[str]) -> Subject:
    """Find and read it.

    Raises:
        ConfigError: no such preset, file or workload; or everything that is wrong with the configuration.
    """
    workloads = load()
    if name in workloads:
        found = workloads[name]
        config = load_config("tiny-smoke", [*_sizes(found), *_trained(found, overrides), *overrides])
        resized = _resized(found, config)
        given = any(text.partition("=")[0].strip() == "cluster.trainers" for text in overrides)
        return Subject(name, config, _shape(config), resized, config.cluster.trainers if given else None)
    if not Path(name).exists() and name not in preset_names():
        close = nearest(name, [*preset_names(), *workloads])
        if close in workloads:
            raise ConfigError(f"no preset, file or workload {shown(name)}; did you mean {close}?")
    config = load_config(name, overrides)
    return subject_from(_stem(name), config, workload_of(config))


def subject_from(name: str, config: RunConfig, workload: Workload | None) -> Subject:
    """A configuration, and the workload it is where its checkpoint is a published one.

    Raises:
        ConfigError: a micro-batch or a timestep batch does not fit into the memory of the workload's device.
    """
    shape = _shape(config)
    if workload is not None:
        most = _fitting(workload, config)
        shape = replace(shape, timestep_batch=min(shape.timestep_batch, most))
    return Subject(name, config, shape, workload, config.cluster.trainers)


def _stem(name: str) -> str:
    return Path(name).name.removesuffix(".yaml").removesuffix(".yml")


def _shape(config: RunConfig) -> RunShape:
    shape = runspec.shape(config, 0)
    return replace(shape, detailed=lambda iteration: False)


def _sizes(workload: Workload) -> list[str]:
    """The workload's sizes as overrides."""
    run = workload.run
    return [
        f"algorithm.num_steps={run.num_steps}",
        f"algorithm.prompts_per_iteration={run.groups}",
        f"algorithm.samples_per_prompt={run.group_size}",
        f"algorithm.updates_per_iteration={run.updates}",
        f"algorithm.std_scope={run.std_scope}",
        f"schedule.micro_batch={run.micro_batch}",
        f"schedule.timestep_batch={workload.timestep_batch}",
        "schedule.layout=digenrl",
        f"cluster.workers={WORKLOAD_WORKERS}",
    ]


def _trained(workload: Workload, overrides: Sequence[str]) -> list[str]:
    """How many steps of the workload are trained, in the words of the algorithm that overrides may name."""
    steps, trained = workload.run.num_steps, workload.run.trained_steps
    if "algorithm.name=dance_grpo" in overrides:
        return [f"algorithm.trained_fraction={trained / (steps - 1)}"]
    return [f"algorithm.sde_window_size={trained}", f"algorithm.sde_window_range=[0, {trained}]"]


def _resized(workload: Workload, config: RunConfig) -> Workload:
    """The workload with the sizes that overrides may have changed.

    Raises:
        ConfigError: a micro-batch or a timestep batch does not fit into the device's memory.
    """
    algorithm = config.algorithm
    run = replace(
        workload.run,
        groups=algorithm.prompts_per_iteration,
        group_size=algorithm.samples_per_prompt,
        updates=algorithm.updates_per_iteration,
        num_steps=algorithm.num_steps,
        trained_steps=runspec.trained_step_count(config),
        std_scope=algorithm.closing_scope,
        micro_batch=config.micro_batch,
    )
    resized = replace(workload, run=run)
    _fitting(resized, config)
    return resized


def _fitting(workload: Workload, config: RunConfig) -> int:
    """The largest timestep batch that fits into the memory of the workload's device."""
    run = workload.run
    try:
        most = workload.timestep_batch
    except ValueError as error:
        raise ConfigError(f"memory of {workload.device.name}: {error}") from None
    batch = config.schedule.timestep_batch
    if batch != "auto" and min(batch, run.trained_steps) > most:
        raise ConfigError(
            f"schedule.timestep_batch={batch} does not fit into the memory of {workload.device.name}: "
            f"{most} of {run.trained_steps} trained timesteps of a micro-batch of {run.micro_batch} do"
        )
    return most
