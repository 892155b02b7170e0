"""Pruning and compressing the layers of a model, under the names of ``torchao.sparsity.sparse_api``."""

from ..modules.sparsify import (
    BlockSparseWeightConfig,
    SemiSparseWeightConfig,
    apply_fake_sparsity,
    block_sparse_weight,
    semi_sparse_weight,
    sparsify_,
)

__all__ = [
    "BlockSparseWeightConfig",
    "SemiSparseWeightConfig",
    "apply_fake_sparsity",
    "block_sparse_weight",
    "semi_sparse_weight",
    "sparsify_",
]
