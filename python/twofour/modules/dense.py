"""Turns a model with sparse or quantized weights into one that any program reads."""

from __future__ import annotations

import torch
from torch import nn

from ..tensor.blocksparse import BlockSparseTensor
from . import sparse_weight
from .conversion import SparseLayer, is_sparse, is_training_layer, replace
from .convolution import _Convolution, _SemiSparse
from .integers import IntegerLayer
from .low_rank import LowRankLinear
from .training import swap_semi_sparse_linear_with_linear


@torch.no_grad()
def to_dense(model: nn.Module) -> int:
    """Replaces the layers and weights of this package in ``model``, in place, by dense ones with zeros: what exporters
    to ONNX and others that know nothing of this package require.

    The model computes what it computed in evaluation, within the rounding of dense products; integers become numbers of
    the type that the layer returned, factors their product, and the rounding of activations to 8 bits is gone. Memory grows to that of the
    dense model.

    Args:
        model: the model; it must not be such a layer itself.

    Returns:
        the number of weights that became dense.

    Raises:
        ValueError: where ``model`` itself is such a layer: use its ``to_dense``.
    """
    if isinstance(model, (SparseLayer, IntegerLayer, LowRankLinear, _Convolution, _SemiSparse)):
        raise ValueError(
            f"the model itself is a {type(model).__name__}, which cannot be replaced in place: use its to_dense()"
        )
    count = sum(map(is_training_layer, model.modules()))
    swap_semi_sparse_linear_with_linear(model)
    layers = list(model.modules())
    inside = {id(layer.linear) for layer in layers if isinstance(layer, _Convolution)}
    inside |= {id(part) for layer in layers if isinstance(layer, LowRankLinear) for part in layer.children()}
    pairs = []
    for layer in layers:
        if isinstance(layer, IntegerLayer):
            pairs.append((layer, _of_integers(layer)))
        elif isinstance(layer, (SparseLayer, LowRankLinear, _Convolution, _SemiSparse)) and id(layer) not in inside:
            pairs.append((layer, layer.to_dense()))
    replace(model, pairs)
    count += len(pairs)
    dense = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, BlockSparseTensor) or is_sparse(parameter):
                if id(parameter) not in dense:
                    dense[id(parameter)] = nn.Parameter(parameter.to_dense(), requires_grad=parameter.requires_grad)
                module._parameters[name] = dense[id(parameter)]
        if type(module) is sparse_weight.Linear:
            module.__class__ = nn.Linear
    return count + len(dense)


def _of_integers(layer: IntegerLayer) -> nn.Linear:
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    bias = None if layer.bias is None else nn.Parameter(layer.bias, requires_grad=False)
    weight = nn.Parameter(layer.to_dense().to(layer.weight_dtype), requires_grad=False)
    dense._parameters.update(weight=weight, bias=bias)
    return dense.train(layer.training)
