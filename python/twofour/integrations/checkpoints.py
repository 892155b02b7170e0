"""Packed weights of a checkpoint, as transformers reads one: a mapping of names to tensors that are read when they are
indexed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..arrays.bytes import dtype_name
from ..arrays.compression import Compressed
from ..files import STORED
from ..modules.int4 import GROUP, PER_CHANNEL, Int4Linear
from ..modules.int8 import QuantizedLinear
from ..modules.linear import DTYPES, Linear

#: The newest version of the format that is read (docs/reference/format.md).
VERSION = 2

_DTYPES = {stored: name for name, stored in STORED.items()} | {"I4": "int4"}


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a manifest says of a weight.

    Attributes:
        shape: rows and columns of the dense weight.
        dtype: the name of its dtype.
        group_size: columns that share a scale; ``None`` without the field.
    """

    shape: tuple[int, int]
    dtype: str
    group_size: int | None = None


def described(weight: Compressed) -> dict[str, Any]:
    """A manifest's entry for a weight of floats, of int8 with a scale for each row, or of int4 with groups that layers
    have."""
    stored = "I4" if weight.dtype == "int4" else STORED[weight.dtype]
    grouped = {} if weight.group_size in (None, PER_CHANNEL) else {"group_size": weight.group_size}
    return {"shape": list(weight.shape), "dtype": stored, "pattern": "2:4", **grouped}


def manifest_of(files: Iterable[str]) -> dict[str, Entry]:
    """The packed weights of the files of a checkpoint.

    Raises:
        ValueError: for a newer version, a manifest that is damaged, and two that describe a weight differently.
    """
    entries: dict[str, Entry] = {}
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("twofour")
        for name, entry in ({} if text is None else _parsed(path, text)).items():
            if entries.setdefault(name, entry) != entry:
                raise ValueError(
                    f"{path}: weight `{name}` is {entry} here and {entries[name]} in another file of the model"
                )
    return entries


def stacks_of(files: Iterable[str]) -> dict[str, tuple[list[int], bool]]:
    """The tensors of three dimensions whose matrices the files of a checkpoint have one by one: their shape, and whether
    the matrices are transposes of those of the tensor.

    Raises:
        ValueError: for a description that is damaged.
    """
    stacks: dict[str, tuple[list[int], bool]] = {}
    for path in files:
        if not str(path).endswith(".safetensors"):
            continue
        with safe_open(path, "pt") as file:
            text = (file.metadata() or {}).get("twofour.stacks")
        try:
            for name, entry in ({} if text is None else json.loads(text)).items():
                count, rows, cols = (int(size) for size in entry["shape"])
                stacks[name] = ([count, rows, cols], bool(entry["transposed"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path}: its description of experts is damaged ({error!r})") from None
    return stacks


def restacked(state: dict[str, Any], stacks: dict[str, tuple[list[int], bool]]) -> dict[str, Any]:
    """A state dict with each tensor of three dimensions in the place of its matrices.

    Raises:
        ValueError: where a matrix is missing.
    """
    for name, (shape, transposed) in stacks.items():
        around, _, last = name.removesuffix(".weight").rpartition(".")
        names = [f"{around}.{number}.{last}.weight".removeprefix(".") for number in range(shape[0])]
        missing = [f"`{matrix}`" for matrix in names if matrix not in state]
        if missing:
            raise ValueError(f"tensor `{name}` is stored expert by expert, and the files have no {missing[0]}")
        state[name] = _Stacked([state.pop(matrix) for matrix in names], transposed)
    return state


class _Stacked:
    """A tensor of three dimensions that reads its matrices."""

    def __init__(self, matrices: list[Any], transposed: bool):
        self.matrices, self.transposed = matrices, transposed

    def __getitem__(self, index):
        tensors = [matrix[...] for matrix in self.matrices]
        tensor = torch.stack([tensor.T for tensor in tensors] if self.transposed else tensors)
        return tensor if index is ... else tensor[index]


def _parsed(path: str, text: str) -> dict[str, Entry]:
    try:
        manifest = json.loads(text)
        version, weights = (
            int(manifest["version"]),
            manifest["weights"].items() if manifest["version"] <= VERSION else (),
        )
        entries = {name: _entry(fields, version) for name, fields in weights}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path}: its manifest of packed weights is damaged ({error!r})") from None
    if version > VERSION:
        raise ValueError(
            f"{path}: format version {version} is newer than {VERSION}, the newest that this version of twofour reads"
        )
    return entries


def _entry(fields: dict[str, Any], version: int) -> Entry:
    rows, cols = fields["shape"]
    dtype = _DTYPES[fields["dtype"]]
    has_groups = dtype == "int4" or (dtype == "int8" and version > 1)
    return Entry((int(rows), int(cols)), dtype, fields.get("group_size") if has_groups else None)


def has_packed(state: dict[str, Any]) -> bool:
    """Whether a state dict holds the parts of packed weights."""
    return any(name.endswith(".weight.meta") and f"{name.removesuffix('meta')}values" in state for name in state)


def with_weights(
    state: dict[str, Any],
    entries: dict[str, Entry],
    columns: Callable[[str], int | None],
    stays_packed: Callable[[str], bool],
) -> dict[str, Any]:
    """A state dict that has each packed weight under its own name, in the place of its parts, and no dense 8-bit
    integers.

    Args:
        state: tensors, or slices that are read when they are indexed, by name.
        entries: the packed weights. Those of files without a manifest, which earlier versions wrote, are found by the
            names of their parts.
        columns: of a name, the columns that the model has for that weight, or ``None``; for files without a manifest.
        stays_packed: of a name, whether its value is to be a :class:`StoredWeight` that reads packed, for a layer;
            others read dense.

    Raises:
        ValueError: where a part of a weight is missing.
    """
    state = dict(state)
    if not entries:
        entries = dict(_without_manifest(state, columns))
    for name, entry in entries.items():
        parts = {part: state.pop(f"{name}.{part}", None) for part in ("values", "meta")}
        scaled = (
            entry.dtype == "int4"
            or (entry.dtype == "int8" and f"{name}.scales" in state)
            or entry.group_size is not None
        )
        if scaled:
            parts["scales"] = state.pop(f"{name}.scales", None)
        missing = [f"`{name}.{part}`" for part, tensor in parts.items() if tensor is None]
        if missing:
            raise ValueError(
                f"tensor `{name}` is packed, and the files have no {' and no '.join(missing)}: they are not complete"
            )
        state[name] = StoredWeight(name, entry, parts, stays_packed(name))
    for name in [name for name in state if f"{name}.scales" in state]:
        values, scales = state[name], state[f"{name}.scales"]
        if not isinstance(values, StoredWeight) and _kind(values) == "int8" and _kind(scales) == "float32":
            rows, *rest = _shape(values)
            if len(rest) == 1 and _shape(scales) == [rows]:
                state[name] = _DenseIntegers(values, state.pop(f"{name}.scales"))
    return state


def _without_manifest(state: dict[str, Any], columns: Callable[[str], int | None]) -> Iterable[tuple[str, Entry]]:
    for name in state:
        base = name.removesuffix(".meta")
        if base != name and f"{base}.values" in state:
            values = state[f"{base}.values"]
            cols = columns(base)
            if cols is not None and _kind(values) in map(dtype_name, DTYPES):
                yield base, Entry((_shape(values)[0], cols), _kind(values))


def _kind(tensor: Any) -> str | None:
    """The name of the dtype of a tensor, or of a slice of a file."""
    return _DTYPES.get(tensor.get_dtype()) if hasattr(tensor, "get_dtype") else dtype_name(tensor.dtype)


def _shape(tensor: Any) -> list[int]:
    return list(tensor.get_shape() if hasattr(tensor, "get_shape") else tensor.shape)


class _DenseIntegers:
    """A dense matrix of 8-bit integers with a scale for each row, which reads as floats."""

    def __init__(self, values: Any, scales: Any):
        self.values, self.scales = values, scales

    def __getitem__(self, index):
        return self.values[...].float() * self.scales[...][:, None]


class StoredWeight:
    """A packed weight in files.

    Indexed, it is read: to a :class:`PackedWeight` where a layer takes it as it is, and else to a dense tensor.
    """

    def __init__(self, name: str, entry: Entry, parts: dict[str, Any], stays_packed: bool):
        self.name, self.entry, self.parts, self.stays_packed = name, entry, parts, stays_packed

    def __getitem__(self, index):
        values, meta = self.parts["values"][...], self.parts["meta"][...]
        scales = self.parts["scales"][...] if "scales" in self.parts else None
        group_size = self.entry.group_size
        if group_size is None and self.entry.dtype == "int4":
            group_size = PER_CHANNEL
        meta = meta.view(torch.int32) if meta.dtype == torch.uint32 else meta
        weight = PackedWeight(
            self.name, Compressed(values, meta, self.entry.shape, self.entry.dtype, scales, group_size)
        )
        return weight if self.stays_packed else weight.dense()


class PackedWeight:
    """A packed weight in memory, which moves as a tensor does."""

    def __init__(self, name: str, weight: Compressed, dtype: torch.dtype | None = None):
        self.name, self.weight, self.dtype = name, weight, dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the dense weight."""
        return self.weight.shape

    def to(self, device=None, dtype: torch.dtype | None = None) -> PackedWeight:
        """The weight on a device. ``dtype`` is that of floats; integers stay what they are."""
        weight = self.weight
        values = weight.values.to(device=device, dtype=dtype if weight.values.is_floating_point() else None)
        scales = None if weight.scales is None else weight.scales.to(device)
        kind = dtype_name(values.dtype) if values.is_floating_point() else weight.dtype
        moved = dataclasses.replace(weight, values=values, meta=weight.meta.to(device), scales=scales, dtype=kind)
        return PackedWeight(self.name, moved, dtype or self.dtype)

    def dense(self) -> torch.Tensor:
        """The dense weight: integers with scales as float32, what else as it is stored.

        Raises:
            ValueError: where the parts break a rule of the format, with the weight's name, row and group.
        """
        weight = self.weight
        try:
            dense = weight.to_dense()
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"tensor `{self.name}`: {error}") from None
        if weight.dtype != "int8":
            return dense
        is_scaled = weight.scales is not None and weight.group_size is None
        return dense.float() * weight.scales[:, None] if is_scaled else dense.float()

    def layer(self) -> nn.Module:
        """The layer that multiplies with the weight, without a bias: :class:`twofour.Linear`; of integers whose scales
        kernels have, :class:`twofour.quantization.QuantizedLinear` and :class:`twofour.Int4Linear`; of other integers
        and 8-bit floats :class:`twofour.Linear` in floats.

        Raises:
            ValueError: where the parts break a rule of the format, with the weight's name, row and group.
            NotImplementedError: for a dtype that kernels do not multiply.
        """
        weight = self.weight
        rows, cols = weight.shape
        try:
            if weight.dtype == "int4" and weight.group_size in (GROUP, PER_CHANNEL):
                return self._of_dtype(Int4Linear.from_compressed(weight))
            if weight.dtype == "int8" and weight.scales is not None and weight.group_size is None:
                return self._of_dtype(QuantizedLinear.from_compressed(weight))
            if weight.values.dtype in DTYPES:
                layer = Linear(cols, rows, False, device="meta", dtype=weight.values.dtype)
                layer._take(weight.values, weight.meta)
                return layer
        except (ValueError, RuntimeError) as error:
            raise ValueError(f"tensor `{self.name}`: {error}") from None
        dense = self.dense()
        dense = dense.to(self.dtype or torch.get_default_dtype())
        linear = nn.Linear(cols, rows, False, device="meta")
        linear.weight = nn.Parameter(dense, requires_grad=False)
        return Linear.from_dense(linear, name=self.name)

    def _of_dtype(self, layer: nn.Module) -> nn.Module:
        layer.weight_dtype = self.dtype or torch.get_default_dtype()
        return layer
