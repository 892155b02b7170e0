"""Plans the GEMMs of a model before its first call."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from ..operators.float8 import FLOAT8
from ..operators.packed import Packed
from .fused import multiplying
from .int4 import Int4Linear
from .int8 import QuantizedLinear

#: Layers whose weights are integers with scales.
_INTEGERS = (Int4Linear, QuantizedLinear)


def warm(model: nn.Module, tokens: Iterable[int] = (1,), gradients: bool = False) -> int:
    """Computes each sparse layer of a model once for each number of tokens, on zeros, and drops the results.

    On a GPU the first GEMM of a shape compiles and loads its kernel, and chooses a method; a CUDA graph cannot hold
    that. Kernels of different shapes compile at the same time. On a CPU there is nothing to plan, so calls are only
    checked.

    Args:
        model: a model with weights of :mod:`twofour.sparse`, or layers such as :class:`twofour.Linear`,
            :class:`twofour.quantization.QuantizedLinear` and :class:`twofour.Int4Linear`. Weights of integers meet
            activations of the bias's type, or without a bias of bfloat16 and of float16. GEMMs of int8 tensors by int8
            tensors, and ``torch._scaled_mm``, are not planned.
        tokens: the numbers of tokens, which are the products of all dimensions of an input but the last.
        gradients: whether to plan the input gradients, too.

    Returns:
        the number of sparse layers, those that :func:`twofour.transformers.optimize` made one counted as one.

    Raises:
        ValueError: for a number of tokens below 1, or where the model has no sparse layer.
    """
    tokens = sorted(set(tokens))
    if not tokens or tokens[0] < 1:
        raise ValueError(f"tokens must be numbers of at least 1, and are {tokens}")
    modules = {id(layer): layer for layer in map(multiplying, model.modules())}.values()
    layers = [(module, packed) for module in modules if (packed := _packed_of(module)) is not None]
    if not layers:
        raise ValueError("the model has no sparse layer: compress its weights first")
    devices = {(packed.packed if isinstance(packed, _INTEGERS) else packed.tensors()[0]).device for _, packed in layers}
    on_gpu = any(device.type == "cuda" for device in devices)
    if on_gpu:
        _compile(layers, tokens, gradients)
    _compute(layers, tokens, gradients)
    if on_gpu:
        # A graph is captured on a stream of its own, which has a workspace of its own.
        if torch.cuda.graph.default_capture_stream is None:
            torch.cuda.graph.default_capture_stream = torch.cuda.Stream()
        with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
            _compute(layers, tokens, gradients)
        torch.cuda.synchronize()
    return len(layers)


def _compile(layers: list, tokens: list[int], gradients: bool) -> None:
    """Computes the first layer of each kind for each number of tokens, all at the same time."""
    kinds = {}
    for module, packed in layers:
        integers = isinstance(packed, _INTEGERS)
        shape = (packed.out_features, packed.in_features) if integers else (packed.rows, packed.cols)
        tensor = packed.packed if integers else packed.tensors()[0]
        bias = getattr(module, "bias", None)
        kind = type(packed), shape, tensor.dtype, tensor.device, bias is None or bias.dtype
        kinds.setdefault(kind, (tensor.device, module, packed))

    def compute(work):
        (device, *layer), count = work
        with torch.cuda.device(device):
            _compute([layer], [count], gradients)

    with ThreadPoolExecutor() as pool:
        for _ in pool.map(compute, [(kind, count) for kind in kinds.values() for count in tokens]):
            pass


def _compute(layers: list, tokens: list[int], gradients: bool) -> None:
    with torch.inference_mode():
        for module, packed in layers:
            if isinstance(packed, _INTEGERS):
                _compute_integers(packed, tokens)
                continue
            some = packed.tensors()[0]
            bias = getattr(module, "bias", None)
            for count in tokens:
                x = torch.zeros(count, packed.cols, dtype=packed.dtype, device=some.device)
                packed.times_transpose(x)
                if bias is not None:
                    packed.times_transpose(x, bias)
                if gradients:
                    packed.times(torch.zeros(count, packed.rows, dtype=packed.dtype, device=some.device))


def _compute_integers(layer: Int4Linear | QuantizedLinear, tokens: list[int]) -> None:
    # The weight does not say which activations it meets; a bias does.
    dtypes = [torch.bfloat16, torch.float16] if layer.bias is None else [layer.bias.dtype]
    for dtype in dtypes:
        for count in tokens:
            layer(torch.zeros(count, layer.in_features, dtype=dtype, device=layer.packed.device))


def _packed_of(module: nn.Module) -> Packed | Int4Linear | QuantizedLinear | None:
    """The packed weight of a layer of floats, if it has one, or a layer of integers."""
    if isinstance(module, _INTEGERS):
        return module
    packed = getattr(module, "packed_weight", None)
    if packed is None:
        packed = getattr(getattr(module, "weight", None), "packed_weight", None)
    return packed if isinstance(packed, Packed) and packed.dtype not in (torch.int8, *FLOAT8) else None
