"""2:4 matrices of 8-bit integers from dense ones."""

from __future__ import annotations

import torch

from .. import operators
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
    dense: torch.Tensor, mask: torch.Tensor | None, seed: int | torch.Tensor | None, prune: bool | str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a mask, an unbiased estimate or a mask rule keeps of a matrix, in int8.

    Args:
        dense: the matrix, ``[rows, cols]``, of int8 or floats.
        mask: what to keep, 2:4 along rows; or ``None``.
        seed: that of the estimate; or ``None``.
        prune: otherwise, ``True`` or the name of the rule, which compares magnitudes before the cast.

    Returns:
        the matrix with zeros, in int8, and the rule's mask in tiles where it is 2:4 along columns, too.

    Raises:
        ValueError: for a number that int8 does not have, with its place; for an unknown rule.
    """
    if mask is not None:
        return cast(dense.masked_fill(~mask.bool(), 0)), None
    # float16 has all numbers of int8.
    floats = dense if dense.is_floating_point() else dense.half()
    if seed is not None:
        return cast(_rounded(operators.estimated(floats.contiguous(), operators.ESTIMATORS["mvue"], seed), int(seed))), None
    rule = "magnitude" if prune is True else prune
    weight, tiles = pack_by_rule(floats, rule, transpose=False)
    return cast(weight.to_dense()), None if rule == "magnitude" else tiles


def _rounded(estimate: torch.Tensor, seed: int) -> torch.Tensor:
    """Each number rounded up as often as its fraction says, so that the mean is the number."""
    generator = torch.Generator(estimate.device).manual_seed(seed)
    below = estimate.float().floor()
    return below + (torch.rand(estimate.shape, generator=generator, device=estimate.device) < estimate.float() - below)
