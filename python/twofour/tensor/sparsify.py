"""Dense tensors pruned to sparse ones inside a differentiable computation."""

from __future__ import annotations

import enum

import torch

from ..operators import masks
from ..operators.derivatives import applied, derivable
from ..operators.packed import pack_by_mask
from .semi_structured import SparseSemiStructuredTensor


class GRADIENT_TYPE(str, enum.Enum):
    """What :func:`semi_structured_sparsify_like` returns as the gradient of its input.

    ``STE``: the gradient as it comes (straight-through). ``DENSE``: the gradient with zeros where the mask keeps
    nothing, as a dense tensor. ``SPARSE``: the same as a sparse tensor.
    """

    DENSE = "dense"
    SPARSE = "sparse"
    STE = "ste"


def _class_of(backend: str) -> type[SparseSemiStructuredTensor]:
    try:
        return SparseSemiStructuredTensor._CLASSES[backend]
    except KeyError:
        raise ValueError(
            f"unknown backend {backend!r}; known are {', '.join(map(repr, SparseSemiStructuredTensor._CLASSES))}"
        ) from None


@derivable
class _Sparsify(torch.autograd.Function):
    @staticmethod
    def forward(x, algo, backend):
        if isinstance(x, SparseSemiStructuredTensor):
            return x.detach()
        return _class_of(backend).prune_dense_static_sort(x, algo)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None, None


@derivable
class _SparsifyLike(torch.autograd.Function):
    @staticmethod
    def forward(x, tiles, cls, both_ways, gradient):
        return cls._of(pack_by_mask(x, tiles, both_ways), tiles)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, tiles, ctx.cls, ctx.both_ways, ctx.gradient = inputs
        ctx.save_for_backward(tiles)

    @staticmethod
    def backward(ctx, gradient):
        (tiles,) = ctx.saved_tensors
        if isinstance(gradient, SparseSemiStructuredTensor) and ctx.gradient != GRADIENT_TYPE.STE:
            if ctx.gradient == GRADIENT_TYPE.SPARSE and gradient.tiles is tiles:
                return gradient, None, None, None, None
            gradient = gradient.to_dense()
        if ctx.gradient == GRADIENT_TYPE.DENSE:
            gradient = torch.where(masks.mask_of(tiles, *gradient.shape), gradient, 0)
        elif ctx.gradient == GRADIENT_TYPE.SPARSE:
            # The same map of the gradient, which has a derivative in its turn.
            gradient = applied(_SparsifyLike, gradient, tiles, ctx.cls, ctx.both_ways, ctx.gradient)
        return gradient, None, None, None, None


@torch.compiler.allow_in_graph
def semi_structured_sparsify(x: torch.Tensor, algo: str = "", backend: str = "cutlass") -> SparseSemiStructuredTensor:
    """Prunes a matrix to 2:4 along rows and along columns and packs it both ways.

    Args:
        x: ``[rows, cols]`` of float32, bfloat16 or float16, of any shape; a sparse tensor is returned as it is.
        algo: how the mask is chosen: ``""`` = ``"largest_values_greedy"`` (by signed value),
            ``"largest_abs_values_greedy"``, ``"causal1122"`` or ``"optimal"``.
        backend: which of the peers' classes the result has: ``"cutlass"`` or ``"cusparselt"``. Both compute the same.

    Returns:
        the sparse tensor; the gradient of ``x`` is its gradient, not masked (straight-through).

    Raises:
        ValueError: for a NaN, with its place, and for an unknown ``backend``.
        RuntimeError: for an unknown ``algo``, another rank or an unsupported type.
    """
    return applied(_Sparsify, x, algo, backend)


@torch.compiler.allow_in_graph
def semi_structured_sparsify_like(
    x: torch.Tensor, pattern: SparseSemiStructuredTensor, gradient: GRADIENT_TYPE = GRADIENT_TYPE.SPARSE
) -> SparseSemiStructuredTensor:
    """Keeps of a matrix what a sparse tensor keeps.

    Args:
        x: ``[rows, cols]`` of float32, bfloat16 or float16.
        pattern: a sparse tensor of the same shape.
        gradient: what the gradient of ``x`` is; the name or the value of a :class:`GRADIENT_TYPE`. With ``SPARSE`` it
            is a sparse tensor of the same mask.

    Returns:
        a sparse tensor of the class and the mask of ``pattern``, packed the ways that it is packed.

    Raises:
        ValueError: where ``pattern`` is not sparse, where the shapes differ, for an unknown ``gradient``.
        RuntimeError: for another rank or an unsupported type.
    """
    if not isinstance(pattern, SparseSemiStructuredTensor):
        raise ValueError(f"`pattern` must be a SparseSemiStructuredTensor, not a {type(pattern).__name__}")
    if tuple(x.shape) != tuple(pattern.shape):
        raise ValueError(
            f"the pattern has shape {tuple(pattern.shape)}, the tensor {tuple(x.shape)}: both must be the same"
        )
    if isinstance(gradient, str) and not isinstance(gradient, GRADIENT_TYPE):
        gradient = gradient.lower()
    both_ways = pattern.packed_weight.transposed is not None
    return applied(_SparsifyLike, x, pattern._kept_tiles(), type(pattern), both_ways, GRADIENT_TYPE(gradient))
