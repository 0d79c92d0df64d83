"""Reads tests/golden: one pytest parameter per case, and dtype where there are arrays."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

GOLDEN = Path(__file__).parents[2] / "golden"
RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class Case:
    """One case at one dtype; `case["in_x"]` is an array of it as a tensor."""

    name: str
    parameters: dict[str, Any]
    arrays: dict[str, torch.Tensor]

    def __getitem__(self, array: str) -> torch.Tensor:
        return self.arrays[array]

    def __contains__(self, array: str) -> bool:
        return array in self.arrays


def golden(family: str) -> pytest.MarkDecorator:
    """Parametrises `case` over all cases and dtypes of a family."""
    params = []
    for sidecar in sorted(GOLDEN.glob(f"{family}__*.json")):
        meta = json.loads(sidecar.read_text())
        stored = np.load(sidecar.with_suffix(".npz"))
        for dtype in meta["dtypes"] or [""]:
            prefix = f"{dtype}." if dtype else ""
            arrays = {k.removeprefix(prefix): torch.tensor(stored[k]) for k in stored.files if k.startswith(prefix)}
            params.append(pytest.param(Case(meta["case"], meta["parameters"], arrays), id=f"{sidecar.stem}-{dtype}"))
    assert params, f"no golden cases of family {family}"
    return pytest.mark.parametrize("case", params)


@dataclass(frozen=True)
class Sequence:
    """One case of integers or plain numbers, without arrays."""

    name: str
    parameters: dict[str, Any]
    data: dict[str, Any]


def golden_sequence(family: str) -> pytest.MarkDecorator:
    """Parametrises `case` over the cases of a family that have no arrays."""
    sidecars = [json.loads(path.read_text()) for path in sorted(GOLDEN.glob(f"{family}__*.json"))]
    cases = [Sequence(meta["case"], meta["parameters"], meta["data"]) for meta in sidecars]
    assert cases, f"no golden cases of family {family}"
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


def assert_close(actual: torch.Tensor, expected: torch.Tensor, factor: float = 1.0) -> None:
    """Within 1e-5 (float32) or 1e-12 (float64), relative to each value or to the largest of the array."""
    assert actual.dtype == expected.dtype
    rtol = factor * RELATIVE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * float(expected.abs().max()))
