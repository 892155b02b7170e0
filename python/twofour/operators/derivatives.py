"""Functions with derivatives in both modes: what ``torch.autograd.Function`` needs beside the formulas."""

from __future__ import annotations

import torch
from torch import is_grad_enabled
from torch._C import _are_functorch_transforms_active as _is_transforming
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling


def is_transformed() -> bool:
    """Whether tangents are being computed, or a transform of ``torch.func`` is at work. Neither asks whether gradients
    are enabled."""
    return forward_ad._current_level >= 0 or (not is_compiling() and _is_transforming())


def is_in_graph() -> bool:
    """Whether torch.compile is to see a composite operator (:func:`twofour.operators.define_composite`) for a layer.
    With a transform of ``torch.func`` inside of what is compiled it follows the functions that the operator is made
    of."""
    return is_dynamo_compiling() and not _is_transforming() and forward_ad._current_level < 0


def is_differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether a result of the tensors may have a derivative."""
    if is_transformed():
        return True
    if is_grad_enabled():
        # A loop, since a generator would take a tenth of a small call.
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def derivable(function: type[torch.autograd.Function]) -> type[torch.autograd.Function]:
    """A class decorator for functions that :func:`applied` calls.

    The class has ``forward``, ``setup_context`` and ``backward`` as torch describes them, and ``tangent``, the formula
    of forward mode, which torch calls ``jvp``. From them two more classes are made: ``Plain`` for calls without
    transforms, since torch inspects the signature of a ``forward`` that has a ``setup_context`` in every call, which
    takes longer than a small GEMM; and ``Transformed``, which has the ``jvp``, since torch.compile takes no function
    with one.
    """

    compute, setup_context = function.forward, function.setup_context

    def forward(ctx, *args):
        output = compute(*args)
        setup_context(ctx, args, output)
        return output

    name, plain = function.__name__, {"forward": staticmethod(forward), "backward": staticmethod(function.backward)}
    function.Plain = type(name, (torch.autograd.Function,), plain)
    tangent = getattr(function, "tangent", None)
    function.Transformed = function if tangent is None else type(name, (function,), {"jvp": staticmethod(tangent)})
    return function


def applied(function: type[torch.autograd.Function], *args) -> torch.Tensor:
    """The result of a :func:`derivable` function."""
    if is_transformed():
        return function.Transformed.apply(*args)
    if is_compiling():
        return function.apply(*args)
    return function.Plain.apply(*args)


def save(ctx, *tensors: torch.Tensor | None) -> None:
    """Saves tensors for both modes."""
    ctx.save_for_backward(*tensors)
    if is_transformed():
        ctx.save_for_forward(*tensors)
