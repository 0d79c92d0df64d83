"""Read, show and explain configurations.

    load_config(preset_or_path, overrides) -> RunConfig     raises ConfigError
    preset_names() -> list[str]                             what ships
    show(config) -> str                                     YAML that loads back to an equal configuration
    explain(key) -> str                                     type, default, bounds and meaning of a key or section
    schema() -> dict                                        JSON schema of a configuration file
    warnings_of(config) -> list[str]                        legal settings that will not do what they seem to

A file may begin with `extends: PRESET_OR_FILE`; settings it does not name come from there. `digenrl.preflight` checks
what needs the prompts, the model and the machine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic import ValidationError

from digenrl.config import yaml as config_yaml
from digenrl.config.errors import ConfigError
from digenrl.config.explain import explain
from digenrl.config.layers import Layer, override, preset_names, read_layers
from digenrl.config.run import RunConfig
from digenrl.config.schema import schema
from digenrl.config.words import problems_of

__all__ = ["ConfigError", "explain", "load_config", "preset_names", "schema", "show", "warnings_of"]


def load_config(preset_or_path: str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a preset by name or a YAML file by path, with overrides `section.key=value` on top (the last one wins).

    Raises:
        ConfigError: everything that is wrong, one sentence each.
    """
    layer = read_layers(preset_or_path)
    problems: list[str] = []
    # An algorithm decides which keys there are, so its name comes first.
    for text in sorted(overrides, key=lambda text: not text.startswith("algorithm.name=")):
        try:
            layer = override(layer, text)
        except ConfigError as error:
            problems += error.problems
    config, found = _validate(layer)
    if config is None or problems:
        raise ConfigError(*problems, *found)
    return config


def _validate(layer: Layer) -> tuple[RunConfig | None, list[str]]:
    # Strict JSON mode: lists and mappings become tuples and sections, but "3" is no integer and 1 is not true.
    text = json.dumps(layer.value)
    try:
        return RunConfig.model_validate_json(text, strict=True), []
    except ValidationError as error:
        return None, problems_of(error, layer.value, layer.origin_of)


def show(config: RunConfig) -> str:
    """The whole configuration as YAML, in the order of RunConfig, defaults written out."""
    return config_yaml.dump(config.model_dump(mode="json"))


def warnings_of(config: RunConfig) -> list[str]:
    """Sentences about settings that are legal and do not what they seem to."""
    algorithm = config.algorithm
    warnings = []
    key = algorithm.trust_region
    if key is not None and algorithm.updates_per_iteration == 1 and not config.stale_groups:
        warnings.append(
            f"algorithm.{key}={getattr(algorithm, key):g} has no effect: {key} cannot act with "
            "algorithm.updates_per_iteration=1, where the ratio is always 1 and only the learning rate limits a step"
        )
    if config.schedule.streams and config.micro_batch == algorithm.samples_per_prompt:
        warnings.append(
            f"schedule.advantage=streaming has no effect: with schedule.micro_batch={config.micro_batch} a group is "
            "complete as soon as any of it is scored"
        )
    if config.schedule.observe.detail == "unit" and config.schedule.steps_per_unit not in (1, "auto"):
        warnings.append(
            f"schedule.steps_per_unit={config.schedule.steps_per_unit} has no effect: "
            "schedule.observe.detail=unit cuts every trajectory into single steps"
        )
    if config.stale_groups and config.iterations == 1:
        warnings.append(
            f"schedule.stale_fraction={config.schedule.stale_fraction:g} has no effect: with iterations=1 there is no "
            "iteration before whose weights could be used"
        )
    optimizer, steps = config.optimizer, config.iterations * algorithm.updates_per_iteration
    if optimizer.ema_decay is not None and optimizer.ema_every > steps:
        warnings.append(
            f"optimizer.ema_decay={optimizer.ema_decay:g} keeps the weights of the start: the average moves at every "
            f"optimizer.ema_every={optimizer.ema_every} steps, and the run has {steps}"
        )
    return warnings
