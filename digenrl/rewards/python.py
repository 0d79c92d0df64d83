"""A reward that is a function of the user's: `python:MODULE:FUNCTION`.

The function is called as `function(images, prompts)` with (B, F, H, W, 3) uint8 and B `PromptRecord`s, and returns B
values: numbers, or None, `Failed(reason)` or `Scored(value)`. The module is imported on every worker, so it must be on
their import path.
"""

from __future__ import annotations

import importlib
import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from digenrl.config.errors import nearest, shown
from digenrl.config.rewards import PYTHON_PREFIX
from digenrl.rewards.base import Failed, PromptRecord, Reward, RewardCard, RewardError, Score, Scored, score_of

#: Characters of an exception's text that go into a reason.
_LONGEST = 200


class PythonReward(Reward):
    """The values a function returns. What it raises, and what is no value, is why its samples have none.

    Args:
        target: MODULE:FUNCTION.

    Raises:
        RewardError: there is no such function, or it does not take images and prompts.
    """

    card = RewardCard("a function of your own", "its own", licence="yours", weights="its own")

    def __init__(self, target: str) -> None:
        self.name = target.rpartition(":")[2]
        self._function = _function(target)

    def __call__(self, images: NDArray[np.uint8], prompts: Sequence[PromptRecord]) -> list[Score]:
        """Score B samples; see `Reward`."""
        try:
            found = self._function(images, prompts)
        except Exception as error:  # whatever a function of somebody else's raises
            return self._nothing(prompts, f"raised {type(error).__name__}: {str(error)[:_LONGEST]}")
        try:
            values = list(found)
        except TypeError:
            return self._nothing(prompts, f"returned {_named(found)}, not {len(prompts)} values")
        if len(values) != len(prompts):
            return self._nothing(prompts, f"returned {len(values)} values for {len(prompts)} samples")
        return [self._score(value) for value in values]

    def _nothing(self, prompts: Sequence[PromptRecord], why: str) -> list[Score]:
        return [Failed(f"reward {self.name} {why}")] * len(prompts)

    def _score(self, value: Any) -> Score:
        if isinstance(value, Failed):
            return value
        if isinstance(value, Scored):
            return score_of(self.name, value.value)
        if value is None:
            return Failed(f"reward {self.name} returned None")
        if isinstance(value, numbers.Real) or (np.ndim(value) == 0 and hasattr(value, "__float__")):
            return score_of(self.name, float(value))
        return Failed(f"reward {self.name} returned {_named(value)}, which is no number")


def _function(target: str) -> Callable[..., Any]:
    whole = PYTHON_PREFIX + target
    module_name, colon, name = target.partition(":")
    if not (colon and module_name and name):
        raise RewardError(f"{shown(whole)} must be {PYTHON_PREFIX}MODULE:FUNCTION")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise RewardError(
            f"{shown(whole)}: the module {module_name} cannot be imported ({error}); install it, or put its directory "
            "into PYTHONPATH"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = nearest(name, [n for n, value in vars(module).items() if callable(value)])
        found = "has no" if function is None else "has something else than a function as"
        raise RewardError(f"{shown(whole)}: {module_name} {found} {name}" + (f"; did you mean {near}?" if near else ""))
    try:
        inspect.signature(function).bind(None, None)
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"{shown(whole)} must take two positional arguments, images and prompts ({error}): "
            f"def {name}(images, prompts)"
        ) from error
    checked: Callable[..., Any] = function
    return checked


def _named(value: object) -> str:
    return f"{type(value).__name__} {shown(repr(value))}"
