"""2:4 weights of integers, under the names of ``torchao.quantization``.

    twofour.quantize_(model, int8_dynamic_activation_int8_weight(layout=SemiSparseLayout()))
    twofour.quantize_(model, int4_weight_only(group_size=128, layout=MarlinSparseLayout()))

8-bit weights are quantized symmetrically with a scale for each row, activations for each token while the model runs.
4-bit weights have a scale for each 128 columns of a row, or for each row; activations stay floats. The weights must be
2:4: prune before, with :func:`twofour.prune` or :mod:`twofour.sparsity`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from .modules.conversion import chosen, expect_no_adapters, replace
from .modules.int4 import GROUP, Int4Linear, expect_group_size
from .modules.int8 import QuantizedLinear
from .modules.roles import by_default

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
        prune: keeps the two largest magnitudes of each group of four before quantizing; otherwise a weight must be 2:4
            already.

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


def quantize_(
    model: nn.Module,
    config: Int8DynamicActivationInt8WeightConfig | Int4WeightOnlyConfig | SemiSparseLayout | MarlinSparseLayout,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Replaces the linear layers of a model by :class:`QuantizedLinear` (8 bits) or :class:`Int4Linear` (4 bits), in
    place.

    Args:
        model: the model, with at least one linear layer below its root.
        config: what to quantize to: a configuration, or a layout for the configuration that has it by default.
        filter_fn: of a module and its name, whether it is replaced, where it is an ``nn.Linear``. By default those are
            that :func:`twofour.linear_layers` names, and layers that prune in training. A layer that has several names
            is replaced under all of them where the filter takes one.

    A layer that prunes its weight itself, such as :class:`twofour.sparsity.training.SemiSparseLinear`, and one with a
    sparse weight keep their masks; ``prune`` is for the others. Hooks, attributes and the training flag are those of
    the layers before.

    Returns:
        the model.

    Raises:
        ValueError: where a weight is not 2:4 or not finite, with the layer's name, row and group, where a layer has
            parametrizations or is a part of an adapter, such as peft's LoRA, or where no layer matches; no layer is
            then replaced.
        NotImplementedError: for a weight of another dtype, with the layer's name.
        TypeError: for another configuration; for a subclass of ``nn.Linear`` whose own methods, such as ``forward``,
            would be lost, with the layer's name.
    """
    quantized = _quantizer_of(config)
    takes = filter_fn or by_default(model)
    layers = chosen(model, lambda module, name: isinstance(module, nn.Linear) and takes(module, name))
    if not layers or layers[0][1] is model:
        raise ValueError(
            "no linear layer below the model's root matches: check filter_fn, or wrap the layer in nn.Sequential"
        )
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
        f"unknown configuration {type(config).__name__}: use Int8DynamicActivationInt8WeightConfig, "
        f"Int4WeightOnlyConfig, SemiSparseLayout or "
        "MarlinSparseLayout"
    )
