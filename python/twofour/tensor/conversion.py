"""2:4 tensors from dense ones."""

from __future__ import annotations

import warnings

import torch

from .. import operators
from ..operators import eight_bits, masks
from ..operators.float8 import FLOAT8
from ..operators.packed import Packed, pack_by_mask, pack_by_rule, pack_sparse
from .semi_structured import (
    SparseSemiStructuredTensor,
    SparseSemiStructuredTensorCUSPARSELT,
    SparseSemiStructuredTensorCUTLASS,
)


def to_sparse_semi_structured(
    original_tensor: torch.Tensor,
    transposed: bool = False,
    alg_id: int = 0,
    *,
    mask: torch.Tensor | None = None,
    MVUE24: bool = False,
    dtype: torch.dtype | None = None,
    prune: bool | str = False,
    seed: int | torch.Tensor | None = None,
) -> SparseSemiStructuredTensor:
    """Compresses a matrix to a 2:4 tensor.

    Args:
        original_tensor: the matrix, ``[rows, cols]``, of float32, bfloat16, float16, int8, float8_e4m3fn or
            float8_e5m2, on a CPU or a GPU. Any shape. 8-bit floats are multiplied by ``torch._scaled_mm``, with scales.
        transposed: deprecated and without effect, as in torch.
        alg_id: accepted for torch's sake; kernels are chosen by shape.
        mask: what to keep, ``[rows, cols]`` of bool, 2:4 along rows.
        MVUE24: replaces the matrix by its unbiased 2:4 estimate of least variance, drawn
            anew in each call from torch's generator of the matrix's device, or from ``seed``, a number or a tensor of
            one int64.
        dtype: the type of the result; that of the matrix by default. To int8 floats are cast after it is chosen what is
            kept: towards zero, or, with ``MVUE24``, up or down at random, so that the mean is the matrix.
        prune: ``True`` keeps the two largest magnitudes of each group; or the name of a mask rule: ``"magnitude"``,
            ``"greedy"``, ``"greedy-signed"``, ``"causal1122"``, ``"optimal"``. By default the matrix must be 2:4
            already.

    Returns:
        the tensor; its gradient, where the matrix needs one, is that of a leaf.

    Raises:
        ValueError: where the matrix or the mask is not 2:4, with row and group; for a NaN that would have to be
            ordered; for more than one of ``mask``, ``MVUE24`` and ``prune``; for a number outside int8, with its place.
            An estimate of integers up to 63 in magnitude stays inside.
        RuntimeError: for another rank or an unsupported type.
    """
    if transposed:
        warnings.warn(
            "Setting transpose from `to_sparse_semi_structured` is deprecated and has no effect: transpose the result "
            "with .t()",
            FutureWarning,
            stacklevel=2,
        )
    if sum((mask is not None, MVUE24, bool(prune))) > 1:
        raise ValueError("mask, MVUE24 and prune exclude each other: each says which elements are kept")
    cls = (
        SparseSemiStructuredTensorCUTLASS
        if SparseSemiStructuredTensor._FORCE_CUTLASS
        else SparseSemiStructuredTensorCUSPARSELT
    )
    to_integers = torch.int8 in (dtype, original_tensor.dtype)
    if dtype is not None and not to_integers:
        original_tensor = original_tensor.to(dtype)
    if mask is None and not MVUE24 and not prune:
        return cls.from_dense(eight_bits.cast(original_tensor) if dtype is torch.int8 else original_tensor, alg_id)
    cls._validate_device_dim_dtype_shape(original_tensor)
    dense = original_tensor.detach()
    if mask is not None and mask.shape != dense.shape:
        raise RuntimeError(
            f"the mask has shape {tuple(mask.shape)}, the tensor {tuple(dense.shape)}: both must be the same"
        )
    if MVUE24 and seed is None:
        seed = operators.new_seed(dense.device)
    if to_integers or original_tensor.dtype in FLOAT8:
        if mask is not None:
            _verified(mask.bool())
        kept, tiles = eight_bits.kept(
            dense, mask, seed if MVUE24 else None, prune, torch.int8 if to_integers else dense.dtype
        )
        weight = pack_sparse(kept)
        if tiles is not None and not to_integers:
            weight = Packed(weight.rows, weight.cols, weight.forward, pack_sparse(kept.t().contiguous()).forward)
        sparse = cls._of(weight, tiles)
        sparse = sparse if dtype in (None, kept.dtype) else sparse.to(dtype)
    elif mask is not None:
        sparse = cls._of(pack_by_mask(dense, _verified(mask.bool()), False), None, original_tensor.requires_grad)
    elif MVUE24:
        estimate = operators.estimated(dense.contiguous(), operators.ESTIMATORS["mvue"], seed)
        sparse = cls.from_dense(estimate, alg_id)
    else:
        rule = "magnitude" if prune is True else prune
        weight, tiles = pack_by_rule(dense, rule, transpose=rule != "magnitude")
        sparse = cls._of(weight, None if rule == "magnitude" else tiles, original_tensor.requires_grad)
    sparse.alg_id_cusparselt = alg_id
    return sparse


def _verified(mask: torch.Tensor) -> torch.Tensor:
    """The tiles of a mask that is 2:4 along rows.

    Raises:
        ValueError: where it is not; the message names the first row and group.
    """
    groups = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 4)).view(mask.shape[0], -1, 4).sum(-1)
    if (groups > 2).any():
        row, group = (groups > 2).nonzero()[0].tolist()
        raise ValueError(
            f"row {row}, group {group}: the mask keeps {int(groups[row, group])} elements where 2:4 allows 2"
        )
    return masks.tiles_of(mask)
