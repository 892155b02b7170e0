"""Pruning and sparse training of models, under the names of ``torchao.sparsity``.

=============================  ==================================================================
:func:`sparsify_`              weights that are 2:4, or zero in blocks, become sparse tensors
:func:`apply_fake_sparsity`    prunes weights by magnitude, in place
:mod:`.training`               layers that prune in every forward pass
:mod:`.supermask`              a layer that learns which blocks of its weight to keep
:mod:`.wanda`                  pruning by magnitude and input norm
:mod:`.utils`                  masks and test data
=============================  ==================================================================

The schedulers and other sparsifiers of ``torch.ao.pruning`` are part of torch: after their ``squash_mask``
:func:`sparsify_` compresses what they pruned.
"""

from ..modules.sparsify import (
    BlockSparseWeightConfig,
    SemiSparseWeightConfig,
    apply_fake_sparsity,
    block_sparse_weight,
    semi_sparse_weight,
    sparsify_,
)
from ..modules.wanda import PerChannelNormObserver, WandaSparsifier
from ..tensor.blocksparse import BlockSparseTensor
from . import training, utils
from .supermask import SupermaskLinear
from .utils import create_semi_structured_tensor, mask_creator

__all__ = [
    "BlockSparseTensor",
    "BlockSparseWeightConfig",
    "PerChannelNormObserver",
    "SemiSparseWeightConfig",
    "SupermaskLinear",
    "WandaSparsifier",
    "apply_fake_sparsity",
    "block_sparse_weight",
    "create_semi_structured_tensor",
    "mask_creator",
    "semi_sparse_weight",
    "sparsify_",
    "training",
    "utils",
]
