"""The gated GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Function(torch.autograd.Function):
    """``x * gelu(g)`` of the halves of one tensor, which is all that is saved."""

    @staticmethod
    def forward(ctx, halves):
        ctx.save_for_backward(halves)
        x, g = halves.chunk(2, dim=-1)
        return x * F.gelu(g, approximate="tanh")

    @staticmethod
    def backward(ctx, dy):
        (halves,) = ctx.saved_tensors
        x, g = halves.chunk(2, dim=-1)
        gradient = torch.empty_like(halves)
        dx, dg = gradient.chunk(2, dim=-1)
        dx.copy_(dy * F.gelu(g, approximate="tanh"))
        dg.copy_(torch.ops.aten.gelu_backward(dy * x, g, approximate="tanh"))
        return gradient


class GELUglu(nn.Module):
    """``x * gelu(g)`` with the tanh approximation of GELU, where ``x`` is the first half of the input's last dimension and ``g`` the
    second: GEGLU (Shazeer, "GLU Variants Improve Transformer", 2020).

    The memory format of the input, row-major or column-major, is that of output and gradient. Only the input is saved for the backward
    pass. Any number of rows; the toolkit's kernel takes as many as one thread block can.
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
        return _Function.apply(input)
