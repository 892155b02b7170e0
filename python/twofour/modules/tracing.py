"""``torch.fx.symbolic_trace`` of models with layers of this package, whose forward passes ask for types and shapes that
symbols do not have."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.fx import Proxy


def call_layer(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The layer's forward pass without its hooks, which a traced program contains as calls of their own."""
    return layer.forward(x)


def traceable(forward):
    """A layer's forward pass that a traced program holds as one call."""

    @functools.wraps(forward)
    def call(self, x):
        # Asked first, since it takes least.
        if type(x) is not torch.Tensor and isinstance(x, Proxy):
            return _recorded(self, x)
        return forward(self, x)

    return call


def _recorded(layer: nn.Module, x: Proxy) -> Proxy:
    path = x.tracer.path_of_module(layer)
    if not path:
        raise TypeError(
            f"torch.fx traces a {type(layer).__name__} as a part of a model: wrap it in torch.nn.Sequential"
        )
    return x.tracer.create_proxy("call_function", call_layer, (x.tracer.create_proxy("get_attr", path, (), {}), x), {})
