"""Linear layers whose dense master weight is pruned in every forward pass, with gradients."""

from __future__ import annotations

import torch

from . import _ops
from ._autograd import bias_gradient, weight_gradient
from ._packed import Packed

#: Rules whose masks are 2:4 along columns too, so that the transpose can be packed.
TRANSPOSABLE = frozenset(_ops.RULES[name] for name in ("greedy", "greedy-signed", "causal1122", "optimal"))

#: Weight gradients by name; the numbers of the estimators that replace the output gradient, -1 for none.
WEIGHT_GRADIENTS = {
    "dense": -1,
    "mvue": _ops.ESTIMATORS["mvue"],
    "mvue-approximate": _ops.ESTIMATORS["mvue-approximate"],
}


def weight_gradient_number(name: str) -> int:
    """The number of a weight gradient.

    Raises:
        ValueError: for a name that does not exist; the message lists those that do.
    """
    try:
        return WEIGHT_GRADIENTS[name]
    except KeyError:
        raise ValueError(f"unknown weight gradient {name!r}; known are {', '.join(WEIGHT_GRADIENTS)}") from None


def cast_activations(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    """An input and a bias in autocast's type where autocast is on; the master weight stays, and is packed as that type.

    Raises:
        NotImplementedError: where autocast is off and the types differ.
    """
    if torch.is_autocast_enabled(x.device.type):
        return cast_for_autocast(x, bias)
    if x.dtype is not weight.dtype:
        raise NotImplementedError(f"the input has dtype {x.dtype}, the weight {weight.dtype}: convert one, or use torch.autocast")
    return x, bias


def autocast_type(tensor: torch.Tensor) -> torch.dtype:
    """Autocast's type where autocast is on, and otherwise that of the tensor."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def cast_for_autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in autocast's type where autocast is on, and as they are otherwise."""
    if not torch.is_autocast_enabled(x.device.type):
        return x, *others
    dtype = autocast_type(x)
    return x.to(dtype), *(None if other is None else other.to(dtype) for other in others)


def pack_master(
    weight: torch.Tensor, rule: int, transpose: bool, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chooses the mask of a master weight and packs what it keeps; the transpose, too, where asked and where the rule's masks allow it.

    Args:
        weight: ``[rows, cols]``.
        rule: the number of the rule.
        transpose: whether to pack the transpose.
        dtype: the type of the packed values; by default that of the weight. A float32 weight is packed as a 16-bit type in the same pass.
    """
    transpose = transpose and rule in TRANSPOSABLE
    # A NaN is found on a CPU only: on a GPU the search waits for the device.
    number = -1 if dtype is None or dtype is weight.dtype else _ops.TYPES.get(dtype, -1)
    forward, transposed, _ = _ops.pack(weight, rule, 1.0, transpose, False, number)
    return forward, transposed if transpose else None


def estimated_weight_gradient(dy: torch.Tensor, x: torch.Tensor, estimator: int) -> torch.Tensor:
    """``dy.T @ x`` with the transpose of ``dy`` replaced by its unbiased 2:4 estimate along tokens: a sparse GEMM.

    The estimate's seed is drawn from torch's default generator of the device, and stays there.
    """
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    return _ops.sampled_weight_gradient(dy, x, estimator, _ops.new_seed(dy.device))


class MasterLinear(torch.autograd.Function):
    """``x @ W.T + bias``, where ``W`` is what a mask keeps of the dense master weight.

    The input gradient is a sparse GEMM. The weight gradient goes to all elements of the master weight, as if nothing had been pruned
    (straight-through): dense, or a sparse GEMM with an estimate of the output gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, rule, estimator, forward, transposed):
        rows, cols = weight.shape
        if forward is None:
            forward, transposed = pack_master(weight, rule, ctx.needs_input_grad[0], x.dtype)
        ctx.size = rows, cols
        ctx.weight_dtype = weight.dtype
        ctx.estimator = estimator
        ctx.uses_transpose = transposed is not None
        kept = transposed if ctx.uses_transpose else forward
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, kept if ctx.needs_input_grad[0] else None)
        return Packed(rows, cols, forward).times_transpose(x, bias)

    @staticmethod
    def backward(ctx, dy):
        x, packed = ctx.saved_tensors
        rows, cols = ctx.size
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            weight = Packed(rows, cols, None, packed) if ctx.uses_transpose else Packed(rows, cols, packed)
            dx = weight.times(dy)
        if ctx.needs_input_grad[1]:
            dw = weight_gradient(dy, x) if ctx.estimator < 0 else estimated_weight_gradient(dy, x, ctx.estimator)
            dw = dw.to(ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            db = bias_gradient(dy)
        return dx, dw, db, None, None, None, None


def master_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: int,
    estimator: int = -1,
    packed: Packed | None = None,
) -> torch.Tensor:
    """``x @ W.T + bias`` for ``x`` of shape ``[..., cols]``, where ``W`` is what the rule keeps of the master weight ``[rows, cols]``.

    With ``packed`` the mask and the values are those that it holds; the master weight, of any type, then only receives the gradient.
    """
    if x.shape[-1] != weight.shape[1]:
        raise RuntimeError(
            f"linear(): input and weight shapes cannot be multiplied ({tuple(x.shape)} and {tuple(weight.shape)}): the last dimension of the "
            f"input must be {weight.shape[1]}"
        )
    forward, transposed = (None, None) if packed is None else (packed.forward, packed.transposed)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return MasterLinear.apply(x, weight, bias, rule, estimator, forward, transposed)
    if forward is None:
        forward, _ = pack_master(weight, rule, False, x.dtype)
    return Packed(*weight.shape, forward).times_transpose(x, bias)
