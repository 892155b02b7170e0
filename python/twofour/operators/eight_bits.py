"""2:4 matrices of 8-bit integers and floats from dense ones."""

from __future__ import annotations

import torch

from .. import operators
from .float8 import saturated
from .packed import pack_by_rule


def cast(dense: torch.Tensor) -> torch.Tensor:
    """A matrix in int8, cut towards zero.

    Raises:
        ValueError: for a number that int8 does not have, with its place.
    """
    if dense.dtype is torch.int8:
        return dense
    whole = dense.trunc()
    outside = ~((whole >= -128) & (whole <= 127))
    if outside.any():
        row, col = outside.nonzero()[0].tolist()
        raise ValueError(f"row {row}, column {col}: {dense[row, col].item()} is outside int8; scale the matrix first")
    return whole.to(torch.int8)


def kept(
    dense: torch.Tensor,
    mask: torch.Tensor | None,
    seed: int | torch.Tensor | None,
    prune: bool | str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a mask, an unbiased estimate or a mask rule keeps of a matrix, in int8 or an 8-bit float, with zeros
    elsewhere.

    Args:
        dense: the matrix, ``[rows, cols]``, of floats or of ``dtype``.
        mask: what to keep, 2:4 along rows; or ``None``.
        seed: that of the estimate; or ``None``.
        prune: otherwise, ``True`` or the name of the rule, which compares magnitudes before the cast.
        dtype: the type of the result.

    Returns:
        the matrix, and the rule's mask in tiles where it is 2:4 along columns, too.

    Raises:
        ValueError: for a number that int8 does not have, with its place; for a NaN that would have to be ordered; for
            an unknown rule.
    """
    # float16 has all numbers of 8 bits.
    floats = dense if dense.dtype in operators.TYPES else dense.half()
    tiles = None
    if mask is not None:
        floats = floats.masked_fill(~mask.bool(), 0)
    elif seed is not None:
        floats = operators.estimated(floats.contiguous(), operators.ESTIMATORS["mvue"], seed)
        floats = _rounded(floats, int(seed)) if dtype is torch.int8 else saturated(floats, dtype)
    else:
        rule = "magnitude" if prune is True else prune
        weight, tiles = pack_by_rule(floats, rule, transpose=False)
        floats, tiles = weight.to_dense(), None if rule == "magnitude" else tiles
    return cast(floats) if dtype is torch.int8 else floats.to(dtype), tiles


def _rounded(estimate: torch.Tensor, seed: int) -> torch.Tensor:
    """Each number rounded up as often as its fraction says, so that the mean is the number."""
    generator = torch.Generator(estimate.device).manual_seed(seed)
    below = estimate.float().floor()
    return below + (torch.rand(estimate.shape, generator=generator, device=estimate.device) < estimate.float() - below)
