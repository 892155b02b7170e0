"""Linear layers whose weights are 2:4 and of 8-bit integers."""

from __future__ import annotations

import torch
from torch import nn

from .. import operators
from ..arrays.compression import Compressed
from ..canonical import parts_shapes
from ..operators.packed import Packed, pack_by_rule, pack_quantized
from ..tensor.memory import share_between_processes
from .conversion import take_over, weight_of
from .integers import IntegerLayer


@share_between_processes
class QuantizedLinear(IntegerLayer):
    """A linear layer for inference whose weight is 2:4 and of 8-bit integers.

    ``y = x_scale[token] * scale[row] * (x_int8 @ W_int8.T) + bias``: the sums of integers are exact. The state dict
    holds the canonical form (``weight_values``, ``weight_meta``, ``weight_scales``), which every device reads.

    Attributes:
        weight_dtype: the dtype that :attr:`weight` has.
    """

    FROZEN_BUFFERS = ("packed", "weight_scales", "bias")
    stored_dtype = "int8"
    group_size = -1

    def __init__(self, weight: Packed, scales: torch.Tensor, bias: torch.Tensor | None):
        super().__init__((weight.rows, weight.cols), weight.forward, bias)
        self.register_buffer("weight_scales", scales)

    @classmethod
    def from_dense(cls, linear: nn.Linear, prune: bool = False) -> QuantizedLinear:
        """Quantizes the weight of a linear layer. Layers that prune their weight themselves and sparse weights are
        taken as they compute, as by :meth:`twofour.Linear.from_dense`.

        Raises:
            ValueError: where the weight is not 2:4 and ``prune`` is not set, with row and group, or not finite; for a
                layer with parametrizations.
            TypeError: for a subclass whose own methods, such as ``forward``, would be lost.
        """
        dense, is_pruned = weight_of(linear)
        dtype = dense.dtype
        if prune and not is_pruned:
            dense = pack_by_rule(dense.float().cpu(), "magnitude", transpose=False)[0].to_dense().to(dense.device)
        weight, scales = pack_quantized(dense)
        layer = cls(weight, scales, None if linear.bias is None else linear.bias.detach().clone())
        layer.weight_dtype = dtype
        return take_over(layer, linear)

    @classmethod
    def from_compressed(cls, weight: Compressed, bias: torch.Tensor | None = None) -> QuantizedLinear:
        """The layer of an int8 weight with a scale for each row, as :func:`twofour.load_file` returns it.

        Args:
            weight: the weight, of tensors, on the device where the layer is to be.
            bias: ``[rows]``, or ``None``.

        Raises:
            TypeError: for a weight of another dtype, without such scales, or of arrays.
            RuntimeError: where the parts break a rule of the canonical form, with row and group.
        """
        rows, cols = weight.shape
        if (
            weight.dtype != "int8"
            or weight.scales is None
            or weight.group_size is not None
            or not isinstance(weight.values, torch.Tensor)
        ):
            raise TypeError("an int8 weight of tensors with a scale for each row is required")
        return cls(
            Packed(rows, cols, operators.from_canonical(weight.values.contiguous(), weight.meta.contiguous(), cols)),
            weight.scales,
            bias,
        )

    def canonical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and metadata in canonical form."""
        return operators.canonical(self._packed, self.out_features, self.in_features)

    def compressed(self) -> Compressed:
        """The weight as files hold it."""
        return Compressed(*self.canonical(), (self.out_features, self.in_features), "int8", self.weight_scales)

    def _row_scales(self):
        return self.weight_scales

    def _pack(self, values, meta):
        return operators.from_canonical(values, meta, self.in_features)

    def _kinds(self):
        values, meta = parts_shapes(self.out_features, self.in_features)
        return [(values, torch.int8), (meta, torch.int32)]

    def _apply(self, fn, recurse=True):
        # Scales stay in float32.
        scales, self._buffers["weight_scales"] = self._buffers["weight_scales"], None
        try:
            super()._apply(fn, recurse)
            moved = fn(scales)
            scales = moved if moved.dtype == scales.dtype else scales.to(moved.device)
        finally:
            self._buffers["weight_scales"] = scales
        return self
