"""2:4 weights of integers, under the names of ``torchao.quantization``.

    twofour.quantize_(model, int8_dynamic_activation_int8_weight(layout=SemiSparseLayout()))
    twofour.quantize_(model, int4_weight_only(group_size=128, layout=MarlinSparseLayout()))

8-bit weights are quantized symmetrically with a scale for each row, activations for each token while the model runs. 4-bit weights have a scale for
each 128 columns of a row, or for each row; activations stay floats. The weights must be 2:4: prune before, with :func:`twofour.prune` or
:mod:`twofour.sparsity`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from . import _ops, _registration
from ._compression import Compressed, parts_shapes
from ._conversion import chosen, expect_no_adapters, replace, take_over, weight_of
from ._int4 import GROUP, Int4Linear, expect_group_size
from ._linear import weights_are_deferred
from ._master import cast_for_autocast
from ._memory import share_between_processes
from ._packed import Packed, pack_by_rule, pack_quantized, packed_zeros
from ._packed_buffer import PackedBuffer, plain
from ._parallel import FrozenBuffers
from ._quantized import DequantizedWeight, dequantized, integer_linear
from ._roles import by_default
from ._tracing import traceable

__all__ = [
    "Int4Linear",
    "Int4WeightOnlyConfig",
    "Int8DynamicActivationInt8WeightConfig",
    "MarlinSparseLayout",
    "QuantizedLinear",
    "SemiSparseLayout",
    "int4_weight_only",
    "int8_dynamic_activation_int8_weight",
    "quantize_",
]


@dataclasses.dataclass(frozen=True)
class SemiSparseLayout:
    """Weights are stored 2:4."""


@dataclasses.dataclass(frozen=True)
class Int8DynamicActivationInt8WeightConfig:
    """8-bit integers for weights, with a scale for each row, and for activations, with a scale for each token.

    Attributes:
        layout: how weights are stored; there is only :class:`SemiSparseLayout`.
        prune: keeps the two largest magnitudes of each group before quantizing; otherwise a weight must be 2:4 already.
    """

    layout: SemiSparseLayout = dataclasses.field(default_factory=SemiSparseLayout)
    prune: bool = False


def int8_dynamic_activation_int8_weight(
    layout: SemiSparseLayout | None = None, *, prune: bool = False
) -> Int8DynamicActivationInt8WeightConfig:
    """The configuration under its older name."""
    return Int8DynamicActivationInt8WeightConfig(SemiSparseLayout() if layout is None else layout, prune)


@dataclasses.dataclass(frozen=True)
class MarlinSparseLayout:
    """Weights are stored 2:4 in four bits."""


@dataclasses.dataclass(frozen=True)
class Int4WeightOnlyConfig:
    """4-bit integers for weights; activations stay floats.

    Attributes:
        group_size: 128, a scale for each 128 columns of a row, or -1, one for each row.
        layout: how weights are stored; there is only :class:`MarlinSparseLayout`.
        int4_packing_format: the same under torchao's later name; there is only ``"marlin_sparse"``.
        prune: keeps the two largest magnitudes of each group of four before quantizing; otherwise a weight must be 2:4 already.

    Raises:
        ValueError: for another ``group_size`` or ``int4_packing_format``.
        TypeError: for another ``layout``.
    """

    group_size: int = GROUP
    layout: MarlinSparseLayout = dataclasses.field(default_factory=MarlinSparseLayout)
    int4_packing_format: str = "marlin_sparse"
    prune: bool = False

    def __post_init__(self):
        expect_group_size(self.group_size)
        if not isinstance(self.layout, MarlinSparseLayout):
            raise TypeError(f"int4 weights have the layout MarlinSparseLayout, not {type(self.layout).__name__}")
        if self.int4_packing_format != "marlin_sparse":
            raise ValueError(f'int4_packing_format is {self.int4_packing_format!r}: only "marlin_sparse" is 2:4')


def int4_weight_only(
    group_size: int = GROUP, layout: MarlinSparseLayout | None = None, *, prune: bool = False
) -> Int4WeightOnlyConfig:
    """The configuration under its older name."""
    return Int4WeightOnlyConfig(group_size, MarlinSparseLayout() if layout is None else layout, prune=prune)


@share_between_processes
class QuantizedLinear(FrozenBuffers, nn.Module):
    """A linear layer for inference whose weight is 2:4 and of 8-bit integers.

    ``y = x_scale[token] * scale[row] * (x_int8 @ W_int8.T) + bias``: the sums of integers are exact. The state dict holds the canonical form
    (``weight_values``, ``weight_meta``, ``weight_scales``), which every device reads.

    Attributes:
        weight_dtype: the dtype that :attr:`weight` has.
    """

    FROZEN_BUFFERS = ("packed", "weight_scales", "bias")

    def __init__(self, weight: Packed, scales: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        _registration.with_transformers()
        self.out_features, self.in_features = weight.rows, weight.cols
        self.weight_dtype = torch.float32 if bias is None else bias.dtype
        self.register_buffer("packed", PackedBuffer.of(weight.forward), persistent=False)
        self.register_buffer("weight_scales", scales)
        self.register_buffer("bias", bias)

    @classmethod
    def from_dense(cls, linear: nn.Linear, prune: bool = False) -> QuantizedLinear:
        """Quantizes the weight of a linear layer. Layers that prune their weight themselves and sparse weights are taken as they compute, as by
        :meth:`twofour.Linear.from_dense`.

        Raises:
            ValueError: where the weight is not 2:4 and ``prune`` is not set, with row and group, or not finite; for a layer with parametrizations.
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
        if weight.dtype != "int8" or weight.scales is None or weight.group_size is not None or not isinstance(weight.values, torch.Tensor):
            raise TypeError("an int8 weight of tensors with a scale for each row is required")
        return cls(Packed(rows, cols, _ops.from_canonical(weight.values.contiguous(), weight.meta.contiguous(), cols)), weight.scales, bias)

    @property
    def stored_dtype(self) -> str:
        """The name of the dtype that the weight has in files."""
        return "int8"

    @property
    def weight(self) -> torch.Tensor:
        """The dequantized weight, in the dtype of the layer that was quantized: for modules that read its dtype, as T5's, or multiply with it themselves,
        as ``nn.MultiheadAttention`` with that of ``out_proj``."""
        return DequantizedWeight.of(self)

    @property
    def weight_values(self) -> torch.Tensor:
        """The kept integers in canonical form, a copy."""
        return self.compressed().values

    @property
    def weight_meta(self) -> torch.Tensor:
        """The metadata in canonical form, a copy."""
        return self.compressed().meta

    def compressed(self) -> Compressed:
        """The weight as files hold it."""
        shape = self.out_features, self.in_features
        return Compressed(*_ops.canonical(plain(self.packed), *shape), shape, "int8", self.weight_scales)

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T + bias``.

        Args:
            x: ``[..., in_features]`` of bfloat16, float16, or float32 on a CPU; under autocast it is
                converted to autocast's dtype.

        Returns:
            ``[..., out_features]`` of the same dtype. The input's gradient is a dense GEMM with the dequantized weight: the rounding of the input
            counts as none (straight-through).

        Raises:
            RuntimeError: for another number of features.
            NotImplementedError: for another dtype.
        """
        x, bias = cast_for_autocast(x, self.bias)
        return integer_linear(x, plain(self.packed), self.weight_scales, bias, (self.out_features, self.in_features), -1)

    def to_dense(self) -> torch.Tensor:
        """The weight that the layer multiplies with, in float32."""
        return dequantized(plain(self.packed), self.weight_scales, self.out_features, self.in_features, -1)

    def _apply(self, fn, recurse=True):
        # The packed layout depends on the device; scales stay in float32.
        packed, scales = plain(self.packed), self.weight_scales
        device = fn(packed.new_empty(1)).device
        self.weight_dtype = fn(packed.new_empty(0, dtype=self.weight_dtype)).dtype
        if device == packed.device:
            moved = fn(packed)
            packed = moved if moved.dtype == packed.dtype else packed
        elif packed.device.type == "meta":
            packed = packed_zeros(self.out_features, self.in_features, torch.int8, device)
        else:
            packed = Packed(self.out_features, self.in_features, packed).to(device=device).forward
        self.packed = self.weight_scales = None
        super()._apply(fn, recurse)
        moved = fn(scales)
        self.packed, self.weight_scales = PackedBuffer.of(packed), moved if moved.dtype == scales.dtype else scales.to(device)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if weights_are_deferred():
            del destination[prefix + "weight_scales"]
            destination[prefix + "weight"] = self
            return
        weight = self.compressed()
        destination[prefix + "weight_values"], destination[prefix + "weight_meta"] = weight.values, weight.meta

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        names = [prefix + name for name in ("weight_values", "weight_meta")]
        given = {name: state_dict[name] for name in names if name in state_dict}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        unexpected_keys[:] = [key for key in unexpected_keys if key not in given]
        missing_keys.extend(name for name in names if name not in given)
        if len(given) < 2:
            return
        try:
            self.packed = PackedBuffer.of(self._packed_of(*given.values()))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            error_msgs.append(f"{prefix}weight: {error}")

    def _packed_of(self, values: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
        shapes = [tuple(part.shape) for part in (values, meta)]
        expected = list(parts_shapes(self.out_features, self.in_features))
        if shapes != expected or values.dtype != torch.int8:
            raise RuntimeError(f"the parts have the shapes {shapes} and {values.dtype}, the layer {expected} and torch.int8")
        device = self.packed.device if self.packed.device.type != "meta" else values.device
        parts = (part.to(device).contiguous() for part in (values, meta))
        return _ops.from_canonical(*parts, self.in_features)

    def __getstate__(self):
        weight = self.compressed()
        return {**super().__getstate__(), "_buffers": {**self._buffers, "packed": None}, "_canonical": (weight.values, weight.meta)}

    def __setstate__(self, state):
        parts = state.pop("_canonical")
        super().__setstate__(state)
        self.packed = PackedBuffer.of(_ops.from_canonical(*parts, self.in_features))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantize_(
    model: nn.Module,
    config: Int8DynamicActivationInt8WeightConfig | Int4WeightOnlyConfig | SemiSparseLayout | MarlinSparseLayout,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replaces the linear layers of a model by :class:`QuantizedLinear` (8 bits) or :class:`Int4Linear` (4 bits), in place.

    Args:
        model: the model, with at least one linear layer below its root.
        config: what to quantize to: a configuration, or a layout for the configuration that has it by default.
        filter_fn: of a module and its name, whether it is replaced, where it is an ``nn.Linear``. By default those are that
            :func:`twofour.linear_layers` names, and layers that prune in training. A layer that has several names is replaced under all of them
            where the filter takes one.

    A layer that prunes its weight itself, such as :class:`twofour.sparsity.training.SemiSparseLinear`, and one with a sparse weight keep their masks;
    ``prune`` is for the others. Hooks, attributes and the training flag are those of the layers before.

    Returns:
        the model.

    Raises:
        ValueError: where a weight is not 2:4 or not finite, with the layer's name, row and group, where a layer has parametrizations or is a part of
            an adapter, such as peft's LoRA, or where no layer matches; no layer is then replaced.
        NotImplementedError: for a weight of another dtype, with the layer's name.
        TypeError: for another configuration; for a subclass of ``nn.Linear`` whose own methods, such as ``forward``, would be lost, with the
            layer's name.
    """
    quantized = _quantizer_of(config)
    takes = filter_fn or by_default(model)
    layers = chosen(model, lambda module, name: isinstance(module, nn.Linear) and takes(module, name))
    if not layers or layers[0][1] is model:
        raise ValueError("no linear layer below the model's root matches: check filter_fn, or wrap the layer in nn.Sequential")
    expect_no_adapters(model, layers)
    pairs = []
    for name, module in layers:
        try:
            pairs.append((module, quantized(module)))
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{name}.weight: {error}") from None
    replace(model, pairs)
    return model


def _quantizer_of(config) -> Callable[[nn.Linear], nn.Module]:
    """What makes a quantized layer of a dense one."""
    if isinstance(config, SemiSparseLayout):
        config = Int8DynamicActivationInt8WeightConfig(config)
    if isinstance(config, MarlinSparseLayout):
        config = Int4WeightOnlyConfig(layout=config)
    if isinstance(config, Int8DynamicActivationInt8WeightConfig):
        return lambda linear: QuantizedLinear.from_dense(linear, config.prune)
    if isinstance(config, Int4WeightOnlyConfig):
        return lambda linear: Int4Linear.from_dense(linear, config.group_size, config.prune)
    raise TypeError(
        f"unknown configuration {type(config).__name__}: use Int8DynamicActivationInt8WeightConfig, Int4WeightOnlyConfig, SemiSparseLayout or "
        "MarlinSparseLayout"
    )
