"""Gradients through GEMMs with a packed weight. These functions are entered only where a gradient is needed."""

from __future__ import annotations

import torch

from . import _ops
from ._packed import Packed


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``dy.T @ x`` over all leading dimensions, dense."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def bias_gradient(dy: torch.Tensor) -> torch.Tensor:
    """The sums of ``dy`` over all leading dimensions."""
    # torch.compile fuses the sums of torch with what comes before; alone they are slower than the operator's.
    if dy.is_cuda and dy.dtype in _ops.TYPES and not torch.compiler.is_compiling():
        return _ops.bias_gradient(dy)
    return dy.reshape(-1, dy.shape[-1]).sum(0)


class FrozenLinear(torch.autograd.Function):
    """``x @ W.T + bias`` for a sparse ``W`` without a gradient of its own. ``W`` must not change until the backward pass, as in torch."""

    @staticmethod
    def forward(ctx, x, packed: Packed, bias):
        ctx.packed = packed
        ctx.save_for_backward(*packed.tensors())
        return packed.times_transpose(x, bias)

    @staticmethod
    def backward(ctx, dy):
        dx = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.packed.with_tensors(ctx.saved_tensors).times(dy)
        if ctx.needs_input_grad[2]:
            db = bias_gradient(dy)
        return dx, None, db


class SparseLinear(torch.autograd.Function):
    """``x @ W.T + bias`` for a sparse ``W`` with a gradient: the input gradient is a sparse GEMM, the weight gradient a dense one.

    The gradient of the weight is not masked: pruned elements have one, too (straight-through).
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.packed = weight.packed_weight
        ctx.save_for_backward(x, *ctx.packed.tensors())
        return ctx.packed.times_transpose(x, bias)

    @staticmethod
    def backward(ctx, dy):
        x, *tensors = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = ctx.packed.with_tensors(tensors).times(dy)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x)
        if ctx.needs_input_grad[2]:
            db = bias_gradient(dy)
        return dx, dw, db


def differentiable_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` with a sparse weight, with gradients where they are needed."""
    # The weight is asked last: reading an attribute of a tensor subclass costs as much as the call itself.
    if torch.is_grad_enabled():
        if weight.requires_grad:
            return SparseLinear.apply(x, weight, bias)
        if x.requires_grad or (bias is not None and bias.requires_grad):
            return FrozenLinear.apply(x, weight.packed_weight, bias)
    return weight.packed_weight.times_transpose(x, bias)
