"""What other modules read as the weight of a layer that prunes it."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch._guards import TracingContext
from torch.compiler import is_dynamo_compiling

from ..operators.autograd import Straight
from ..operators.derivatives import applied
from . import registration
from .conversion import is_sharded


class ServesReaders:
    """A layer whose parameter ``weight`` is not what it multiplies with.

    Some modules do not call a layer, but read its weight and multiply with it: ``nn.MultiheadAttention`` that of
    ``out_proj``, ``nn.TransformerEncoderLayer`` those of ``linear1`` and ``linear2`` in evaluation, ``F.linear(x,
    self.proj.weight)`` in models. Where the ``forward`` of another module reads ``weight``, or a function that it
    calls, it is :meth:`read_weight`; elsewhere, as for an optimizer, it is the parameter.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        registration.with_transformers()

    def __getattr__(self, name):
        value = super().__getattr__(name)
        if name == "weight":
            if is_dynamo_compiling():
                in_forward = traced_in_forward() or _is_read_in_forward(self)
            else:
                in_forward = _reads_in_forward(sys._getframe(1), self)
            if in_forward:
                return self.read_weight(value)
        return value

    @property
    def master(self) -> torch.Tensor:
        """The parameter, or what has taken its place, as under FSDP and with parametrizations."""
        return self._parameters["weight"] if "weight" in self._parameters else self.weight

    def read_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """What the layer multiplies with, dense; its gradients pass to the parameter as those of the layer do
        (straight-through)."""
        return applied(Straight, weight, self.dense_weight())


class CarriesAttributes(ServesReaders):
    """A layer whose parameter has attributes, which stay where another tensor takes its place.

    fully_shard has two parameters, a sharded one for optimizers and a whole one in forward passes, which take turns. It
    sets those of layers without a ``__setattr__`` of their own in a shorter way.
    """

    #: Attributes of the parameter by which an optimizer and the layer speak to each other.
    CARRIED: tuple[str, ...]

    def __setattr__(self, name, value):
        if name == "weight":
            old = self.__dict__.get("_parameters", {}).get("weight")
            if is_sharded(old) or is_sharded(value):
                for attribute in self.CARRIED:
                    if hasattr(old, attribute):
                        setattr(value, attribute, getattr(old, attribute))
        super().__setattr__(name, value)


class Unreadable(torch.Tensor):
    """The weight of a layer that computes something else than a product with it. Its attributes can be read; computing
    with it is an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "__get__" or func in (
            torch.Tensor.size,
            torch.Tensor.dim,
            torch.Tensor.numel,
            torch.Tensor.is_floating_point,
        ):
            return super().__torch_function__(func, types, args, kwargs or {})
        raise NotImplementedError(
            f"{getattr(func, '__name__', func)} reads the weight of a SemiSparseActivationLinear, which prunes its "
            f"input and must be called: keep the "
            "dense layer there"
        )


def _subject(frame) -> object:
    """The first argument of a function's frame."""
    code = frame.f_code
    return frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None


@torch.compiler.assume_constant_result
def traced_in_forward() -> bool:
    """Whether what torch.compile traces is a ``forward``, or a function that is called there. The layer's own reads
    ``master``."""
    names = [frame.name for frame in TracingContext.extract_stack()]
    # Behind a graph break the rest of a function is compiled by itself.
    return any(name == "forward" or name.startswith("torch_dynamo_resume_in_forward_at_") for name in names)


@torch.compiler.disable
def _is_read_in_forward(layer: nn.Module) -> bool:
    """:func:`_reads_in_forward` of a compiled function, asked in every call: it has several callers. It breaks the
    graph."""
    return _reads_in_forward(sys._getframe(1), layer)


def _reads_in_forward(frame, layer: nn.Module) -> bool:
    """Whether a frame is that of another module's ``forward``, or of a function that is called there, directly or by
    others. What is called by the layer itself, as its hooks, and what wraps modules, as FSDP and DeepSpeed, keeps the
    parameter, also where it is called in a ``forward``: blocks of a model are sharded each."""
    # Setting an attribute of a module reads it first: who sets it, counts.
    while frame is not None and (_module_of(frame) == "torch.nn.modules.module" or _is_setter(frame, layer)):
        frame = frame.f_back
    if frame is not None and _module_of(frame).startswith(_WRAPPERS):
        return False
    while frame is not None:
        name, subject = frame.f_code.co_name, _subject(frame)
        if subject is layer:
            if name in ("forward", "_call_impl"):
                return False
        elif name == "forward" and isinstance(subject, nn.Module):
            return True
        frame = frame.f_back
    return False


def _module_of(frame) -> str:
    """The name of the Python module that a frame's function is of."""
    return frame.f_globals.get("__name__", "")


def _is_setter(frame, layer: nn.Module) -> bool:
    return frame.f_code.co_name == "__setattr__" and _subject(frame) is layer


#: Modules of Python whose functions move, shard or replace parameters.
_WRAPPERS = (
    "torch.distributed",
    "torch.nn.parallel",
    "torch.nn.utils",
    "torch.func",
    "torch._functorch",
    "torch.optim",
    "accelerate",
    "deepspeed",
    "fairscale",
)


def multiplies_nested(frame) -> bool:
    """Whether a frame is that of torch's attention or encoder layer with a nested input, for which these take plain
    dense weights alone."""
    if frame.f_globals.get("__name__") not in ("torch.nn.modules.activation", "torch.nn.modules.transformer"):
        return False
    return any(getattr(frame.f_locals.get(name), "is_nested", False) for name in ("src", "query"))
