"""A12. Symptom: bfloat16 and float8 tensors could not be sent by Dask at all, and every tensor weighed 80 bytes to it.

Rule: any tensor arrives bit for bit in another process, whatever its dtype, strides and gradient flag, and its size is
known within 1 %. (tests/unit/workers/test_tensors.py has the combinations.)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch

from digenrl.trajectory import tensor_hash
from runs import Ground
from workers import tensors as tensors

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
SHAPE = (1024, 1024)


@pytest.fixture(scope="module")
def ground() -> Iterator[Ground]:
    found = Ground(2)
    yield found
    found.close()


def make(dtype: torch.dtype, contiguous: bool, requires_grad: bool) -> torch.Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)
    values = values if contiguous else values.t()
    return values.requires_grad_() if requires_grad else values


def describe(tensor: torch.Tensor) -> tuple[int, str, bool, tuple[int, ...]]:
    return os.getpid(), tensor_hash(tensor), tensor.requires_grad, tuple(tensor.shape)


CASES = [c for c in itertools.product(DTYPES, (True, False), (True, False)) if c[0].itemsize > 1 or not c[2]]


@pytest.mark.parametrize(("dtype", "contiguous", "requires_grad"), CASES, ids=str)
def test_from_one_worker_to_another(ground: Ground, dtype: torch.dtype, contiguous: bool, requires_grad: bool) -> None:
    source, target = sorted(card.address for card in ground.cards().values())
    client = ground.client
    made = client.submit(make, dtype, contiguous, requires_grad, workers=[source], pure=False)
    seen = client.submit(describe, made, workers=[target], pure=False)
    pid, found, flag, shape = ground.do(client.gather, seen)
    expected = make(dtype, contiguous, requires_grad)
    assert (found, flag, shape) == (tensor_hash(expected), requires_grad, SHAPE)
    assert pid == next(card.pid for card in ground.cards().values() if card.address == target)
    sizes = ground.do(client.nbytes, [made.key], summary=False)
    assert sizes[made.key] == pytest.approx(expected.nbytes, rel=0.01)


def test_to_the_driver_and_back(ground: Ground) -> None:
    sent = make(torch.bfloat16, False, True)
    (future,) = ground.do(ground.client.scatter, [sent])
    back = ground.do(ground.client.gather, future)
    assert tensor_hash(back) == tensor_hash(sent)
    assert back.requires_grad
