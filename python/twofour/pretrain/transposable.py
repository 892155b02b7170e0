"""Masks that are 2:4 along rows and along columns."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .. import operators
from ..operators import masks
from .estimators import straight_through


def _signed_optimum(dense: torch.Tensor) -> torch.Tensor:
    """The mask of the largest signed sum in each 4x4 tile."""
    rows, cols = dense.shape
    padded = F.pad(dense.float(), (0, -cols % 4, 0, -rows % 4))
    tiles = padded.view(padded.shape[0] // 4, 4, padded.shape[1] // 4, 4)
    # Every pattern keeps eight elements of a tile, so that adding a constant to all of them changes no comparison.
    shifted = tiles - tiles.amin(dim=(1, 3), keepdim=True)
    shifted = shifted.view(padded.shape)
    if dense.device.type != "cpu":
        # The type that kernels take there.
        shifted = shifted.to(dense.dtype)
    return _optimum(shifted)[:rows, :cols].contiguous()


def _optimum(dense: torch.Tensor) -> torch.Tensor:
    return masks.mask_of(operators.select(dense, operators.rule_number("optimal")), *dense.shape)


class TransposableSparse(nn.Module):
    """Prunes a matrix to 2:4 along rows and along columns at once, so that its transpose is 2:4 too: FST (Hu et al.,
    "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024).

    In each 4x4 tile it keeps the pattern, of the 90 that there are, with the largest sum. Sums are exact in float32;
    the toolkit rounds float32 to TF32. Any shape: a tile at the edge counts as filled with zeros.

    Args:
        abs: sums of magnitudes; otherwise of signed values.
    """

    def __init__(self, abs: bool = True):
        super().__init__()
        self.abs = abs

    def forward(self, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Prunes a matrix.

        Args:
            dense: ``[rows, cols]`` of float32, bfloat16 or float16.

        Returns:
            the pruned matrix, dense with zeros, whose gradient passes to ``dense`` as it is; and the mask of bool.

        Raises:
            ValueError: for a NaN, with its place.
            RuntimeError: for another rank.
            NotImplementedError: for another type.
        """
        if dense.dim() != 2:
            raise RuntimeError(f"a matrix is required; the tensor has {dense.dim()} dimensions")
        if dense.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise NotImplementedError(f"float32, bfloat16 or float16 is required; the matrix has {dense.dtype}")
        values = dense.detach()
        mask = _optimum(values) if self.abs else _signed_optimum(values)
        return straight_through(dense, values.masked_fill(~mask, 0)), mask

    def extra_repr(self) -> str:
        return f"abs={self.abs}"
