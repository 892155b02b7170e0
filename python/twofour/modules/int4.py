"""Linear layers whose weights are 2:4 and of 4-bit integers."""

from __future__ import annotations

import torch
from torch import nn

from .. import operators
from ..arrays.compression import Compressed
from ..canonical import parts_shapes
from ..operators.packed import pack_by_rule
from ..tensor.memory import share_between_processes
from .conversion import take_over, weight_of
from .integers import IntegerLayer
from .linear import DTYPES

#: Columns that share a scale, and the number that stands for a whole row.
GROUP, PER_CHANNEL = 128, -1


def expect_group_size(group_size: int) -> None:
    """Raises:
    ValueError: for a group size that no kernel has.
    """
    if group_size not in (GROUP, PER_CHANNEL):
        raise ValueError(
            f"group_size is {group_size!r}: use {GROUP}, a scale for each {GROUP} columns of a row, or {PER_CHANNEL}, "
            f"one for each row"
        )


@share_between_processes
class Int4Linear(IntegerLayer):
    """A linear layer for inference whose weight is 2:4 and of 4-bit integers: 3 bits for each element of the dense
    weight, and the scales.

    ``y = x @ (q * scale).T + bias``, symmetric, with a scale of float16 for each 128 columns of a row or for each row:
    the arithmetic of Sparse-Marlin (Frantar et al., 2024, "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference
    on Large Language Models"). Activations stay floats: bfloat16 or float16, and float32 on a CPU. The weight has no
    gradient; that of the input is a dense GEMM with the dequantized weight.

    On a GPU kernels multiply integers, 64 tokens at a time, and scale the sums. More than 256 tokens meet the weight's
    floats, rounded to the activations' type, which a buffer of the largest layer's size holds meanwhile. On a CPU parts
    of the weight become floats in each call, in a core's cache; ``docs/reference/pytorch-benchmarks.md`` has measured
    times. With many tokens :class:`twofour.Linear` is faster there.

    The state dict holds the canonical form, which every device reads: ``weight_values`` ``[rows, ceil(cols / 4)]`` of
    uint8 (the two kept integers of each group of four, each plus 8, the first in the lower half), ``weight_meta`` of
    int32 as :class:`twofour.Linear` has it, and ``weight_scales`` ``[rows, ceil(cols / 128)]`` or ``[rows, 1]`` of
    float16.

    Attributes:
        in_features: columns of the weight.
        out_features: its rows.
        group_size: 128, or -1 for a scale for each row.
        weight_dtype: the dtype that :attr:`weight` has.
        bias: ``[out_features]`` or ``None``; a buffer.
    """

    FROZEN_BUFFERS = ("packed", "bias")
    PARTS = ("weight_values", "weight_meta", "weight_scales")
    #: Two integers, each plus 8.
    ZERO = 0x88
    stored_dtype = "int4"

    def __init__(self, shape: tuple[int, int], group_size: int, packed: torch.Tensor, bias: torch.Tensor | None):
        expect_group_size(group_size)
        super().__init__(shape, packed, bias)
        self.group_size = group_size

    @classmethod
    def from_dense(cls, linear: nn.Linear, group_size: int = GROUP, prune: bool = False) -> Int4Linear:
        """Quantizes the weight of a linear layer, of any shape: kept values are rounded to the nearest multiple of
        their scale, which is the largest magnitude that it serves, by 7.

        Args:
            linear: the layer; its weight is float32, bfloat16 or float16. Layers that prune their weight themselves and
                sparse weights are taken as they compute, as by :meth:`twofour.Linear.from_dense`.
            group_size: 128, or -1 for a scale for each row.
            prune: keeps the two largest magnitudes of each group of four; by default the weight must be 2:4 already.

        Raises:
            ValueError: where the weight is not 2:4 and ``prune`` is not set, with row and group; where it is not
                finite, with its place; where a scale is beyond float16; for another ``group_size``; for a layer with
                parametrizations.
            TypeError: for a subclass whose own methods, such as ``forward``, would be lost.
            NotImplementedError: for another dtype.
        """
        expect_group_size(group_size)
        weight, is_pruned = weight_of(linear)
        if weight.dtype not in DTYPES:
            raise NotImplementedError(
                f"the weight has dtype {weight.dtype}; {', '.join(map(str, DTYPES))} can be quantized"
            )
        dense = weight.cpu()
        if prune and not is_pruned:
            dense = pack_by_rule(dense, "magnitude", transpose=False)[0].to_dense()
        parts = (part.to(weight.device) for part in operators.quantize_int4(dense, group_size))
        packed = operators.pack_int4(*parts, weight.shape[1], group_size)
        bias = None if linear.bias is None else linear.bias.detach().clone()
        layer = cls(tuple(weight.shape), group_size, packed, bias)
        layer.weight_dtype = weight.dtype
        return take_over(layer, linear)

    @classmethod
    def from_compressed(cls, weight: Compressed, bias: torch.Tensor | None = None) -> Int4Linear:
        """The layer of an int4 weight that :func:`twofour.load_file` returned.

        Args:
            weight: the weight, of tensors, on the device where the layer is to be.
            bias: ``[rows]``, or ``None``.

        Raises:
            TypeError: for a weight of another dtype, or of arrays.
            ValueError: where the parts break a rule of the canonical form, with row and group.
        """
        if weight.dtype != "int4" or not isinstance(weight.values, torch.Tensor):
            raise TypeError(
                f"an int4 weight of tensors is required, not one of {weight.dtype}, {type(weight.values).__name__}"
            )
        packed = operators.pack_int4(weight.values, weight.meta, weight.scales, weight.shape[1], weight.group_size)
        return cls(weight.shape, weight.group_size, packed, bias)

    @property
    def weight_scales(self) -> torch.Tensor:
        """The scales in canonical form, a copy."""
        return self.canonical()[2]

    def canonical(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, metadata and scales in canonical form."""
        return operators.canonical_int4(self._packed, self.out_features, self.in_features, self.group_size)

    def compressed(self) -> Compressed:
        """The weight as files hold it."""
        values, meta, scales = self.canonical()
        return Compressed(values, meta, (self.out_features, self.in_features), "int4", scales, self.group_size)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, group_size={self.group_size}"

    def _pack(self, values, meta, scales):
        return operators.pack_int4(values, meta, scales.half(), self.in_features, self.group_size)

    def _kinds(self):
        values, meta = parts_shapes(self.out_features, self.in_features)
        scales = 1 if self.group_size == PER_CHANNEL else -(-self.in_features // self.group_size)
        return [((values[0], values[1] // 2), torch.uint8), (meta, torch.int32), ((values[0], scales), torch.float16)]
