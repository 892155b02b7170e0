"""The gated GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .. import operators
from ..operators.derivatives import applied, derivable, is_differentiated, save


def _rows(halves: torch.Tensor) -> torch.Tensor | None:
    """What the native operator computes on, in the order of its memory: rows of two halves. ``None`` where torch
    computes.

    The operator is for the host's memory and three types. A program that is compiled keeps torch's operators, which are
    fused with others.
    """
    if not halves.is_cpu or halves.dtype not in operators.TYPES or torch.compiler.is_compiling():
        return None
    if _is_column_major(halves):
        # Both halves are whole blocks of the memory.
        return halves.mT.reshape(1, -1)
    return halves


def _is_column_major(x: torch.Tensor) -> bool:
    return x.dim() == 2 and not x.is_contiguous() and x.mT.is_contiguous()


@derivable
class _Function(torch.autograd.Function):
    """``x * gelu(g)`` of the halves of one tensor, which is all that is saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(halves):
        rows = _rows(halves)
        if rows is not None:
            y = operators.gated_gelu(rows)
            return y if rows is halves else y.view(-1, halves.shape[0]).mT
        x, g = halves.chunk(2, dim=-1)
        return x * F.gelu(g, approximate="tanh")

    @staticmethod
    def setup_context(ctx, inputs, output):
        save(ctx, *inputs)

    @staticmethod
    def backward(ctx, dy):
        (halves,) = ctx.saved_tensors
        if is_differentiated(halves, dy):
            x, g = halves.chunk(2, dim=-1)
            dg = torch.ops.aten.gelu_backward(dy * x, g, approximate="tanh")
            return torch.cat((dy * F.gelu(g, approximate="tanh"), dg), dim=-1)
        rows = _rows(halves)
        if rows is not None and dy.dtype is halves.dtype:
            if rows is halves:
                return operators.gated_gelu_gradient(rows, dy)
            return operators.gated_gelu_gradient(rows, dy.mT.reshape(1, -1)).view(-1, halves.shape[0]).mT
        x, g = halves.chunk(2, dim=-1)
        gradient = torch.empty_like(halves)
        dx, dg = gradient.chunk(2, dim=-1)
        dx.copy_(dy * F.gelu(g, approximate="tanh"))
        dg.copy_(torch.ops.aten.gelu_backward(dy * x, g, approximate="tanh"))
        return gradient

    @staticmethod
    def tangent(ctx, tangent):
        (halves,) = ctx.saved_tensors
        (x, g), (x_tangent, g_tangent) = halves.chunk(2, dim=-1), tangent.chunk(2, dim=-1)
        return x_tangent * F.gelu(g, approximate="tanh") + torch.ops.aten.gelu_backward(
            x * g_tangent, g, approximate="tanh"
        )


class GELUglu(nn.Module):
    """``x * gelu(g)`` with the tanh approximation of GELU, where ``x`` is the first half of the input's last dimension
    and ``g`` the second: GEGLU (Shazeer, "GLU Variants Improve Transformer", 2020).

    The memory format of the input, row-major or column-major, is that of output and gradient. Only the input is saved
    for the backward pass. Any number of rows; the toolkit's kernel takes as many as one thread block can.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Computes the gated GELU.

        Args:
            input: ``[..., 2 * features]``, of any floating-point type.

        Returns:
            ``[..., features]``.

        Raises:
            ValueError: where the last dimension is odd, or there is none.
        """
        if input.dim() == 0 or input.shape[-1] % 2:
            raise ValueError(f"GELUglu requires an even last dimension; the input has shape {tuple(input.shape)}")
        return applied(_Function, input)
