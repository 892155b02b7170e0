"""Linear layers whose weight is a sparse tensor. Importing this module lets every ``nn.Linear`` become one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..tensor.semi_structured import SparseSemiStructuredTensor, linear_in_graph


class Linear(nn.Linear):
    """An ``nn.Linear`` with a 2:4 tensor for its weight, a parameter.

    A compiled model takes the tensor inside for its input. It would take the parameter of an ``nn.Linear`` apart in
    every call, which takes longer than a GEMM of few tokens.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Not torch.compiler.is_exporting, which torch 2.11 takes for true wherever it compiles.
        if is_dynamo_compiling() and not torch.compiler._is_exporting_flag:
            return linear_in_graph(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


def _when_registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
    """An ``nn.Linear`` is a :class:`Linear` of this module for as long as its weight is a 2:4 tensor. A layer of another
    class keeps it, and so a ``forward`` of its own."""
    if name == "weight" and type(module) in (nn.Linear, Linear):
        module.__class__ = Linear if isinstance(parameter, SparseSemiStructuredTensor) else nn.Linear


register_module_parameter_registration_hook(_when_registered)
