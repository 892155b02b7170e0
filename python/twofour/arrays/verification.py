"""Is a matrix already 2:4, along which axis, and where not?"""

from __future__ import annotations

import dataclasses
from typing import Any

from .. import _native
from .bytes import bytes_of, matrix_axis, on_gpu


@dataclasses.dataclass(frozen=True)
class Violation:
    """A group with more nonzeros than the pattern allows.

    Attributes:
        line: the row that holds the group, or the column where groups run along axis 0.
        group: its index along that line.
        nonzeros: how many there are in it.
    """

    line: int
    group: int
    nonzeros: int


@dataclasses.dataclass(frozen=True)
class Verification:
    """How a matrix obeys a pattern along an axis. It is true where every group does.

    Attributes:
        pattern: the pattern, ``"2:4"`` for instance.
        axis: the axis along which groups run: 1 along rows, 0 along columns.
        groups: how many groups the matrix has; one at the end of a line may be shorter.
        violating_groups: how many have more nonzeros than allowed.
        first_violations: the first of them.
        zeros: the share of elements that are zero, of either sign; 0 for a matrix without elements.
    """

    pattern: str
    axis: int
    groups: int
    violating_groups: int
    first_violations: tuple[Violation, ...]
    zeros: float

    @property
    def obeys(self) -> bool:
        """Whether every group obeys the pattern."""
        return self.violating_groups == 0

    def __bool__(self) -> bool:
        return self.obeys


def verify(
    matrix: Any, pattern: str = "2:4", axis: int = -1, *, places: int = 8, dtype: str | None = None
) -> Verification:
    """Checks a matrix against an N:M pattern. An element is nonzero unless it is +0.0 or -0.0; NaN is nonzero.

    An array is checked in the host's memory, a tensor where it is.

    Args:
        matrix: a numpy array or a torch tensor ``[rows, cols]`` of float32, float16, bfloat16, int8, float8_e4m3fn or
            float8_e5m2.
        pattern: at most N nonzeros in each group of M consecutive elements, 1 <= N <= M <= 64.
        axis: along which groups run: -1 along rows, what a weight ``[out_features, in_features]`` requires; 0 along
            columns.
        places: how many violating groups to list; all are counted.
        dtype: what an array of unsigned integers holds, ``"bfloat16"`` for instance.

    Raises:
        ValueError: for another rank, and a pattern or axis that does not exist.
        TypeError: for another dtype.
    """
    axis = matrix_axis(axis)
    found = None
    if dtype is None and on_gpu(matrix):
        from . import gpu

        dense = gpu.of(matrix)
        found = None if dense is None else gpu.conformity(dense, pattern, axis, places)
    if found is not None:
        rows, cols = matrix.shape
    else:
        source = bytes_of(matrix, dtype)
        rows, cols = source.matrix()
        found = _native.verify(source.data, source.dtype, rows, cols, pattern, axis, places)
    groups, violating, first, zeros = found
    return Verification(
        pattern, axis, groups, violating, tuple(Violation(*place) for place in first), zeros / max(rows * cols, 1)
    )
