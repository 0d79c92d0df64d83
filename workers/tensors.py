"""Torch tensors on Dask's wire: every dtype, any strides, and their true size.

distributed's own serialiser goes through NumPy, which knows neither bfloat16 nor the float8 types, and its sizeof
reports the size of the Python object (some 80 bytes for any tensor). Importing this module, which importing any
module of this package does, replaces both in the process.
"""

from __future__ import annotations

from typing import Any

import distributed.protocol.torch  # noqa: F401  (registers first, so that ours replaces it)
import numpy as np
import torch
from dask.sizeof import sizeof
from distributed.protocol.serialize import dask_deserialize, dask_serialize

Header = dict[str, Any]


def _dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"received a tensor of type {name}, which this torch {torch.__version__} does not know")
    return dtype


@dask_serialize.register(torch.Tensor)
def serialize_tensor(tensor: torch.Tensor) -> tuple[Header, list[memoryview]]:
    """Bytes of the values in row-major order; gradients and graph do not travel."""
    values = tensor.detach().cpu().contiguous()
    header = {
        "dtype": str(tensor.dtype),
        "shape": tuple(tensor.shape),
        "device": tensor.device.type,
        "requires_grad": tensor.requires_grad,
    }
    return header, [memoryview(values.reshape(-1).view(torch.uint8).numpy())] if values.numel() else []


@dask_deserialize.register(torch.Tensor)
def deserialize_tensor(header: Header, frames: list[Any]) -> torch.Tensor:
    """The tensor, writable, on its device type if that exists here and on the CPU otherwise."""
    dtype = _dtype_named(header["dtype"])
    if frames:
        # A frame may be read-only and shared with the network buffer; a tensor must own its memory.
        data = np.frombuffer(b"".join(frames), dtype=np.uint8).copy()
        tensor = torch.from_numpy(data).view(dtype).reshape(header["shape"])
    else:
        tensor = torch.empty(header["shape"], dtype=dtype)
    if header["device"] == "cuda" and torch.cuda.is_available():
        tensor = tensor.cuda()
    return tensor.requires_grad_(True) if header["requires_grad"] else tensor


@dask_serialize.register(torch.nn.Parameter)
def serialize_parameter(parameter: torch.nn.Parameter) -> tuple[Header, list[memoryview]]:
    """As a tensor."""
    return serialize_tensor(parameter)


@dask_deserialize.register(torch.nn.Parameter)
def deserialize_parameter(header: Header, frames: list[Any]) -> torch.nn.Parameter:
    """As a tensor, wrapped again."""
    tensor = deserialize_tensor({**header, "requires_grad": False}, frames)
    return torch.nn.Parameter(tensor, requires_grad=header["requires_grad"])


@sizeof.register(torch.Tensor)
def sizeof_tensor(tensor: torch.Tensor) -> int:
    """Bytes of the storage the tensor keeps alive (a small view of a large tensor keeps all of it)."""
    return int(tensor.untyped_storage().nbytes())
