"""Linear layers whose weights are 2:4 and of 4-bit integers."""

from __future__ import annotations

import torch
from torch import nn

from . import _ops, _registration
from ._compression import Compressed
from ._conversion import take_over, weight_of
from ._linear import DTYPES, weights_are_deferred
from ._memory import share_between_processes
from ._packed import metadata_of_zeros, pack_by_rule
from ._packed_buffer import PackedBuffer, plain
from ._parallel import FrozenBuffers
from ._quantized import DequantizedWeight, dequantized, integer_linear
from ._tracing import traceable

#: Columns that share a scale, and the number that stands for a whole row.
GROUP, PER_CHANNEL = 128, -1


def expect_group_size(group_size: int) -> None:
    """Raises:
    ValueError: for a group size that no kernel has.
    """
    if group_size not in (GROUP, PER_CHANNEL):
        raise ValueError(f"group_size is {group_size!r}: use {GROUP}, a scale for each {GROUP} columns of a row, or {PER_CHANNEL}, one for each row")


@share_between_processes
class Int4Linear(FrozenBuffers, nn.Module):
    """A linear layer for inference whose weight is 2:4 and of 4-bit integers: 3 bits for each element of the dense weight, and the scales.

    ``y = x @ (q * scale).T + bias``, symmetric, with a scale of float16 for each 128 columns of a row or for each row: the arithmetic of
    Sparse-Marlin (Frantar et al., 2024, "MARLIN: Mixed-Precision Auto-Regressive Parallel Inference on Large Language Models"). Activations stay
    floats: bfloat16 or float16, and float32 on a CPU. The weight has no gradient; that of the input is a dense GEMM with the dequantized weight.

    On a GPU kernels multiply integers, up to 64 tokens at a time, and scale the sums. On a CPU parts of the weight become floats in each call, in a
    core's cache; ``docs/reference/pytorch-benchmarks.md`` has measured times. With many tokens :class:`twofour.Linear` is faster there.

    The state dict holds the canonical form, which every device reads: ``weight_values`` ``[rows, ceil(cols / 4)]`` of uint8 (the two kept integers of
    each group of four, each plus 8, the first in the lower half), ``weight_meta`` of int32 as :class:`twofour.Linear` has it, and
    ``weight_scales`` ``[rows, ceil(cols / 128)]`` or ``[rows, 1]`` of float16.

    Attributes:
        in_features: columns of the weight.
        out_features: its rows.
        group_size: 128, or -1 for a scale for each row.
        weight_dtype: the dtype that :attr:`weight` has.
        bias: ``[out_features]`` or ``None``; a buffer.
    """

    FROZEN_BUFFERS = ("packed", "bias")

    def __init__(self, shape: tuple[int, int], group_size: int, packed: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        _registration.with_transformers()
        expect_group_size(group_size)
        self.out_features, self.in_features = shape
        self.group_size = group_size
        self.weight_dtype = torch.float32 if bias is None else bias.dtype
        self.register_buffer("packed", PackedBuffer.of(packed), persistent=False)
        self.register_buffer("bias", bias)

    @classmethod
    def from_dense(cls, linear: nn.Linear, group_size: int = GROUP, prune: bool = False) -> Int4Linear:
        """Quantizes the weight of a linear layer, of any shape: kept values are rounded to the nearest multiple of their scale, which is the largest
        magnitude that it serves, by 7.

        Args:
            linear: the layer; its weight is float32, bfloat16 or float16. Layers that prune their weight themselves and sparse weights are taken as
                they compute, as by :meth:`twofour.Linear.from_dense`.
            group_size: 128, or -1 for a scale for each row.
            prune: keeps the two largest magnitudes of each group of four; by default the weight must be 2:4 already.

        Raises:
            ValueError: where the weight is not 2:4 and ``prune`` is not set, with row and group; where it is not finite, with its place; where a
                scale is beyond float16; for another ``group_size``; for a layer with parametrizations.
            TypeError: for a subclass whose own methods, such as ``forward``, would be lost.
            NotImplementedError: for another dtype.
        """
        expect_group_size(group_size)
        weight, is_pruned = weight_of(linear)
        if weight.dtype not in DTYPES:
            raise NotImplementedError(f"the weight has dtype {weight.dtype}; {', '.join(map(str, DTYPES))} can be quantized")
        dense = weight.cpu()
        if prune and not is_pruned:
            dense = pack_by_rule(dense, "magnitude", transpose=False)[0].to_dense()
        parts = (part.to(weight.device) for part in _ops.quantize_int4(dense, group_size))
        packed = _ops.pack_int4(*parts, weight.shape[1], group_size)
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
            raise TypeError(f"an int4 weight of tensors is required, not one of {weight.dtype}, {type(weight.values).__name__}")
        packed = _ops.pack_int4(weight.values, weight.meta, weight.scales, weight.shape[1], weight.group_size)
        return cls(weight.shape, weight.group_size, packed, bias)

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T + bias``.

        Args:
            x: ``[..., in_features]`` of bfloat16, float16, or float32 on a CPU; under autocast it is converted to autocast's dtype.

        Returns:
            ``[..., out_features]`` of the same dtype.

        Raises:
            RuntimeError: for another number of features.
            NotImplementedError: for another dtype.
        """
        bias = self.bias
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
            bias = None if bias is None else bias.to(x.dtype)
        return integer_linear(x, plain(self.packed), None, bias, (self.out_features, self.in_features), self.group_size)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, in the dtype of the layer that was quantized: for modules that read its dtype, as T5's, or multiply with it themselves,
        as ``nn.MultiheadAttention`` with that of ``out_proj``."""
        return DequantizedWeight.of(self)

    @property
    def weight_values(self) -> torch.Tensor:
        """The kept integers in canonical form, a copy."""
        return self.canonical()[0]

    @property
    def weight_meta(self) -> torch.Tensor:
        """The metadata in canonical form, a copy."""
        return self.canonical()[1]

    @property
    def weight_scales(self) -> torch.Tensor:
        """The scales in canonical form, a copy."""
        return self.canonical()[2]

    def canonical(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values, metadata and scales in canonical form."""
        return _ops.canonical_int4(plain(self.packed), self.out_features, self.in_features, self.group_size)

    @property
    def stored_dtype(self) -> str:
        """The name of the dtype that the weight has in files."""
        return "int4"

    def compressed(self) -> Compressed:
        """The weight as files hold it."""
        values, meta, scales = self.canonical()
        return Compressed(values, meta, (self.out_features, self.in_features), "int4", scales, self.group_size)

    def to_dense(self) -> torch.Tensor:
        """The weight that the layer multiplies with, ``[out_features, in_features]`` in float32."""
        return dequantized(plain(self.packed), None, self.out_features, self.in_features, self.group_size)

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{sizes}, group_size={self.group_size}"

    # Moving, saving, loading.

    def _apply(self, fn, recurse=True):
        # The packed layout depends on the device.
        packed = plain(self._buffers["packed"])
        device = fn(packed.new_empty(1)).device
        self.weight_dtype = fn(packed.new_empty(0, dtype=self.weight_dtype)).dtype
        if device == packed.device:
            moved = fn(packed)
            packed = moved if moved.dtype == packed.dtype else packed
        else:
            parts = self._zeros(device) if packed.device.type == "meta" else [part.to(device) for part in self.canonical()]
            packed = _ops.pack_int4(*parts, self.in_features, self.group_size)
        # The base class leaves it alone.
        before, self._buffers["packed"] = self._buffers["packed"], None
        try:
            super()._apply(fn, recurse)
        except BaseException:
            self._buffers["packed"] = before
            raise
        self._buffers["packed"] = PackedBuffer.of(packed)
        return self

    def _zeros(self, device) -> list[torch.Tensor]:
        """The canonical form of a weight of zeros."""
        values, meta, scales = (torch.zeros(part.shape, dtype=part.dtype, device=device) for part in self.canonical())
        return [values.fill_(0x88), metadata_of_zeros(meta.shape, values.shape[1], device), scales.fill_(1)]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if weights_are_deferred():
            destination[prefix + "weight"] = self
            return
        destination.update(zip((prefix + name for name in _PARTS), self.canonical(), strict=True))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        names = [prefix + name for name in _PARTS]
        given = {name: state_dict[name] for name in names if name in state_dict}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        unexpected_keys[:] = [key for key in unexpected_keys if key not in given]
        missing = [name for name in names if name not in given]
        missing_keys.extend(missing)
        if missing:
            return
        try:
            self._buffers["packed"] = PackedBuffer.of(self._packed_of(*given.values()))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            error_msgs.append(f"{prefix}weight: {error}")

    def _packed_of(self, values: torch.Tensor, meta: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if values.shape[0] != self.out_features:
            raise RuntimeError(f"the values have {values.shape[0]} rows, the layer {self.out_features} out_features")
        device = self._buffers["packed"].device
        device = values.device if device.type == "meta" else device
        parts = (part.to(device).contiguous() for part in (values, meta, scales.half()))
        return _ops.pack_int4(*parts, self.in_features, self.group_size)

    def __getstate__(self):
        state = self.__dict__.copy()
        state["_buffers"] = {**self._buffers, "packed": None}
        state["_canonical"] = self.canonical()
        return state

    def __setstate__(self, state):
        parts = state.pop("_canonical")
        super().__setstate__(state)
        self._buffers["packed"] = PackedBuffer.of(_ops.pack_int4(*parts, self.in_features, self.group_size))


_PARTS = ("weight_values", "weight_meta", "weight_scales")
