"""Would 2:4 weights make a model's linear layers faster on this machine? Measured, layer shape by layer shape."""

from __future__ import annotations

import collections
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import nn

from . import _native
from .device import device_info
from .modules.linear import DTYPES, Linear
from .modules.roles import linear_layers
from .operators.packed import pack_by_rule

#: A sample takes at least this long, so that the clock's resolution and a call's overhead do not count.
_SAMPLE_S = 2e-3

#: Weights take turns until they take so many bytes together: in a model of many layers none is in a cache when its turn
#: comes.
_COLD_BYTES = 96 << 20
_MOST_COPIES = 12


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A layer's shape at a number of tokens, dense against 2:4.

    Attributes:
        out_features: rows of the weight.
        in_features: its columns.
        layers: how many layers of the model have this shape.
        tokens: rows of the input.
        dense_us: median time of ``F.linear`` with the dense weight, in microseconds.
        sparse_us: median time with the packed 2:4 weight.
        speedup: median of the rounds' dense time over sparse time.
        low: lower quartile of the rounds' speedups.
        high: upper quartile.
    """

    out_features: int
    in_features: int
    layers: int
    tokens: int
    dense_us: float
    sparse_us: float
    speedup: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """``"faster"``, ``"slower"``, ``"as fast"``, or ``"too noisy"`` where the quartiles allow none of them: that of
        the command's ``advise``."""
        return _native.verdict(self.speedup, self.low, self.high)


@dataclasses.dataclass(frozen=True)
class Advice:
    """A table of comparisons. ``str()`` of it is meant to be read.

    Attributes:
        device: the CPU's engine and threads, or the GPU.
        dtype: the dtype that was measured, ``"bfloat16"`` for instance.
        rounds: interleaved rounds of each comparison.
        comparisons: in order of shape, then of tokens.
    """

    device: str
    dtype: str
    rounds: int
    comparisons: tuple[Comparison, ...]

    def speedup(self, tokens: int) -> float:
        """The speedup summed over the model's layers at a number of tokens.

        Raises:
            ValueError: where that number was not measured.
        """
        found = [c for c in self.comparisons if c.tokens == tokens]
        if not found:
            raise ValueError(
                f"{tokens} tokens were not measured; there are {sorted({c.tokens for c in self.comparisons})}"
            )
        return sum(c.layers * c.dense_us for c in found) / sum(c.layers * c.sparse_us for c in found)

    def __str__(self) -> str:
        head = ("weight", "layers", "tokens", "dense us", "2:4 us", "speedup", "quartiles", "")
        rows = [
            (
                f"{c.out_features}x{c.in_features}",
                str(c.layers),
                str(c.tokens),
                f"{c.dense_us:.1f}",
                f"{c.sparse_us:.1f}",
                f"{c.speedup:.2f}x",
                f"{c.low:.2f} to {c.high:.2f}",
                c.verdict,
            )
            for c in self.comparisons
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [f"2:4 against dense F.linear, {self.dtype}, {self.device}, {self.rounds} interleaved rounds"]
        for row in (head, *rows):
            cells = [
                cell.ljust(width) if i in (0, 7) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(cells).rstrip())
        for tokens in sorted({c.tokens for c in self.comparisons}):
            lines.append(f"all layers, {tokens} token{'s' if tokens > 1 else ''}: {self.speedup(tokens):.2f}x")
        return "\n".join(lines)


def advise(
    model: nn.Module | Iterable[tuple[int, int]],
    tokens: Iterable[int] = (1, 16, 512),
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    rounds: int = 9,
) -> Advice:
    """Measures, for each distinct shape of a model's linear layers, dense ``F.linear`` against a 2:4 weight, on this
    machine.

    The weights are random, so the model needs no pruning, and may be on the device ``meta``. In each round both are
    measured, in random order. Weights take turns until they exceed the caches. Other work on the machine makes the
    result noisier, and the table says so.

    Args:
        model: a module, of which the layers count that :func:`twofour.linear_layers` names, or shapes ``(out_features,
            in_features)``.
        tokens: numbers of input rows: 1 to 16 is decoding, hundreds are prefill.
        dtype: float32, bfloat16 or float16; that of the model's first linear layer by default.
        device: where to measure; where the model is by default, or the CPU.
        rounds: how often each comparison is repeated, at least 3.

    Raises:
        ValueError: where the model has no such layers; for no tokens, or fewer than 1; for fewer than 3 rounds.
        NotImplementedError: for another dtype.
    """
    tokens = [int(count) for count in tokens]
    if not tokens or min(tokens) < 1:
        raise ValueError(f"tokens must be positive numbers, not {tokens}")
    if rounds < 3:
        raise ValueError(f"rounds must be at least 3, not {rounds}")
    shapes, model_dtype, model_device = _shapes(model)
    dtype = dtype or model_dtype or torch.get_default_dtype()
    if dtype not in DTYPES:
        raise NotImplementedError(f"no kernel multiplies {dtype}; pass dtype= one of {', '.join(map(str, DTYPES))}")
    device = torch.device(device or model_device or "cpu")
    comparisons = []
    with torch.no_grad():
        for (out_features, in_features), layers in sorted(shapes.items()):
            comparisons += _compare(out_features, in_features, layers, tokens, dtype, device, rounds)
    return Advice(_described(device), str(dtype).removeprefix("torch."), rounds, tuple(comparisons))


def _shapes(model):
    """How many layers have each shape, the first one's dtype, and its device, unless that is ``meta``."""
    if not isinstance(model, nn.Module):
        shapes = collections.Counter((int(out), int(columns)) for out, columns in model)
        if not shapes or min(map(min, shapes)) < 1:
            raise ValueError("shapes (out_features, in_features) of positive numbers are required")
        return shapes, None, None
    layers = list({id(layer): layer for layer in map(model.get_submodule, linear_layers(model))}.values())
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no linear layers that are worth pruning (twofour.linear_layers): pass shapes "
            f"to measure others"
        )
    weight = layers[0].weight_values if isinstance(layers[0], Linear) else layers[0].weight
    device = None if weight.device.type == "meta" else weight.device
    return collections.Counter((layer.out_features, layer.in_features) for layer in layers), weight.dtype, device


def _compare(out_features, in_features, layers, tokens, dtype, device, rounds) -> list[Comparison]:
    dense = torch.randn(out_features, in_features, device=device).to(dtype)
    packed = pack_by_rule(dense, "magnitude", transpose=False)[0]
    copies = max(1, min(_MOST_COPIES, _COLD_BYTES // dense.nbytes))
    weights = [dense, *(dense.clone() for _ in range(copies - 1))]
    sparse = [packed, *(packed.map(torch.Tensor.clone) for _ in range(copies - 1))]
    comparisons = []
    for count in tokens:
        x = torch.randn(count, in_features, device=device).to(dtype)
        contenders = [
            _Contender([lambda w=w: F.linear(x, w) for w in weights], device),
            _Contender([lambda w=w: w.times_transpose(x) for w in sparse], device),
        ]
        samples = [[], []]
        for _ in range(rounds):
            for index in random.sample((0, 1), 2):
                samples[index].append(contenders[index].sample())
        ratios = [a / b for a, b in zip(*samples, strict=True)]
        low, speedup, high = statistics.quantiles(ratios, n=4, method="inclusive")
        times = [statistics.median(sample) * 1e6 for sample in samples]
        comparisons.append(Comparison(out_features, in_features, layers, count, *times, speedup, low, high))
    return comparisons


class _Contender:
    """Calls that do the same work on different memory, measured together."""

    def __init__(self, calls: list[Callable[[], torch.Tensor]], device: torch.device):
        self.calls = calls
        self.device = device
        # Warms up, and finds out how many passes over the calls a sample takes.
        self.passes = 1
        self.sample()
        self.passes = max(1, round(_SAMPLE_S / (self.sample() * len(calls))))

    def sample(self) -> float:
        """Seconds a call takes."""
        self._wait()
        start = time.perf_counter()
        for _ in range(self.passes):
            for call in self.calls:
                call()
        self._wait()
        return (time.perf_counter() - start) / (self.passes * len(self.calls))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _described(device: torch.device) -> str:
    info = device_info()
    if device.type == "cuda":
        return info.gpus[device.index or 0].name
    return f"CPU with {info.engine}, {info.threads} thread{'s' if info.threads != 1 else ''}"
