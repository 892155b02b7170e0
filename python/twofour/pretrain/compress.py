"""Compressing, as the toolkit spells it."""

from __future__ import annotations

import torch

from .. import sparse


def to_sparse_semi_structured(
    original_tensor: torch.Tensor,
    transposed: bool = False,
    MVUE24: bool = False,
    mask: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> sparse.SparseSemiStructuredTensor:
    """Prunes a matrix to 2:4 along its rows and compresses it: :func:`twofour.sparse.to_sparse_semi_structured`, which
    by default prunes nothing.

    Of equal magnitudes the earlier ones are kept; in the toolkit it depends on the function. The result has the
    matrix's type unless ``dtype`` says otherwise; the toolkit's is float16 then. Its casts to int8 wrap where a number
    is too large, which is an error here.

    Args:
        original_tensor: the matrix, ``[rows, cols]``, of float32, bfloat16, float16 or int8, on a CPU or a GPU. Any
            shape.
        transposed: deprecated and without effect.
        MVUE24: keeps an unbiased 2:4 estimate of least variance instead (Chmiel et al., "Minimum Variance Unbiased N:M
            Sparsity for the Neural Gradients", ICLR 2023), drawn anew in each call from torch's generator.
        mask: keeps what it says instead: ``[rows, cols]`` of bool, 2:4 along rows.
        dtype: the type of the result.

    Returns:
        the tensor.

    Raises:
        ValueError: for a mask that is not 2:4, a NaN, a number outside int8, each with its place; for both ``mask`` and
            ``MVUE24``.
        RuntimeError: for another rank or an unsupported type.
    """
    prune = mask is None and not MVUE24
    return sparse.to_sparse_semi_structured(
        original_tensor, transposed, mask=mask, MVUE24=MVUE24, dtype=dtype, prune=prune
    )
