"""Numpy arrays and torch tensors as the native functions take them: bytes, the name of a dtype, and a shape.

torch is not imported here. An argument can only be a tensor where the caller has imported it.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

#: Dtypes without a numpy type of their own, and the unsigned integers that hold their bits.
BIT_HOLDERS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}


def is_tensor(value: Any) -> bool:
    """Whether the value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


@dataclasses.dataclass(frozen=True)
class Bytes:
    """The elements of an array or tensor in the host's memory, contiguous, row-major.

    Attributes:
        data: the bytes, one-dimensional; shared with the array where that is possible.
        dtype: the dtype's name, as numpy, ``ml_dtypes`` and torch have it.
        shape: the shape.
        like: the array or tensor, whose kind and device results take.
    """

    data: np.ndarray
    dtype: str
    shape: tuple[int, ...]
    like: Any

    def matrix(self) -> tuple[int, int]:
        """Rows and columns.

        Raises:
            ValueError: unless the array has two dimensions.
        """
        if len(self.shape) != 2:
            raise ValueError(f"a matrix [rows, cols] is required; the shape is {list(self.shape)}: reshape it first")
        return self.shape[0], self.shape[1]


def on_gpu(value: Any) -> bool:
    """Whether the value is a torch tensor on a GPU."""
    return is_tensor(value) and value.device.type == "cuda"


def bytes_of(value: Any, dtype: str | None = None) -> Bytes:
    """The bytes of a numpy array, of what numpy can make one of, or of a torch tensor.

    Args:
        value: the array or tensor. A 2:4 tensor of :mod:`twofour.sparse` counts as its dense form.
        dtype: what the elements of an array of unsigned integers mean: ``"bfloat16"`` for uint16, ``"float8_e4m3fn"``
            or ``"float8_e5m2"`` for uint8.

    Raises:
        TypeError: for a dtype that the array cannot hold, and for tensors of other layouts than strided.
    """
    if is_tensor(value):
        if dtype is not None:
            raise TypeError("dtype is for numpy arrays that hold the bits of another type; a tensor has its own")
        return _bytes_of_tensor(value)
    array = np.asarray(value)
    name = array.dtype.name
    if dtype is not None and dtype != name:
        # None, of an unknown name, is float64 to numpy.
        if dtype not in BIT_HOLDERS or array.dtype != BIT_HOLDERS[dtype]:
            holder = np.dtype(BIT_HOLDERS[dtype]).name if dtype in BIT_HOLDERS else dtype
            raise TypeError(f"dtype {dtype} requires an array of {holder}; this one is of {name}")
        name = dtype
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("="))
    flat = np.require(array, requirements=["C", "A"]).reshape(-1)
    return Bytes(flat.view(np.uint8), name, array.shape, array)


def _bytes_of_tensor(tensor) -> Bytes:
    import torch

    dense = tensor.detach()
    if isinstance(tensor, torch.sparse.SparseSemiStructuredTensor):
        dense = dense.to_dense()
    if dense.layout != torch.strided:
        raise TypeError(f"a tensor of layout {dense.layout} has no plain elements; call .to_dense() first")
    if dense.device.type == "meta":
        raise TypeError("a tensor on the device meta has no elements; load it first")
    flat = dense.resolve_conj().resolve_neg().contiguous().cpu().reshape(-1)
    return Bytes(flat.view(torch.uint8).numpy(), dtype_name(tensor.dtype), tuple(tensor.shape), tensor)


def dtype_name(dtype) -> str:
    """The name of a dtype of torch's."""
    return str(dtype).removeprefix("torch.")


def numpy_dtype(name: str) -> np.dtype:
    """The numpy dtype of that name: of ``ml_dtypes`` where it is installed, else the unsigned integer that holds the
    bits.

    Raises:
        TypeError: where there is none.
    """
    try:
        return np.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))
    except (ImportError, AttributeError):
        if name in BIT_HOLDERS:
            return np.dtype(BIT_HOLDERS[name])
        raise TypeError(f"numpy has no dtype {name}; install ml_dtypes") from None


def writable_bytes(array: Any) -> np.ndarray:
    """The bytes of a contiguous array or host tensor of the package's own, to be written to."""
    if is_tensor(array):
        import torch

        return array.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)


def empty(shape: tuple[int, ...], dtype: str, torch_tensor: bool):
    """A new tensor or array in the host's memory."""
    if torch_tensor:
        import torch

        return torch.empty(shape, dtype=getattr(torch, dtype))
    return np.empty(shape, numpy_dtype(dtype))


def empty_like(source: Bytes):
    """A new array or tensor in the host's memory, of the shape and dtype of a source."""
    if is_tensor(source.like):
        return empty(source.shape, source.dtype, True)
    return np.empty(source.shape, source.like.dtype)


def returned(result: Any, source: Bytes):
    """A result on the device of its source."""
    return result.to(source.like.device) if is_tensor(source.like) else result


def matrix_axis(axis: int) -> int:
    """The axis of a matrix, 0 or 1.

    Raises:
        ValueError: for another one.
    """
    if axis not in (-2, -1, 0, 1):
        raise ValueError(f"axis {axis} is out of range for a matrix; -1 is along rows, 0 along columns")
    return axis % 2
