"""Tensors survive Dask's wire format, whatever their dtype, strides or gradient flag."""

import itertools

import pytest
import torch
from dask.sizeof import sizeof
from distributed.protocol import deserialize, serialize

import workers.tensors  # noqa: F401  (registers the serialiser)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(("dtype", "contiguous"), list(itertools.product(DTYPES, [True, False])), ids=str)
def test_values_survive(dtype: torch.dtype, contiguous: bool) -> None:
    tensor = (torch.arange(24).reshape(4, 6) % 7).to(dtype)
    if not contiguous:
        tensor = tensor.t()[::2] if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) else tensor.t()
        assert not tensor.is_contiguous()
    back = deserialize(*serialize(tensor, serializers=("dask",)))
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert _bytes(back) == _bytes(tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)], ids=str)
def test_odd_shapes_survive(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=torch.bfloat16)
    back = deserialize(*serialize(tensor, serializers=("dask",)))
    assert back.shape == tensor.shape
    assert _bytes(back) == _bytes(tensor)


def test_gradient_flag_and_parameters_survive() -> None:
    leaf = torch.ones(3, requires_grad=True)
    assert deserialize(*serialize(leaf, serializers=("dask",))).requires_grad
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16), requires_grad=False)
    back = deserialize(*serialize(parameter, serializers=("dask",)))
    assert isinstance(back, torch.nn.Parameter)
    assert not back.requires_grad


def test_received_tensors_can_be_written_to() -> None:
    back = deserialize(*serialize(torch.zeros(4), serializers=("dask",)))
    back += 1
    assert back.tolist() == [1, 1, 1, 1]


def test_sizeof_is_the_size_of_the_data() -> None:
    tensor = torch.zeros(1024, 512, dtype=torch.bfloat16)
    assert sizeof(tensor) == pytest.approx(2 * 1024 * 512, rel=0.01)
    assert sizeof(tensor[:1]) == pytest.approx(2 * 1024 * 512, rel=0.01)
