"""Models on disk, in the format of the command line tool: safetensors, plain and compressed
(docs/reference/format.md)."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from . import _native
from .arrays.bytes import bytes_of, dtype_name, empty, is_tensor, numpy_dtype, writable_bytes
from .arrays.compression import Compressed, compress_named, empty_parts

#: The names of dtypes in safetensors files.
STORED = _native.STORED_DTYPES
_LOADED = {stored: name for name, stored in STORED.items()}


def save_file(
    model_or_tensors: Any,
    path: str | os.PathLike,
    *,
    compress: str | Iterable[str] = (),
    dtypes: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes a model or tensors to one safetensors file, which the command line tool reads.

    Sparse tensors of :mod:`twofour.sparse`, weights of :class:`twofour.Linear`,
    :class:`twofour.quantization.QuantizedLinear` and :class:`twofour.Int4Linear`, and :class:`twofour.Compressed`
    objects are stored compressed, as ``<name>.values``, ``<name>.meta`` and, of integers, ``<name>.scales``; dense
    tensors as they are, and sparse ones that are 2:4 along their columns alone dense. The file appears under its name when it is complete and on the disk, or not at all. One
    compressed weight is in memory at a time.

    Args:
        model_or_tensors: an ``nn.Module``, or a mapping of names to numpy arrays, torch tensors, ``Compressed`` objects
            or such layers (under the names of their weights).
        path: the file to write.
        compress: names, or patterns with ``*``, of dense matrices to store compressed; they must be 2:4 along their
            rows.
        dtypes: what arrays of unsigned integers hold, by name: ``"bfloat16"`` for instance.
        metadata: strings for the header. ``format`` is ``"pt"`` where there is a tensor, and may be given otherwise.
        overwrite: replaces an existing file, in one step.

    Raises:
        ValueError: where a matrix that is to be compressed is not 2:4, with its name, row and group; where a pattern of
            ``compress`` matches nothing.
        TypeError: for an entry or a dtype that cannot be stored, with its name.
        FileExistsError: where the file exists and ``overwrite`` is false.
        OSError: where the system refuses.
    """
    entries = _entries(model_or_tensors)
    dtypes = dict(dtypes or {})
    asked = _matching(entries, [compress] if isinstance(compress, str) else list(compress))
    header = {"format": "pt"} if any(_of_torch(entry) for entry in entries.values()) else {}
    header.update(metadata or {})
    plain, weights = [], []
    for name, entry in entries.items():
        shape, dtype = _described(name, entry, dtypes.get(name))
        if name in asked or not _is_dense(entry):
            if 0 in shape:
                raise ValueError(
                    f"tensor `{name}`: a weight without elements, {list(shape)}, is stored dense: leave it out of "
                    f"compress"
                )
            weights.append((name, dtype, *shape, _group_size(entry)))
        else:
            plain.append((name, STORED[dtype], list(shape)))
    for name, dtype, *_ in weights:
        # Before the file is begun, so that the error comes at once.
        if name in asked:
            compress_named(name, entries[name], False, dtypes.get(name))
    writer = _native.FileWriter(os.fspath(path), overwrite, plain, weights, header)
    for name, *_ in plain:
        entry = entries[name]
        dense = entry.to_dense() if _is_sparse(entry) else entry
        writer.write(name, bytes_of(dense, dtypes.get(name)).data)
    for name, *_ in weights:
        weight = compressed_entry(name, entries[name], dtypes.get(name))
        scales = None if weight.scales is None else bytes_of(weight.scales).data
        writer.write_compressed(name, bytes_of(weight.values).data, bytes_of(weight.meta).data, scales)
    writer.finish()


def _entries(model_or_tensors: Any) -> dict[str, Any]:
    if hasattr(model_or_tensors, "state_dict"):
        from .modules.packed_layer import deferred_weights

        with deferred_weights():
            return dict(model_or_tensors.state_dict())
    if isinstance(model_or_tensors, Mapping):
        return dict(model_or_tensors)
    raise TypeError(
        f"save_file requires an nn.Module or a mapping of names to tensors, not {type(model_or_tensors).__name__}"
    )


def _matching(entries: dict[str, Any], patterns: list[str]) -> set[str]:
    asked = set()
    for pattern in patterns:
        found = fnmatch.filter(entries, pattern)
        if not found:
            raise ValueError(
                f"compress: no tensor is named `{pattern}`; there are "
                f"{', '.join(list(entries)[:8])}{' …' if len(entries) > 8 else ''}"
            )
        asked.update(found)
    return asked


def _is_layer(entry: Any) -> bool:
    """Whether an entry is a layer, which stands for its packed weight."""
    return hasattr(entry, "stored_dtype")


def _group_size(entry: Any) -> int | None:
    """The group size of the scales that are stored with an entry: -1 for a scale for each row, ``None`` without
    scales."""
    if isinstance(entry, Compressed):
        return -1 if entry.scales is not None and entry.group_size is None else entry.group_size
    return getattr(entry, "group_size", -1 if hasattr(entry, "weight_scales") else None)


def _is_sparse(entry: Any) -> bool:
    return is_tensor(entry) and hasattr(entry, "packed_weight")


def is_transpose(entry: Any) -> bool:
    """Whether a sparse tensor is 2:4 along its columns alone, as the weight of transformers' ``Conv1D`` is."""
    return entry.packed_weight.forward is None


def _is_dense(entry: Any) -> bool:
    return not (isinstance(entry, Compressed) or _is_layer(entry) or (_is_sparse(entry) and not is_transpose(entry)))


def _of_torch(entry: Any) -> bool:
    return _is_layer(entry) or is_tensor(entry.values if isinstance(entry, Compressed) else entry)


def _described(name: str, entry: Any, dtype: str | None) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an entry."""
    if isinstance(entry, Compressed):
        return tuple(entry.shape), entry.dtype
    if _is_layer(entry):
        return (entry.out_features, entry.in_features), entry.stored_dtype
    if is_tensor(entry):
        shape, dtype = tuple(entry.shape), dtype_name(entry.dtype)
    elif isinstance(entry, (np.ndarray, np.generic)):
        shape, dtype = entry.shape, dtype or entry.dtype.name
    else:
        raise TypeError(
            f"tensor `{name}`: {type(entry).__name__} cannot be stored; numpy arrays, torch tensors and Compressed can"
        )
    if dtype not in STORED:
        raise TypeError(f"tensor `{name}`: safetensors has no dtype {dtype}")
    return shape, dtype


def compressed_entry(name: str, entry: Any, dtype: str | None) -> Compressed:
    """The canonical form of an entry that is stored compressed."""
    if isinstance(entry, Compressed):
        return entry
    if _is_layer(entry):
        return entry.compressed()
    if _is_sparse(entry) and not is_transpose(entry):
        from . import operators

        weight = entry.packed_weight
        values, meta = operators.canonical(weight.forward, weight.rows, weight.cols)
        return Compressed(values, meta, (weight.rows, weight.cols), dtype_name(values.dtype))
    # Dense, or 2:4 along its columns.
    return compress_named(name, entry, False, dtype)


def load_file(path: str | os.PathLike, *, framework: str | None = None, device: Any = "cpu") -> dict[str, Any]:
    """Reads a model: a safetensors file, an index of several, or a folder that holds either.

    Args:
        path: the file or folder; plain safetensors files are taken, too.
        framework: ``"torch"`` or ``"numpy"``; torch where it is installed by default.
        device: where tensors go; for torch.

    Returns:
        tensors by name. A compressed weight is a sparse tensor of :mod:`twofour.sparse` in torch, where kernels
        multiply its dtype (float32, bfloat16, float16), and a :class:`twofour.Compressed` otherwise, of integers with
        their scales (:meth:`twofour.Int4Linear.from_compressed`,
        :meth:`twofour.quantization.QuantizedLinear.from_compressed`). Plain bfloat16 and float8 arrays are of
        ``ml_dtypes`` where that is installed, else unsigned integers that hold the bits.

    Raises:
        ValueError: where the file is damaged, of another kind, or of a newer version.
        FileNotFoundError: where there is none.
        OSError: where the system refuses.
        TypeError: for a dtype that the framework lacks, with the tensor's name.
    """
    if framework is None:
        framework = "torch" if importlib.util.find_spec("torch") else "numpy"
    if framework not in ("numpy", "torch"):
        raise ValueError(f'framework {framework!r} is unknown; use "torch" or "numpy"')
    in_torch = framework == "torch"
    reader = _native.FileReader(os.fspath(path))
    tensors = {}
    for name, stored, shape in reader.tensors():
        tensor = _new(name, stored, tuple(shape), in_torch)
        reader.read(name, writable_bytes(tensor))
        tensors[name] = tensor.to(device) if in_torch else tensor
    for name, dtype, rows, cols, group_size in reader.weights():
        values, meta = empty_parts(rows, cols, dtype, in_torch)
        scales = None
        if dtype == "int4" or (group_size or 0) > 0:
            scales = empty((rows, 1 if group_size < 0 else -(-cols // group_size)), "float16", in_torch)
        elif group_size is not None:
            scales, group_size = empty((rows,), "float32", in_torch), None
        reader.read_compressed(
            name, *(None if part is None else writable_bytes(part) for part in (values, meta, scales))
        )
        if in_torch:
            values, meta, scales = (None if part is None else part.to(device) for part in (values, meta, scales))
        tensors[name] = _weight(Compressed(values, meta, (rows, cols), dtype, scales, group_size), in_torch)
    return tensors


def _new(name: str, stored: str, shape: tuple[int, ...], in_torch: bool):
    try:
        if in_torch:
            import torch

            return torch.empty(shape, dtype=getattr(torch, _LOADED[stored]))
        return np.empty(shape, numpy_dtype(_LOADED[stored]))
    except (KeyError, AttributeError, TypeError):
        raise TypeError(f"tensor `{name}`: {'torch' if in_torch else 'numpy'} has no dtype for {stored}") from None


def _weight(weight: Compressed, in_torch: bool):
    """A sparse tensor where kernels multiply the dtype."""
    if not in_torch or weight.dtype not in ("float32", "bfloat16", "float16"):
        return weight
    from . import operators
    from .operators.packed import Packed
    from .tensor.semi_structured import SparseSemiStructuredTensorCUSPARSELT

    rows, cols = weight.shape
    return SparseSemiStructuredTensorCUSPARSELT._of(
        Packed(rows, cols, operators.from_canonical(weight.values, weight.meta, cols))
    )


def load_model(model: Any, path: str | os.PathLike, *, strict: bool = True):
    """Reads a file into a module: dense tensors by ``load_state_dict``, compressed weights into the layers of their
    names.

    A compressed weight goes into a :class:`twofour.Linear`, one of integers into a
    :class:`twofour.quantization.QuantizedLinear` or :class:`twofour.Int4Linear`, or takes the place of another module's
    parameter, ``nn.Linear.weight`` for instance, as a frozen sparse parameter. All take the devices and dtypes that the
    module has.

    Args:
        model: the ``nn.Module``.
        path: as for :func:`load_file`.
        strict: whether names that only the file or only the module has are an error.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict``.

    Raises:
        RuntimeError: for names or shapes that do not fit, all of them, as ``load_state_dict``. The module may have been
            changed in part.
        TypeError: for a compressed weight of a dtype that kernels do not multiply, with its name.
        ValueError, OSError: as :func:`load_file`.
    """
    from torch import nn

    from .modules import sparse_weight as _layers  # An nn.Linear may have such a weight.

    tensors = load_file(path, framework="torch")
    replaced = set()
    for name, tensor in list(tensors.items()):
        if is_tensor(tensor) and not _is_sparse(tensor):
            continue
        if isinstance(tensor, Compressed):
            tensors.update(_parts_of_integers(model, name, tensor))
            del tensors[name]
            continue
        module_name, _, leaf = name.rpartition(".")
        try:
            module = model.get_submodule(module_name)
        except AttributeError:
            continue  # load_state_dict reports it
        old = module._parameters.get(leaf)
        if _is_layer(module) or old is None:
            continue
        if old.shape != tensor.shape:
            raise RuntimeError(
                f"tensor `{name}`: the file's shape is {list(tensor.shape)}, the module's {list(old.shape)}"
            )
        device = tensor.device if old.device.type == "meta" else old.device
        setattr(module, leaf, nn.Parameter(tensor.to(device=device, dtype=old.dtype), requires_grad=False))
        replaced.add(name)
        del tensors[name]
    result = model.load_state_dict(tensors, strict=False)
    result.missing_keys[:] = [key for key in result.missing_keys if key not in replaced]
    if strict and (result.missing_keys or result.unexpected_keys):
        raise RuntimeError(
            f"{os.fspath(path)} does not fit {type(model).__name__}: missing in the file: "
            f"{', '.join(result.missing_keys) or 'nothing'}; "
            f"not in the module: {', '.join(result.unexpected_keys) or 'nothing'}. Pass strict=False to ignore them"
        )
    return result


def _parts_of_integers(model: Any, name: str, weight: Compressed) -> dict[str, Any]:
    """The entries of a state dict for a weight of integers.

    Raises:
        TypeError: where no layer of such integers has that weight.
        RuntimeError: where it has another shape or group size.
    """
    module_name, _, leaf = name.rpartition(".")
    try:
        module = model.get_submodule(module_name)
    except AttributeError:
        module = None
    if leaf != "weight" or getattr(module, "stored_dtype", None) != weight.dtype or weight.scales is None:
        layer = {("int4", True): "an Int4Linear", ("int8", True): "a QuantizedLinear"}.get(
            (weight.dtype, weight.scales is not None)
        )
        if layer is None:
            raise TypeError(
                f"tensor `{name}`: no kernel multiplies {weight.dtype}; use load_file and twofour.decompress"
            )
        raise TypeError(
            f"tensor `{name}`: an {weight.dtype} weight goes into {layer}; make one with load_file and "
            f"{layer.split()[1]}.from_compressed, or a dense "
            "one with twofour.decompress"
        )
    found, expected = (
        (weight.shape, _group_size(weight)),
        ((module.out_features, module.in_features), _group_size(module)),
    )
    if found != expected:
        raise RuntimeError(f"tensor `{name}`: shape and group size are {found} in the file, {expected} in the module")
    return {f"{name}_values": weight.values, f"{name}_meta": weight.meta, f"{name}_scales": weight.scales}
