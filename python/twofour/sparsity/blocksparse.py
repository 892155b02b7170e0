"""Weights in square blocks, most of which are zero, under the names of ``torchao.sparsity.blocksparse``."""

from ..tensor.blocksparse import BlockSparseTensor, _rebuild

__all__ = ["BlockSparseTensor"]
