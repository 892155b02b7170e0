"""Layers of one input whose weights are multiplied as one: queries, keys and values, and the two halves of a gated MLP.

A GEMM of few tokens takes as long as reading its weight only where the weight is large; small ones leave a GPU idle at
their start and end.
"""

from __future__ import annotations

import torch
from torch import is_grad_enabled, nn
from torch.compiler import is_compiling

from .. import operators
from .int4 import Int4Linear
from .linear import Linear
from .packed_buffer import plain
from .tracing import traceable

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


class Group:
    """Layers of one input, in the order of their calls, and the layer of all of their rows, which holds the memory of
    their weights and biases.

    The first layer that is called multiplies for all; the others take their rows of the result, if they are called with
    the same tensor. A layer that is called with another one multiplies anew, so results never depend on the order.
    """

    def __init__(self, layers: list[Fused], whole: Linear | Int4Linear):
        self.layers = layers
        self.whole = whole
        self.pending: tuple | None = None
        # Not asked of a module in every call, whose attributes take as long as a view.
        self.has_bias = whole.bias is not None
        ends = torch.tensor([layer.out_features for layer in layers]).cumsum(0).tolist()
        self.rows = [(end - layer.out_features, end) for layer, end in zip(layers, ends, strict=True)]

    def product(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The rows of one layer of ``x @ W.T + bias``."""
        state, pending = self._state(x), self.pending
        if pending is None or pending[0] is not x or pending[1] != state or pending[2][index] is None:
            y = type(self.whole).forward(self.whole, x)
            parts = [y.narrow(-1, start, end - start) for start, end in self.rows]
            pending = self.pending = x, state, parts
        parts = pending[2]
        part, parts[index] = parts[index], None
        if not any(each is not None for each in parts):
            self.pending = None
        return part

    def _state(self, x: torch.Tensor) -> tuple:
        """What a result depends on beside an input's identity and the weight."""
        autocast = None
        if _is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            autocast = torch.get_autocast_dtype(x.device.type)
        if is_compiling():
            return is_grad_enabled(), autocast
        version = None if x.is_inference() else x._version
        if self.has_bias:
            biases = [layer.bias for layer in self.layers]
            version = version, [None if bias.is_inference() else bias._version for bias in biases]
        return is_grad_enabled(), autocast, torch.is_inference_mode_enabled(), version

    def canonical(self, index: int) -> tuple[torch.Tensor, ...]:
        """Copies of one layer's parts of the canonical form."""
        start, end = self.rows[index]
        return tuple(part[start:end].clone() for part in self.whole.canonical())

    def dissolve(self) -> None:
        """Gives each layer its own weight and bias again."""
        parts = [self.canonical(index) for index in range(len(self.layers))]
        for layer, own in zip(self.layers, parts, strict=True):
            kind = layer.unfused
            del layer._fused
            layer.__class__ = kind
            bias = layer._parameters.get("bias") if kind is Linear else layer._buffers["bias"]
            if bias is not None:
                bias.data = bias.data.clone()
            layer._set_packed(layer._pack(*own))
        self.pending = None


class Fused:
    """A layer of a group. What replaces its weight, as ``load_state_dict`` and moving the layer to another device or
    type, dissolves the group; what reads the weight gets a copy of its rows."""

    #: The class of the layer outside of a group.
    unfused: type

    _fused: tuple[Group, int]

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's product, which may be a part of one that is computed already."""
        group, index = self._fused
        y = group.product(index, x)
        if is_grad_enabled() and group.has_bias and self.bias.requires_grad:
            # A zero with the bias's gradient, which the bias of the whole has not.
            y = y + (self.bias - self.bias.detach()).to(y.dtype)
        return y

    def dissolve(self) -> None:
        """Gives each layer of the group its own weight again."""
        self._fused[0].dissolve()

    @property
    def _packed(self) -> torch.Tensor:
        group, index = self._fused
        return self._pack(*group.canonical(index))

    def canonical(self) -> tuple[torch.Tensor, ...]:
        """The parts of the canonical form."""
        group, index = self._fused
        return group.canonical(index)

    def _set_packed(self, packed: torch.Tensor) -> None:
        self.dissolve()
        self._set_packed(packed)

    def _apply(self, fn, recurse=True):
        if any(_changes(fn, tensor) for tensor in (plain(self._buffers[self.PACKED]), self.bias) if tensor is not None):
            self.dissolve()
            return self._apply(fn, recurse)
        own = self._buffers[self.PACKED]
        if isinstance(self, Int4Linear):
            self.weight_dtype = fn(own.plain.new_empty(0, dtype=self.weight_dtype)).dtype
        self._buffers[self.PACKED] = None
        try:
            return nn.Module._apply(self, fn, recurse)
        finally:
            self._buffers[self.PACKED] = own

    def __reduce_ex__(self, protocol):
        # Copies, and what is read from files, are layers of their own.
        state = self.__getstate__()
        del state["_fused"]
        return _restored, (self.unfused, state)


def _changes(fn, tensor: torch.Tensor) -> bool:
    """Whether a function that moves or converts tensors does not leave those of a type and device where they are."""
    probe = tensor.new_empty(1)
    return fn(probe) is not probe or (probe.device.type == "cpu" and probe.is_shared())


def _restored(kind: type, state: dict) -> nn.Module:
    layer = kind.__new__(kind)
    layer.__setstate__(state)
    return layer


class FusedLinear(Fused, Linear):
    """A :class:`twofour.Linear` of a group."""

    unfused = Linear


class FusedInt4Linear(Fused, Int4Linear):
    """An :class:`twofour.Int4Linear` of a group."""

    unfused = Int4Linear


_CLASSES = {Linear: FusedLinear, Int4Linear: FusedInt4Linear}


def can_be_fused(layers: list[nn.Module]) -> bool:
    """Whether layers of one input can be multiplied as one: of one class, number type and device, with one number of
    columns, and all with a bias or none."""
    first = layers[0]
    if type(first) not in _CLASSES or len({id(layer) for layer in layers}) < len(layers):
        return False
    if any(hooked in layer.__dict__ for layer in layers for hooked in ("forward", "_hf_hook")):
        return False

    def kind(layer):
        if type(layer) is not type(first) or layer._packed is None:
            return None
        packed, bias = layer._packed, layer.bias
        size = getattr(layer, "group_size", None)
        return layer.in_features, packed.dtype, packed.device, size, bias is None or (bias.dtype, bias.device)

    return kind(first) is not None and all(kind(layer) == kind(first) for layer in layers)


@torch.no_grad()
def fuse(layers: list[Linear] | list[Int4Linear]) -> None:
    """Makes a group of layers for which :func:`can_be_fused` holds."""
    first, rows = layers[0], sum(layer.out_features for layer in layers)
    parts = [torch.cat(all_of) for all_of in zip(*(layer.canonical() for layer in layers), strict=True)]
    biases = [layer.bias for layer in layers]
    bias = None if biases[0] is None else torch.cat([each.detach() for each in biases])
    if type(first) is Linear:
        whole = Linear(first.in_features, rows, False, device="meta", dtype=parts[0].dtype)
        whole.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        whole._set_packed(whole._pack(*parts))
    else:
        packed = operators.pack_int4(*parts, first.in_features, first.group_size)
        whole = Int4Linear((rows, first.in_features), first.group_size, packed, bias)
        whole.weight_dtype = first.weight_dtype
    group = Group(layers, whole)
    for index, (layer, (start, end)) in enumerate(zip(layers, group.rows, strict=True)):
        if bias is not None:
            layer.bias.data = bias[start:end]
        # One buffer under several names, so that it counts once.
        layer._buffers[layer.PACKED] = whole._buffers[whole.PACKED]
        layer._fused = group, index
        layer.__class__ = _CLASSES[type(layer)]


def multiplying(layer: nn.Module) -> nn.Module:
    """The layer whose weight a layer multiplies with: that of its group, or itself."""
    return layer._fused[0].whole if isinstance(layer, Fused) else layer
