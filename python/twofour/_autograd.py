"""Gradients through GEMMs with a packed weight. These functions are entered only where a gradient is needed."""

from __future__ import annotations

import torch

from ._packed import Packed


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``dy.T @ x`` over all leading dimensions, dense."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


class LinearFunction(torch.autograd.Function):
    """``x @ W.T + bias`` with a sparse ``W``: the input gradient is a sparse GEMM, the weight gradient a dense one.

    The gradient of the weight is not masked: pruned elements have one, too (straight-through).
    """

    @staticmethod
    def forward(x, weight, bias):
        return weight.packed_weight.times_transpose(x, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, bias = inputs
        ctx.weight_dtype = weight.dtype
        ctx.has_bias = bias is not None
        ctx.packed = weight.packed_weight
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, *ctx.packed.tensors())

    @staticmethod
    def backward(ctx, dy):
        x, *tensors = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.packed.map(_replacing(ctx.packed, tensors)).times(dy)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            db = dy.reshape(-1, dy.shape[-1]).sum(0)
        return dx, dw, db


def _replacing(packed: Packed, tensors: list[torch.Tensor]):
    """Maps the tensors of ``packed``, in order, to others, which torch has checked for changes since the forward pass."""
    pairs = {id(old): new for old, new in zip(packed.tensors(), tensors, strict=True)}
    return lambda tensor: pairs[id(tensor)]


def differentiable_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` with a sparse weight, with gradients where they are needed."""
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return LinearFunction.apply(x, weight, bias)
    return weight.packed_weight.times_transpose(x, bias)
