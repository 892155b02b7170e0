"""Pruning dense matrices to a pattern."""

from __future__ import annotations

from typing import Any

from .. import _native
from .bytes import bytes_of, empty_like, matrix_axis, on_gpu, returned, writable_bytes


def prune(matrix: Any, method: str = "magnitude", axis: int = -1, *, pattern: str = "2:4", dtype: str | None = None):
    """The matrix with +0.0 in the place of what a rule does not keep.

    An array is pruned in the host's memory, a tensor where it is; one on a GPU by another pattern than 2:4 is copied to
    the host and back.

    Args:
        matrix: a numpy array or a torch tensor ``[rows, cols]`` of float32, float16, bfloat16, int8, float8_e4m3fn or
            float8_e5m2. It is not changed.
        method: ``"magnitude"`` keeps the largest magnitudes of each group (Mishra et al., 2021, arXiv 2104.08378); ties
            go to the lower index. The others keep, in each 4x4 tile, at most two elements of each row and of each
            column, so that the transpose is 2:4 too: ``"greedy"`` takes elements in descending order of magnitude,
            ``"greedy-signed"`` in descending order of value, ``"causal1122"`` in the order of torch's algorithm of that
            name, and ``"optimal"`` keeps the largest sum of magnitudes of the 90 masks with two kept elements in each
            row and column (Hubara et al., 2021, arXiv 2102.08124).
        axis: along which the groups of ``"magnitude"`` run: -1 along rows, 0 along columns; along 0 the transpose is
            pruned, to any pattern. The other methods obey both.
        pattern: for ``"magnitude"``; the others are 2:4. ``"N:M"``, with M up to 64; ``"V:N:M"``, ``"64:2:8"`` for
            instance, which keeps 4 of every M columns for V rows and N of those in each row; or a share that is pruned,
            rounded down: ``"block:64x64@0.8"`` of blocks, ``"rows@0.25"``, ``"columns@0.25"``, ``"unstructured@0.5"``
            of all elements, ``"unstructured-rows@0.5"`` of each row's. Blocks, rows and columns are compared by their
            mean magnitude.
        dtype: what an array of unsigned integers holds, ``"bfloat16"`` for instance.

    Returns:
        an array or tensor of the same kind, shape and dtype, on the same device. No gradient passes through.

    Raises:
        ValueError: for a NaN, with its row and column; for another rank; for an unknown method, pattern or axis.
        TypeError: for another dtype.
    """
    axis = matrix_axis(axis)
    if dtype is None and on_gpu(matrix):
        from . import gpu

        dense = gpu.of(matrix)
        on_device = None if dense is None else gpu.pruned(dense, pattern, axis, method)
        if on_device is not None:
            return on_device
    source = bytes_of(matrix, dtype)
    rows, cols = source.matrix()
    pruned = empty_like(source)
    _native.prune(source.data, source.dtype, rows, cols, pattern, axis, method, writable_bytes(pruned))
    return returned(pruned, source)
