"""Dense tensors pruned to 2:4 along their last dimension: hard, soft, at random."""

from __future__ import annotations

import torch

from .. import operators
from ..operators import masks
from ..operators.autograd import Straight
from ..operators.derivatives import applied


def straight_through(dense: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
    """``stand_in``, whose gradient is that of ``dense``."""
    return applied(Straight, dense, stand_in)


def as_matrix(dense: torch.Tensor) -> torch.Tensor:
    """The tensor as a matrix whose rows are its last dimension.

    Raises:
        RuntimeError: for a tensor without dimensions.
    """
    if dense.dim() == 0:
        raise RuntimeError("a tensor with at least 1 dimension is required: groups of four lie along the last one")
    return dense.detach().reshape(-1, dense.shape[-1]).contiguous()


def _stand_in(dense: torch.Tensor, estimator: str, seed: int | torch.Tensor = 0) -> torch.Tensor:
    return operators.estimated(as_matrix(dense), operators.ESTIMATORS[estimator], seed).view(dense.shape)


def _two_largest(dense: torch.Tensor) -> torch.Tensor:
    matrix = as_matrix(dense)
    return masks.mask_of(operators.select(matrix, operators.rule_number("magnitude")), *matrix.shape).view(dense.shape)


def sparse24(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps the two largest magnitudes of each group of four along the last dimension.

    Args:
        dense: ``[..., cols]`` of float32, bfloat16 or float16; a last, incomplete group counts as filled with zeros.

    Returns:
        the pruned tensor, dense with zeros, whose gradient passes to ``dense`` as it is; and the mask of bool. Ties go
        to the lower index; the toolkit's Triton kernel takes the higher one, its torch version either.

    Raises:
        ValueError: for a NaN, with its place.
        NotImplementedError: for another type.
    """
    mask = _two_largest(dense)
    return straight_through(dense, dense.detach().masked_fill(~mask, 0)), mask


def soft_threshold24(dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps the two largest magnitudes of each group of four, each less the third largest: ``sign(w) * (|w| - t)``.

    It is continuous in the group, which :func:`sparse24` is not. (Hu et al., "S-STE: Continuous Pruning Function for
    Efficient 2:4 Sparse Pre-training", NeurIPS 2024.)

    Args:
        dense: ``[..., cols]`` of float32, bfloat16 or float16; a last, incomplete group counts as filled with zeros.

    Returns:
        the pruned tensor, dense with zeros, whose gradient passes to ``dense`` as it is; and the mask of bool of the
        two largest.

    Raises:
        ValueError: for a NaN or an infinity, with its place.
        NotImplementedError: for another type.
    """
    return straight_through(dense, _stand_in(dense, "soft-threshold")), _two_largest(dense)


def MVUE24_approx(dense: torch.Tensor, seed: int | torch.Tensor | None = None) -> torch.Tensor:
    """Draws two elements of each group of four, in proportion to magnitudes, and enlarges them so that the mean is the
    group.

    Its variance is about 6 % above the least one. (Chmiel et al., "Minimum Variance Unbiased N:M Sparsity for the
    Neural Gradients", ICLR 2023.) The toolkit draws the same random numbers for several groups of a column-major
    tensor, and its "exact" variant is biased; neither is so here.

    Args:
        dense: ``[..., cols]`` of float32, bfloat16 or float16.
        seed: what the random numbers depend on, with a group's place: a number, or a tensor of one int64, which
            ``torch.compile`` does not compile anew for. By default it is drawn from torch's default generator of the
            tensor's device.

    Returns:
        the estimate, dense with zeros, without a gradient.

    Raises:
        ValueError: for a NaN or an infinity, with its place.
        NotImplementedError: for another type.
    """
    if seed is None:
        seed = operators.new_seed(dense.device)
    return _stand_in(dense, "mvue-approximate", seed)
