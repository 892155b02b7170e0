"""GEMMs with 2:4 weights of integers, and their derivatives."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import operators
from .derivatives import applied, derivable, is_differentiated, save


def integer_linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    group_size: int,
) -> torch.Tensor:
    """``x @ W.T + bias`` for a packed ``W`` of integers, with derivatives of ``x`` and of the bias where they are
    needed.

    Args:
        x: ``[..., cols]``.
        packed: the integers: of 8 bits where there are scales, and otherwise of 4 bits with scales of their own.
        scales: ``[rows]`` of float32, or ``None``.
        bias: ``[rows]``, or ``None``.
        shape: rows and columns of ``W``.
        group_size: of 4-bit integers: how many columns share a scale.

    Raises:
        RuntimeError: for another number of features.
        NotImplementedError: for an input without a kernel.
    """
    if not x.shape or x.shape[-1] != shape[1]:
        raise RuntimeError(f"the input has shape {list(x.shape)}; its last dimension must be in_features = {shape[1]}")
    if is_differentiated(x, bias):
        y = applied(IntegerLinear, x, packed, scales, *shape, group_size)
        return y if bias is None else y + bias.to(y.dtype)
    return _multiply(x, packed, scales, bias, shape[0], group_size)


def _multiply(x, packed, scales, bias, rows: int, group_size: int) -> torch.Tensor:
    if scales is None:
        if bias is None:
            return operators.linear_int4(x, packed, rows, group_size)
        return operators.linear_int4_bias(x, packed, bias, rows, group_size, 0)
    if bias is None:
        return operators.linear_quantized(x, packed, scales, rows)
    return operators.linear_quantized_bias(x, packed, scales, bias, rows, 0)


def dequantized(
    packed: torch.Tensor, scales: torch.Tensor | None, rows: int, cols: int, group_size: int
) -> torch.Tensor:
    """Integers times scales, dense, in float32."""
    if scales is not None:
        return operators.unpack(packed, rows, cols).float() * scales[:, None]
    return operators.dequantize_int4(packed, rows, cols, group_size)


@derivable
class IntegerLinear(torch.autograd.Function):
    """``x @ W.T`` for a ``W`` of integers. Its derivatives are dense GEMMs with the dequantized weight: the rounding of
    ``x``, where there is one, counts as none (straight-through)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, packed, scales, rows, cols, group_size):
        return _multiply(x, packed, scales, None, rows, group_size)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, packed, scales, *ctx.shape = inputs
        save(ctx, packed, scales)

    @staticmethod
    def backward(ctx, dy):
        weight = dequantized(*ctx.saved_tensors, *ctx.shape)
        return dy @ weight.to(dy.dtype), None, None, None, None, None

    @staticmethod
    def tangent(ctx, x_tangent, *_):
        weight = dequantized(*ctx.saved_tensors, *ctx.shape)
        return F.linear(x_tangent, weight.to(x_tangent.dtype))
