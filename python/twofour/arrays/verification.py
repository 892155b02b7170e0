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
        line: the row that holds it, or the column where groups run along axis 0.
        group: its index along that line.
        nonzeros: how many nonzeros it has.
    """

    line: int
    group: int
    nonzeros: int


@dataclasses.dataclass(frozen=True)
class PartViolation(Violation):
    """A part of another kind that a pattern counts: a block, a row, a column or the whole matrix.

    Attributes:
        line: the row or column where the pattern counts those, else ``None``.
        group: ``None``.
        nonzeros: how many nonzeros it has; columns with nonzeros of a block of V:N:M.
        allowed: how many it may have.
        row: the first row of a block.
        column: the first column of a block.
    """

    line: int | None
    group: int | None
    nonzeros: int
    allowed: int = 0
    row: int | None = None
    column: int | None = None


def _violation(line, group, row, column, nonzeros, allowed) -> Violation:
    if line is not None and group is not None:
        return Violation(line, group, nonzeros)
    return PartViolation(line, group, nonzeros, allowed, row, column)


@dataclasses.dataclass(frozen=True)
class Verification:
    """How a matrix obeys a pattern along an axis. It is true where every part does.

    Attributes:
        pattern: the pattern, ``"2:4"`` for instance.
        axis: the axis along which groups run: 1 along rows, 0 along columns.
        groups: how many groups the matrix has, or blocks, rows or columns where the pattern counts those; one at the
            end may be smaller.
        violating_groups: how many have more nonzeros than allowed. Where a share of blocks, rows or columns must be
            zero: how many more of them must be.
        first_violations: the first of them. Where a share of parts must be zero, those of the fewest nonzeros.
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
    """Checks a matrix against a pattern. An element is nonzero unless it is +0.0 or -0.0; NaN is nonzero.

    An array is checked in the host's memory, a tensor where it is.

    Args:
        matrix: a numpy array or a torch tensor ``[rows, cols]`` of float32, float16, bfloat16, int8, float8_e4m3fn or
            float8_e5m2.
        pattern: ``"N:M"``, at most N nonzeros in each group of M consecutive elements, 1 <= N <= M <= 64;
            ``"V:N:M"``, in each V rows nonzeros in at most 4 of each M columns, and N of those in a row;
            ``"block:RxC@share"``, ``"rows@share"``, ``"columns@share"``, ``"unstructured@share"`` or
            ``"unstructured-rows@share"``: that share of blocks, rows, columns, elements or each row's elements is zero,
            rounded down.
        axis: along which groups run: -1 along rows, what a weight ``[out_features, in_features]`` requires; 0 along
            columns. Along 0 it is the transpose that has the pattern, of any kind.
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
    violations = tuple(_violation(*violation) for violation in first)
    return Verification(pattern, axis, groups, violating, violations, zeros / max(rows * cols, 1))
