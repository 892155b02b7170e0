"""Layers for inference whose weights are 2:4 and of integers."""

from __future__ import annotations

import torch
from torch import nn
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.utils._pytree import tree_map

from .. import operators
from ..operators.derivatives import is_in_graph
from ..operators.integer_linear import dequantized, integer_linear
from ..operators.master import cast_for_autocast
from ..operators.packed import metadata_of_zeros
from . import registration
from .packed_buffer import PackedBuffer
from .packed_layer import PackedLayer
from .readers import traced_in_forward
from .tracing import traceable


def _linear(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_features: int,
    in_features: int,
    group_size: int,
) -> torch.Tensor:
    """:meth:`IntegerLayer.forward` of a packed weight."""
    x, bias = cast_for_autocast(x, bias)
    return integer_linear(x, packed, scales, bias, (out_features, in_features), group_size)


operators.define_composite(
    "integer_layer(Tensor x, Tensor packed, Tensor? scales, Tensor? bias, int out_features, int in_features, "
    "int group_size) -> Tensor",
    _linear,
)


class IntegerLayer(PackedLayer, nn.Module):
    """A linear layer for inference whose weight is 2:4 and of integers times scales. The input has a gradient, that of
    a dense GEMM with the dequantized weight; the weight has none.

    Attributes:
        in_features: columns of the weight.
        out_features: its rows.
        group_size: columns that share a scale, or -1 for all of a row.
        stored_dtype: the name of the dtype that the weight has in files.
        weight_dtype: the dtype that :attr:`weight` has.
        bias: ``[out_features]`` or ``None``; a buffer.
    """

    #: What a kept value is where there is none.
    ZERO = 0

    stored_dtype: str

    def __init__(self, shape: tuple[int, int], packed: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        registration.with_transformers()
        self.out_features, self.in_features = shape
        self.weight_dtype = torch.float32 if bias is None else bias.dtype
        self.register_buffer("packed", PackedBuffer.of(packed), persistent=False)
        self.register_buffer("bias", bias)

    def _row_scales(self) -> torch.Tensor | None:
        """The scales of rows, where they are not packed."""
        return None

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T + bias``.

        Args:
            x: ``[..., in_features]`` of bfloat16, float16, or float32 on a CPU; under autocast it is converted to
                autocast's dtype.

        Returns:
            ``[..., out_features]`` of the same dtype. The input's gradient is a dense GEMM with the dequantized weight:
            the rounding of the input, where there is one, counts as none (straight-through).

        Raises:
            RuntimeError: for another number of features.
            NotImplementedError: for another dtype.
        """
        linear = torch.ops.twofour.integer_layer.default if is_in_graph() else _linear
        return linear(
            x, self._packed, self._row_scales(), self.bias, self.out_features, self.in_features, self.group_size
        )

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, in the dtype of the layer that was quantized: for modules that read its dtype, as
        T5's, or multiply with it themselves, as ``nn.MultiheadAttention`` with that of ``out_proj``."""
        return DequantizedWeight.of(self)

    def to_dense(self) -> torch.Tensor:
        """The weight that the layer multiplies with, ``[out_features, in_features]`` in float32."""
        return dequantized(self._packed, self._row_scales(), self.out_features, self.in_features, self.group_size)

    def _moved(self, fn):
        # The packed layout depends on the device.
        packed = self._packed
        device = fn(packed.new_empty(1)).device
        self.weight_dtype = fn(packed.new_empty(0, dtype=self.weight_dtype)).dtype
        if device == packed.device:
            moved = fn(packed)
            return moved if moved.dtype == packed.dtype else packed
        parts = self._zeros(device) if packed.device.type == "meta" else [part.to(device) for part in self.canonical()]
        return self._pack(*parts)

    def _kinds(self) -> list[tuple[tuple[int, int], torch.dtype]]:
        """Shape and dtype of each canonical part."""
        raise NotImplementedError

    def _zeros(self, device) -> list[torch.Tensor]:
        """The canonical form of a weight of zeros."""
        values, meta, *scales = (torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in self._kinds())
        meta = metadata_of_zeros(meta.shape, -(-self.in_features // 4), device)
        return [values.fill_(self.ZERO), meta, *(scale.fill_(1) for scale in scales)]

    def _checked(self, *parts):
        kinds = self._kinds()
        expected, found = [list(shape) for shape, _ in kinds], [list(part.shape) for part in parts]
        if found != expected or parts[0].dtype != kinds[0][1]:
            raise RuntimeError(
                f"the parts have the shapes {found} and values of {parts[0].dtype}, those of the layer {expected} and "
                f"{kinds[0][1]}"
            )
        device = parts[0].device if self._packed.device.type == "meta" else self._packed.device
        return tuple(part.to(device).contiguous() for part in parts)


class DequantizedWeight(torch.Tensor):
    """The weight of a layer of integers, as modules see it that read it: ``[rows, cols]`` of floats. Shape, dtype and
    device cost nothing; what computes with it gets the dense weight, made anew each time. What is written to it is
    lost, so that is an error."""

    layer: nn.Module

    # Modules of torch take other ways where a tensor has a function of its own, and those take no nested tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(layer: nn.Module) -> torch.Tensor:
        """The weight of a layer, which has ``to_dense``, ``packed`` and ``weight_dtype``."""
        if is_compiling() and (not is_dynamo_compiling() or traced_in_forward()):
            return layer.to_dense().to(layer.weight_dtype)
        return DequantizedWeight._wrapping(layer)

    @staticmethod
    @torch.compiler.disable
    def _wrapping(layer: nn.Module) -> DequantizedWeight:
        # Not compiled, since a compiled write would be to a dense copy.
        shape, device = (layer.out_features, layer.in_features), layer.packed.device
        weight = torch.Tensor._make_wrapper_subclass(DequantizedWeight, shape, dtype=layer.weight_dtype, device=device)
        weight.layer = layer
        return weight

    def dense(self) -> torch.Tensor:
        """The weight, dense."""
        return self.layer.to_dense().to(self.layer.weight_dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func._schema.is_mutable and isinstance(args[0], cls):
            args[0]._refuse_writing(func._schema.name.removeprefix("aten::"))
        inner, options = tree_map(
            lambda value: value.dense() if isinstance(value, cls) else value, (args, kwargs or {})
        )
        return func(*inner, **options)

    def _refuse_writing(self, name: str) -> None:
        raise NotImplementedError(
            f"{name}: the weight of a {type(self.layer).__name__} is a dense copy of its integers, which writing would "
            f"not change: quantize a dense layer "
            "anew, or load a state dict"
        )

    # What reads memory.

    @property
    def data(self) -> torch.Tensor:
        """The dense weight."""
        return self.dense()

    @data.setter
    def data(self, value):
        self._refuse_writing("data")

    def numpy(self, *args, **kwargs):
        """The dense weight as an array."""
        return self.dense().numpy(*args, **kwargs)

    def tolist(self):
        """The dense weight as lists."""
        return self.dense().tolist()

    def __deepcopy__(self, memo):
        return self.dense()

    def __reduce_ex__(self, protocol):
        return self.dense().__reduce_ex__(protocol)

    def __repr__(self):
        return repr(self.dense())
