"""Sparse training of models, under the names of ``torchao.sparsity``."""

from . import training

__all__ = ["training"]
