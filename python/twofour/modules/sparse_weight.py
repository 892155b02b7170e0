"""Linear layers whose weight is a sparse tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling

from ..tensor.semi_structured import SparseSemiStructuredTensor, linear_in_graph


class Linear(nn.Linear):
    """An ``nn.Linear`` with a 2:4 tensor for its weight, a parameter.

    A compiled model takes the tensor inside for its input. It would take the parameter of an ``nn.Linear`` apart in
    every call, which takes longer than a GEMM of few tokens.
    """

    COMPUTES_AS_LINEAR = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not torch.compiler.is_exporting, which torch 2.11 takes for true wherever it compiles.
        if is_dynamo_compiling() and not torch.compiler._is_exporting_flag:
            return linear_in_graph(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def set_sparse_weight(module: nn.Module, weight: nn.Parameter) -> nn.Module:
    """Gives a layer a sparse weight. An ``nn.Linear`` with a 2:4 tensor is a :class:`Linear` of this module from then
    on; a layer of another class keeps it, and so a ``forward`` of its own.

    Returns:
        the layer.
    """
    module.weight = weight
    if type(module) is nn.Linear and isinstance(weight, SparseSemiStructuredTensor):
        module.__class__ = Linear
    return module
