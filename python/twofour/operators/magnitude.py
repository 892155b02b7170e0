"""Masks by magnitude, of any type and on any device."""

from __future__ import annotations

import torch

from .. import operators
from . import masks


def keep_largest(score: torch.Tensor, count: int) -> torch.Tensor:
    """The mask of bool that keeps the ``count`` largest along the last dimension; of equals the earlier ones."""
    order = score.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def two_largest(matrix: torch.Tensor) -> torch.Tensor:
    """The mask of bool that keeps the two largest magnitudes of each group of four along the rows of a matrix.

    Kernels of a CPU take float32, bfloat16 and float16, those of a GPU the last two; other types are sorted.
    """
    types = {torch.bfloat16, torch.float16} | ({torch.float32} if matrix.device.type == "cpu" else set())
    if matrix.dtype in types:
        return masks.mask_of(operators.select(matrix, operators.rule_number("magnitude")), *matrix.shape)
    rows, cols = matrix.shape
    groups = torch.nn.functional.pad(matrix.abs(), (0, -cols % 4)).view(rows, -1, 4)
    return keep_largest(groups, 2).view(rows, -1)[:, :cols]
