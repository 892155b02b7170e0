"""A linear layer that learns which blocks of its weight to keep, under the name of ``torchao.sparsity.supermask``.

The method is that of Ramanujan et al., "What's Hidden in a Randomly Weighted Neural Network?" (CVPR 2020): every block
of the weight has a score, the blocks with the highest scores are kept, and the gradient of the mask goes to the scores
as if the choice were the identity.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..operators.magnitude import keep_largest

__all__ = ["SupermaskLinear"]


class _Kept(torch.autograd.Function):
    """One for the highest scores, zero for the others; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, kept: int) -> torch.Tensor:
        return keep_largest(scores.flatten(), kept).view_as(scores).to(scores.dtype)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient, None


class SupermaskLinear(nn.Linear):
    """A linear layer whose weight is multiplied by a mask of square blocks, chosen by learned scores.

    Of ``B`` blocks ``round(sparsity_level * B)`` are zero, those with the lowest scores. Where the block does not
    divide the weight, blocks at the end are cut off and count like the others.

    Args:
        sparsity_level: the share of blocks that are zero, from 0 to less than 1.
        blocksize: elements along each side of a block.
        fixed_mask: the scores are not learned.
        fixed_weight: the weight is not learned.
        *args: those of ``nn.Linear``, like the keyword arguments.

    Attributes:
        scores: ``[ceil(out / blocksize), ceil(in / blocksize)]``.

    Raises:
        ValueError: where the level leaves no block, or the block has no elements.
    """

    def __init__(
        self, sparsity_level: float, blocksize: int, fixed_mask: bool, fixed_weight: bool, *args, **kwargs
    ) -> None:
        super().__init__(*args, **kwargs)
        if blocksize < 1:
            raise ValueError(f"a block must have at least one element along each side; blocksize is {blocksize}")
        shape = [math.ceil(size / blocksize) for size in self.weight.shape]
        blocks = math.prod(shape)
        if not 0 <= sparsity_level <= 1 or round(sparsity_level * blocks) >= max(blocks, 1):
            raise ValueError(
                f"sparsity_level={sparsity_level} leaves none of the {blocks} blocks of {blocksize}x{blocksize} in a "
                f"weight {tuple(self.weight.shape)}; it must be at least 0 and at most {1 - 1 / max(blocks, 1)}"
            )
        self.sparsity_level = sparsity_level
        self.blocksize = blocksize
        self.scores = nn.Parameter(
            torch.empty(shape, dtype=self.weight.dtype, device=self.weight.device), requires_grad=not fixed_mask
        )
        # As nn.Linear draws its weight.
        nn.init.uniform_(self.scores, -1 / math.sqrt(max(shape[1], 1)), 1 / math.sqrt(max(shape[1], 1)))
        self.weight.requires_grad_(not fixed_weight)

    @classmethod
    def from_linear(cls, linear: nn.Linear, sparsity_level: float = 0.0, blocksize: int = 1) -> SupermaskLinear:
        """A layer with the parameters of ``linear``, as the same objects; both weight and mask are learned.

        Args:
            linear: the layer.
            sparsity_level: the share of blocks that are zero.
            blocksize: elements along each side of a block.

        Raises:
            TypeError: for a layer that is no ``nn.Linear``.
        """
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"a torch.nn.Linear is required, not a {type(linear).__name__}")
        with torch.device("meta"):
            layer = cls(
                sparsity_level, blocksize, False, False, linear.in_features, linear.out_features,
                linear.bias is not None, dtype=linear.weight.dtype,
            )  # fmt: skip
        layer.weight, layer.bias = linear.weight, linear.bias
        bound = 1 / math.sqrt(max(layer.scores.shape[1], 1))
        scores = torch.empty(layer.scores.shape, dtype=linear.weight.dtype, device=linear.weight.device)
        layer.scores = nn.Parameter(scores.uniform_(-bound, bound))
        return layer.train(linear.training)

    def get_mask(self) -> torch.Tensor:
        """Zeros and ones, of the weight's shape, with the gradient of the scores."""
        kept = self.scores.numel() - round(self.sparsity_level * self.scores.numel())
        mask = _Kept.apply(self.scores, kept)
        for dim, size in enumerate(self.weight.shape):
            mask = mask.repeat_interleave(self.blocksize, dim).narrow(dim, 0, size)
        return mask

    @torch.no_grad()
    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` with the masked weight, which :func:`twofour.sparsity.sparsify_` compresses."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, dtype=self.weight.dtype)
        linear.weight = nn.Parameter(self.weight * self.get_mask(), requires_grad=self.weight.requires_grad)
        linear.bias = self.bias
        return linear.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * self.get_mask(), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, sparsity_level={self.sparsity_level}, blocksize={self.blocksize}"
