"""The canonical compressed form: what files hold, and what every engine packs its own layout from."""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _native
from ..canonical import parts_shapes
from .bytes import bytes_of, dtype_name, empty, is_tensor, on_gpu, returned, writable_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Compressed:
    """A 2:4 matrix ``[rows, cols]``: of each group of four, two values and a 4-bit code of their positions.

    Attributes:
        values: the kept values, ``[rows, 2 * ceil(cols / 4)]``, a numpy array or a torch tensor; of int4 ``[rows,
            ceil(cols / 4)]`` of uint8, the two integers of each group, each plus 8, the first in the lower half.
        meta: the codes, eight in a word, ``[rows, ceil(cols / 32)]`` (uint32 in numpy, int32 in torch).
        shape: rows and columns of the matrix.
        dtype: the name of its dtype; the values of an array may be unsigned integers that hold its bits. ``"int4"`` for
            4-bit integers.
        scales: by which the values are to be multiplied, or ``None``: for int8 one float32 for each row, or float16
            ``[rows, ceil(cols / group_size)]``; for int4 float16, that or ``[rows, 1]``.
        group_size: the columns that share a scale, 128 or 64; -1, for int4, for all of a row; ``None`` for int8 with a
            scale for each row, and without scales.
    """

    values: Any
    meta: Any
    shape: tuple[int, int]
    dtype: str
    scales: Any = None
    group_size: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the parts take."""
        return sum(part.nbytes for part in (self.values, self.meta, self.scales) if part is not None)

    def to_dense(self):
        """The matrix with zeros where nothing is kept; see :func:`decompress`."""
        return decompress(self)


def empty_parts(rows: int, cols: int, dtype: str, torch_tensor: bool):
    """Values and metadata to be filled, in the host's memory."""
    values, meta = parts_shapes(rows, cols)
    if dtype == "int4":
        values, dtype = (rows, values[1] // 2), "uint8"
    return empty(values, dtype, torch_tensor), empty(meta, "int32" if torch_tensor else "uint32", torch_tensor)


def compress(matrix: Any, *, prune: bool = False, dtype: str | None = None) -> Compressed:
    """Compresses a matrix that is 2:4 along its rows. -0.0 is stored as +0.0.

    An array is compressed in the host's memory, a tensor where it is.

    Args:
        matrix: a numpy array or a torch tensor ``[rows, cols]`` of float32, float16, bfloat16, int8, float8_e4m3fn or
            float8_e5m2.
        prune: keeps the two largest magnitudes of each group of a matrix that is not 2:4.
        dtype: what an array of unsigned integers holds, ``"bfloat16"`` for instance.

    Returns:
        the compressed matrix, of arrays or of tensors on the same device.

    Raises:
        ValueError: where the matrix is not 2:4, with row and group; for a NaN that would have to be ordered; for
            another rank.
        TypeError: for another dtype.
    """
    return compress_named("", matrix, prune, dtype)


def compress_named(name: str, matrix: Any, prune: bool = False, dtype: str | None = None) -> Compressed:
    """As :func:`compress`, with the tensor's name in errors."""
    if dtype is None and on_gpu(matrix):
        from . import gpu

        dense = gpu.of(matrix)
        parts = None if dense is None else gpu.compressed(dense, prune)
        if parts is not None:
            return Compressed(*parts, tuple(matrix.shape), dtype_name(matrix.dtype))
    source = bytes_of(matrix, dtype)
    rows, cols = source.matrix()
    values, meta = empty_parts(rows, cols, source.dtype, is_tensor(matrix))
    if not is_tensor(matrix):
        # Keeps the caller's type, which may be of ml_dtypes or an unsigned integer.
        values = values.view(source.like.dtype)
    _native.compress(source.data, source.dtype, rows, cols, prune, name, writable_bytes(values), writable_bytes(meta))
    return Compressed(returned(values, source), returned(meta, source), (rows, cols), source.dtype)


def compress_bitmask(name: str, kept: Any, bitmask: Any, shape: tuple[int, int]) -> Compressed:
    """The weight of the kept values and the bitmask of the format ``sparse-24-bitmask`` of compressed-tensors.

    Args:
        name: the tensor's name, for errors.
        kept: the kept values, row by row in ascending column.
        bitmask: ``[rows, ceil(cols / 8)]`` of uint8; bit ``b`` of byte ``j`` is set where column ``8 * j + b`` is kept.
        shape: rows and columns.

    Raises:
        ValueError: where the bitmask keeps more than two of a group, with row and group; where values and bits do not
            fit each other.
    """
    source, bits = bytes_of(kept), bytes_of(bitmask)
    values, meta = empty_parts(*shape, source.dtype, is_tensor(kept))
    _native.compress_bitmask(
        source.data, bits.data, source.dtype, *shape, name, writable_bytes(values), writable_bytes(meta)
    )
    return Compressed(returned(values, source), returned(meta, source), tuple(shape), source.dtype)


def decompress(compressed: Compressed):
    """The matrix ``[rows, cols]`` with zeros where nothing is kept.

    Returns:
        an array or a tensor, as the values are, on their device. int4, and int8 with scales for groups of columns,
        become float32, integers times scales; scales for each row of int8 are not applied.

    Raises:
        ValueError: where the parts break a rule of the canonical form, with row and group.
        TypeError: where the argument is not a :class:`Compressed`.
    """
    if not isinstance(compressed, Compressed):
        raise TypeError(f"decompress requires what compress returns, not {type(compressed).__name__}")
    rows, cols = compressed.shape
    values = bytes_of(compressed.values)
    meta = bytes_of(compressed.meta)
    if compressed.dtype == "int4":
        dense = empty((rows, cols), "float32", is_tensor(compressed.values))
        scales = bytes_of(compressed.scales)
        _native.decompress_int4(
            values.data, meta.data, scales.data, rows, cols, compressed.group_size, writable_bytes(dense)
        )
        return returned(dense, values)
    dense = empty((rows, cols), compressed.dtype, is_tensor(compressed.values))
    if not is_tensor(compressed.values):
        dense = dense.view(compressed.values.dtype)
    _native.decompress(values.data, meta.data, compressed.dtype, rows, cols, writable_bytes(dense))
    if compressed.group_size is not None:
        return returned(_times_scales(dense, compressed), values)
    return returned(dense, values)


def _times_scales(integers: Any, weight: Compressed):
    """Integers times scales that groups of columns share, as float32."""
    cols = weight.shape[1]
    if is_tensor(integers):
        return integers.float() * weight.scales.cpu().float().repeat_interleave(weight.group_size, 1)[:, :cols]
    return integers.astype("float32") * weight.scales.astype("float32").repeat(weight.group_size, 1)[:, :cols]
