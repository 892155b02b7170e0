"""Training with 2:4 weights or activations, under the names of ``torchao.sparsity.training``."""

from ..modules.convolution import SemiSparseConv1d, SemiSparseConv2d
from ..modules.training import (
    GRADIENT_TYPE,
    SemiSparseActivationLinear,
    SemiSparseLinear,
    keep_masks,
    semi_structured_sparsify,
    semi_structured_sparsify_like,
    swap_linear_with_semi_sparse_linear,
    swap_semi_sparse_linear_with_linear,
)

__all__ = [
    "GRADIENT_TYPE",
    "SemiSparseActivationLinear",
    "SemiSparseConv1d",
    "SemiSparseConv2d",
    "SemiSparseLinear",
    "keep_masks",
    "semi_structured_sparsify",
    "semi_structured_sparsify_like",
    "swap_linear_with_semi_sparse_linear",
    "swap_semi_sparse_linear_with_linear",
]
