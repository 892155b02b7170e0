"""Derivatives of GEMMs with a 2:4 weight. These functions are entered only where one is needed.

A product ``x @ W.T`` is linear in ``x``, and its derivatives are products of the same kind: the input gradient one with
the transpose, the tangent one with the tangent of ``x``. So ``backward`` and ``tangent`` call these functions again,
and derivatives of any order, in both modes, follow.
"""

from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch._C import _are_functorch_transforms_active as is_transforming
from torch._C import _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .. import operators
from .derivatives import applied, derivable, is_differentiated, is_transformed, save
from .packed import Packed


def weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``dy.T @ x`` over all leading dimensions, dense."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def bias_gradient(dy: torch.Tensor) -> torch.Tensor:
    """The sums of ``dy`` over all leading dimensions."""
    # torch.compile fuses the sums of torch with what comes before; alone they are slower than the operator's.
    is_traced = torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0
    if dy.is_cuda and dy.dtype in operators.TYPES and not is_differentiated(dy) and not is_traced:
        return operators.bias_gradient(dy)
    return dy.reshape(-1, dy.shape[-1]).sum(0)


@derivable
class SampledWeightGradient(torch.autograd.Function):
    """``dy.T @ x`` with the transpose of ``dy`` replaced by its unbiased 2:4 estimate along tokens: a sparse GEMM.

    Its derivatives are those of the product that it estimates.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(dy, x, seed, estimator):
        return operators.sampled_weight_gradient(dy, x, estimator, seed)

    @staticmethod
    def setup_context(ctx, inputs, output):
        save(ctx, *inputs[:2])

    @staticmethod
    def backward(ctx, gradient):
        dy, x = ctx.saved_tensors
        return x @ gradient.t(), dy @ gradient, None, None

    @staticmethod
    def tangent(ctx, dy_tangent, x_tangent, *_):
        dy, x = ctx.saved_tensors
        return dy_tangent.t() @ x + dy.t() @ x_tangent


def estimated_weight_gradient(dy: torch.Tensor, x: torch.Tensor, estimator: int) -> torch.Tensor:
    """``dy.T @ x`` over all leading dimensions, estimated.

    The estimate's seed is drawn from torch's default generator of the device, and stays there.
    """
    dy, x, seed = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1]), operators.new_seed(dy.device)
    if is_differentiated(dy, x):
        return applied(SampledWeightGradient, dy, x, seed, estimator)
    return operators.sampled_weight_gradient(dy, x, estimator, seed)


@derivable
class PackedLinear(torch.autograd.Function):
    """``x @ W.T + bias`` for a packed ``W``.

    Where ``weight`` is given, ``W`` stands for it: what ``W`` is differentiated by goes to all elements of ``weight``,
    as if nothing had been pruned (straight-through). Nothing may change in place until the backward pass, as in torch.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias, forward, transposed, rows, cols, estimator):
        return Packed(rows, cols, forward, transposed).times_transpose(x, bias)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, forward, transposed, rows, cols, estimator = inputs
        ctx.rows, ctx.cols, ctx.estimator = rows, cols, estimator
        ctx.uses_transpose = transposed is not None
        packed = transposed if ctx.uses_transpose else forward
        of_x, of_weight = ctx.needs_input_grad[:2]
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None, packed if of_x else None)
        if is_transformed():
            ctx.save_for_forward(x, weight, packed)
            # A weight without a tangent has none made of zeros: sparse tensors have no zeros.
            ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None, None, None, None, None
        x, weight, packed = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
        dx = dw = db = None
        if of_x:
            # The transpose of a weight is a node of the graph only where there is one.
            tracked = weight is not None and is_differentiated(dy, weight)
            dx = packed_linear(dy, weight.t() if tracked else None, None, _packed_of(ctx, packed).t())
        if of_weight:
            dw = weight_gradient(dy, x) if ctx.estimator < 0 else estimated_weight_gradient(dy, x, ctx.estimator)
            dw = dw.to(ctx.weight_dtype)
        if of_bias:
            db = bias_gradient(dy)
        return dx, dw, db, None, None, None, None, None

    @staticmethod
    def tangent(ctx, x_tangent, weight_tangent, bias_tangent, *_):
        x, weight, packed = ctx.saved_tensors
        terms = []
        if x_tangent is not None:
            terms.append(packed_linear(x_tangent, weight, None, _packed_of(ctx, packed)))
        if weight_tangent is not None:
            terms.append(torch.nn.functional.linear(x, weight_tangent.to(x.dtype)))
        if bias_tangent is not None:
            terms.append(bias_tangent.expand(*x.shape[:-1], ctx.rows))
        return sum(terms[1:], start=terms[0]) if terms else None


class _EagerPackedLinear(torch.autograd.Function):
    """:class:`PackedLinear` without transforms and tangents, whose forward pass asks as little as it can: it takes as
    long as a small GEMM."""

    @staticmethod
    def forward(ctx, x, weight, bias, packed, estimator):
        of_x, of_weight, *_ = ctx.needs_input_grad
        saved = packed.transposed
        uses_transpose = saved is not None
        ctx.facts = packed.rows, packed.cols, estimator, uses_transpose, weight.dtype if of_weight else None
        if of_x:
            # A weight without a gradient is no part of the graph: it may go to another device while the result is in
            # use.
            own = weight if of_weight else None
            ctx.save_for_backward(x if of_weight else None, own, saved if uses_transpose else packed.forward)
        else:
            ctx.save_for_backward(x if of_weight else None, None, None)
        if packed.direct is not None:
            try:
                if bias is None:
                    return operators.eager_linear(x, packed.direct, packed.rows)
                return operators.eager_linear_bias(x, packed.direct, bias, packed.rows, 0)
            except RuntimeError:
                # What is wrong is said below.
                pass
        return packed.times_transpose(x, bias)

    @staticmethod
    def backward(ctx, dy):
        ctx.rows, ctx.cols, ctx.estimator, ctx.uses_transpose, ctx.weight_dtype = ctx.facts
        return PackedLinear.backward(ctx, dy)[:5]


#: ``x @ W.T + bias`` of ``x``, ``weight``, ``bias``, ``packed`` and ``estimator``, as for :func:`packed_linear`, where
#: a derivative is needed, and neither a transform nor a tangent is at work.
eager_packed_linear = _EagerPackedLinear.apply


def _packed_of(ctx, packed: torch.Tensor) -> Packed:
    """The weight of which a context holds one packing."""
    return Packed(ctx.rows, ctx.cols, None, packed) if ctx.uses_transpose else Packed(ctx.rows, ctx.cols, packed)


@derivable
class StandIn(torch.autograd.Function):
    """Zeros without memory of their own, whose derivatives are those of ``x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.new_zeros(()).expand(x.shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def stand_in(x: torch.Tensor) -> torch.Tensor | None:
    """What stands for a tensor in graphs without keeping its memory; ``None`` where nothing is differentiated."""
    if is_transformed():
        return x
    return applied(StandIn, x) if is_differentiated(x) else None


@derivable
class Straight(torch.autograd.Function):
    """A tensor in the place of another one, whose type may be another; derivatives pass as they are."""

    generate_vmap_rule = True

    @staticmethod
    def forward(dense, stand_in):
        return stand_in.view_as(stand_in)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.types = tuple(tensor.dtype for tensor in inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.to(ctx.types[0]), None

    @staticmethod
    def tangent(ctx, tangent, _):
        return tangent.view_as(tangent).to(ctx.types[1])


def packed_linear(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, packed: Packed, estimator: int = -1
) -> torch.Tensor:
    """``x @ W.T + bias`` for a packed ``W``, with derivatives where they are needed.

    Args:
        x: ``[..., cols]``.
        weight: what ``W`` stands for, ``[rows, cols]``, where it has derivatives; or ``None``.
        bias: ``[rows]``, or ``None``.
        packed: ``W``.
        estimator: the number of the estimate that replaces the output gradient in the weight gradient; -1 for none.
    """
    if is_compiling() or forward_ad._current_level >= 0 or is_transforming():
        if is_differentiated(x, weight, bias):
            return applied(
                PackedLinear, x, weight, bias, packed.forward, packed.transposed, packed.rows, packed.cols, estimator
            )
    elif is_grad_enabled() and (
        x.requires_grad or (bias is not None and bias.requires_grad) or (weight is not None and weight.requires_grad)
    ):
        return eager_packed_linear(x, weight, bias, packed, estimator)
    return packed.times_transpose(x, bias)


def linear_of_tensor(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear`` with a sparse tensor for a weight, with derivatives where they are needed."""
    # The weight is asked last: reading an attribute of a tensor subclass costs as much as the call itself.
    if is_differentiated() or (torch.is_grad_enabled() and weight.requires_grad):
        return packed_linear(x, weight, bias, weight.packed_weight)
    return packed_linear(x, None, bias, weight.packed_weight)
