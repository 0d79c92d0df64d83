"""Which settings may change between the attempts of one run.

forbidden_changes(saved, config) -> list[str]     a sentence for each that may not and did

What decides samples, gradients or the shape of the weights must stay, or the resumed run would be another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from digenrl.config.errors import dotted, shown
from digenrl.config.run import RunConfig

#: Sections and keys that decide how long, where and how visibly a run goes on, and how fast it learns.
CHANGEABLE = (
    "iterations",
    "optimizer.learning_rate",
    "schedule.observe",
    "cluster",
    "evaluation",
    "checkpoint",
    "gates",
    "guard",
    "tracking",
)


def forbidden_changes(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """What differs between the configuration of a checkpoint and the present one, other than `CHANGEABLE`.

    Args:
        saved: `RunConfig.model_dump(mode="json")` of the run that wrote the checkpoint. A key that is missing in it
            did not exist then, and is not compared.
        config: the present configuration.

    Returns:
        Sentences with key, old and new value.
    """
    before = dict(_leaves(saved))
    return [
        f"{key} was {shown(before[key])} when the checkpoint was saved and is {shown(value)} now"
        for key, value in _leaves(config.model_dump(mode="json"))
        if key in before and before[key] != value and not _is_changeable(key)
    ]


def _is_changeable(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in CHANGEABLE)


def _leaves(section: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        path = (*above, name)
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield dotted(path), value
