"""2:4 weights in vLLM: quantization method ``"twofour"``, through vLLM's entry point group ``vllm.general_plugins``.

vLLM calls :func:`register` in each of its processes; nothing needs to be imported. Three kinds of checkpoints are
served:

- packed: ``config.json`` has ``"quantization_config": {"quant_method": "twofour"}``. ``<name>.weight.values``, ``.meta``
  and ``.scales`` are read as they are; the files say which weights are of floats, int8 or int4.
- dense, 2:4: without a ``quantization_config``, and with ``vllm serve --quantization twofour``. Each weight is verified
  and compressed when it is loaded.
- sparse-24-bitmask: compressed-tensors with ``sparsity_config.format: "sparse-24-bitmask"`` and no quantization besides.
  ``<name>.compressed`` and ``.bitmask`` are read; vLLM itself has refused such checkpoints since 2026.

The signatures are those of vLLM 0.33. They were tested with stand-ins for vLLM's classes: the engine itself was not
run.
"""

from __future__ import annotations

import glob
import os
import re
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from .. import operators
from ..arrays.compression import Compressed, compress_bitmask
from ..canonical import parts_shapes
from ..modules.int4 import GROUP, PER_CHANNEL
from ..modules.linear import DTYPES
from ..operators.packed import Packed, pack_by_rule, pack_sparse
from .checkpoints import Entry, PackedWeight, manifest_of
from .folders import PREFIX

__all__ = ["TwoFourConfig", "TwoFourLinearMethod", "register"]

_NAME = "twofour"
_BITMASK = "sparse-24-bitmask"
_registered = False


def register() -> None:
    """Registers the method with vLLM. A second call does nothing."""
    global _registered
    if not _registered:
        register_quantization_config(_NAME)(TwoFourConfig)
        _registered = True


class TwoFourConfig(QuantizationConfig):
    """Which layers are 2:4, and how their weights are stored.

    Args:
        storage: ``"dense"``, ``"canonical"`` or ``"sparse-24-bitmask"``.
        ignored: names, suffixes or regular expressions (which may begin with ``re:``) of layers that are dense.
        prune: for ``"dense"``: keeps the two largest magnitudes of each group of four; by default the weights must be
            2:4.

    Attributes:
        entries: for ``"canonical"``, what the files say of each packed weight, where they are on this machine when the
            configuration is made. Without them weights are taken to be floats.
    """

    def __init__(self, storage: str = "dense", ignored: list[str] | None = None, prune: bool = False):
        super().__init__()
        self.storage = storage
        self.ignored = list(ignored or [])
        self.prune = prune
        self.entries: dict[str, Entry] = {}

    def __repr__(self) -> str:
        return f"TwoFourConfig(storage={self.storage!r}, ignored={self.ignored!r}, prune={self.prune})"

    def get_name(self) -> str:
        """The method's name."""
        return _NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """The dtypes that kernels multiply."""
        return list(DTYPES)

    @classmethod
    def get_min_capability(cls) -> int:
        """Sparse tensor cores begin with compute capability 8.0."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No files besides config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TwoFourConfig:
        """The configuration of a checkpoint's ``quantization_config``.

        Raises:
            ValueError: for a bitmask checkpoint that is quantized besides, and for one that is neither kind.
        """
        method = config.get("quant_method")
        if method == _NAME:
            return cls("canonical", config.get("modules_to_not_convert") or [], bool(config.get("prune", False)))
        if not _has_bitmask(config):
            raise ValueError(
                f"quant_method {method!r} is neither {_NAME!r} nor compressed-tensors with sparsity_config.format "
                f"{_BITMASK!r}"
            )
        if config.get("config_groups"):
            raise ValueError(
                f"the checkpoint is {_BITMASK} and quantized besides (format {config.get('format')!r}); only weights "
                f"of float32, bfloat16 and "
                "float16 are served: make a dense checkpoint of it"
            )
        sparsity = config["sparsity_config"]
        return cls(_BITMASK, [*(config.get("ignore") or []), *(sparsity.get("ignore") or [])])

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claims checkpoints of compressed-tensors in ``sparse-24-bitmask``, unless the user has asked for another
        method."""
        if hf_quant_cfg and _has_bitmask(hf_quant_cfg) and user_quant in (None, _NAME, "compressed-tensors"):
            return _NAME
        return None

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        """Reads from the files which weights are packed, and how.

        Raises:
            ValueError: for a damaged manifest.
        """
        if self.storage == "canonical":
            self.entries = manifest_of(_files_of(model_name, revision))

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Gives layers the names that they have in vLLM."""
        self.ignored = hf_to_vllm_mapper.apply_list(self.ignored)
        self.entries = hf_to_vllm_mapper.apply_dict(self.entries)

    def get_quant_method(self, layer: nn.Module, prefix: str):
        """The method of a linear layer; ``None`` for other layers.

        Raises:
            ValueError: where only some of the weights that vLLM fuses into the layer are dense, or where they are
                packed in different ways.
        """
        if not isinstance(layer, LinearBase):
            return None
        names = self._parts_of(prefix)
        if self._is_ignored(prefix, names):
            return UnquantizedLinearMethod()
        return TwoFourLinearMethod(self, prefix, self._kind_of(prefix, names))

    def _parts_of(self, prefix: str) -> list[str]:
        """The names of the weights that vLLM fuses into a layer."""
        parent, _, leaf = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(leaf)
        return [f"{parent}.{part}" if parent else part for part in parts] if parts else [prefix]

    def _kind_of(self, prefix: str, names: list[str]) -> Entry | None:
        """What the files say of a layer's weights, or of all weights where they are alike; ``None`` where nothing is
        known."""
        kinds = {_kind(self.entries[f"{name}.weight"]) for name in names if f"{name}.weight" in self.entries}
        if not kinds:
            kinds = set(map(_kind, self.entries.values()))
        if len(kinds) > 1:
            raise ValueError(
                f"{prefix} joins {', '.join(names)}, whose weights are packed in different ways: "
                f"{', '.join(map(str, kinds))}"
            )
        return kinds.pop() if kinds else None

    def _is_ignored(self, prefix: str, names: list[str]) -> bool:
        # What the files say counts for more than a list.
        packed = {name for name in names if f"{name}.weight" in self.entries}
        known = bool(packed)
        ignored = [
            name
            for name in names
            if (name not in packed if known else any(_matches(name, pattern) for pattern in self.ignored))
        ]
        if ignored and len(ignored) < len(names):
            raise ValueError(
                f"{prefix} joins {', '.join(names)}, of which only {', '.join(ignored)} are dense; ignore all of them "
                f"or none"
            )
        return bool(ignored)


def _kind(entry: Entry) -> Entry:
    """How a weight is packed, whatever its shape; floats have the type of the layer."""
    dtype = entry.dtype if entry.dtype in ("int8", "int4") else "float"
    return Entry((0, 0), dtype, entry.group_size)


def _files_of(model_name: str, revision: str | None) -> list[str]:
    """The files of a model's packed weights: those of a folder, or of a snapshot of a repository that was loaded
    before."""
    folder = model_name
    if not os.path.isdir(folder):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

        try:
            folder = snapshot_download(
                model_name, revision=revision, allow_patterns="*.safetensors", local_files_only=True
            )
        except (LocalEntryNotFoundError, HFValidationError):
            return []
    files = sorted(glob.glob(os.path.join(glob.escape(folder), "*.safetensors")))
    return [file for file in files if os.path.basename(file).startswith(PREFIX)] or files


def _has_bitmask(config: dict[str, Any]) -> bool:
    sparsity = config.get("sparsity_config")
    return (
        config.get("quant_method") == "compressed-tensors"
        and isinstance(sparsity, dict)
        and sparsity.get("format") == _BITMASK
    )


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a layer, or a module around it, as transformers has it: from the start to a dot, or as a
    suffix."""
    expression = pattern.removeprefix("re:")
    return bool(re.match(rf"(?:{expression})(?:(?<=\.)|(?=\.|$))", name)) or name.endswith(pattern)


class TwoFourLinearMethod(LinearMethodBase):
    """Reads the weight of a linear layer, packs it, and multiplies with it.

    Args:
        quant_config: the configuration.
        prefix: the layer's name, for errors.
        kind: how the files have the weight packed, where they say so.
    """

    def __init__(self, quant_config: TwoFourConfig, prefix: str = "", kind: Entry | None = None):
        self.quant_config = quant_config
        self.prefix = prefix
        self.kind = kind or Entry((0, 0), "float")

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs,
    ) -> None:
        """Registers the parameters that the checkpoint is read into: this rank's rows and columns of the stored
        tensors.

        Raises:
            ValueError: where the input features of a rank do not begin at a whole word of metadata or byte of bitmask;
                for a dtype that kernels do not multiply.
        """
        storage = self.quant_config.storage
        if params_dtype not in DTYPES:
            raise ValueError(f"{self.prefix}: no kernel multiplies {params_dtype}; serve in bfloat16")
        # Scales are for whole groups of columns.
        step = max({"dense": 4, "canonical": 32, _BITMASK: 8}[storage], self.kind.group_size or 0)
        if input_size_per_partition != input_size and input_size_per_partition % step:
            raise ValueError(
                f"{self.prefix}: {input_size_per_partition} input features a rank, which must be a multiple of {step} "
                f"for {storage} weights; "
                "lower the tensor-parallel size"
            )
        rows, cols = sum(output_partition_sizes), input_size_per_partition
        layer.twofour_shape, layer.twofour_dtype = (rows, cols), params_dtype

        def parameter(shape, dtype):
            tensor = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
            for name, value in {"input_dim": 1, "output_dim": 0, **extra_weight_attrs}.items():
                setattr(tensor, name, value)
            return tensor

        values, meta = parts_shapes(rows, cols)
        if storage == "dense":
            layer.register_parameter("weight", parameter((rows, cols), params_dtype))
        elif storage == "canonical":
            # A module, so that the parameters' names are those in the file: weight.values and weight.meta.
            parts = nn.Module()
            dtype, group_size = self.kind.dtype, self.kind.group_size
            stored = {"int8": (values, torch.int8), "int4": ((rows, values[1] // 2), torch.uint8)}.get(
                dtype, (values, params_dtype)
            )
            parts.register_parameter("values", parameter(*stored))
            parts.register_parameter("meta", parameter(meta, torch.uint32))
            if dtype != "float":
                # A scale for each row has no columns to be split.
                shape, kind = ((rows, 1), torch.float16) if dtype == "int4" else ((rows,), torch.float32)
                if group_size is not None:
                    shape, kind = (rows, -(-cols // group_size)), torch.float16
                scales = parameter(shape, kind)
                if group_size is None:
                    del scales.input_dim
                parts.register_parameter("scales", scales)
            layer.add_module("weight", parts)
        else:
            layer.register_parameter("compressed", parameter((rows, cols // 2), params_dtype))
            layer.register_parameter("bitmask", parameter((rows, -(-cols // 8)), torch.uint8))
            # The shape of each of the weights that are joined; the layer has it already.
            shape = nn.Parameter(torch.empty((2, 1), dtype=torch.int64), requires_grad=False)
            shape.weight_loader = lambda parameter, loaded, *args, **kwargs: None
            layer.register_parameter("shape", shape)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Verifies and packs the weight, and drops what was read. A second call does nothing.

        Raises:
            ValueError: where the weight is not 2:4 or damaged, with the layer's name, row and group.
        """
        if hasattr(layer, "weight_packed"):
            return
        rows, cols = layer.twofour_shape
        try:
            packed = self._packed(layer, rows, cols)
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{self.prefix}.weight: {error}") from None
        if self._is_int8():
            layer.weight_scales = nn.Parameter(layer.weight.scales.data, requires_grad=False)
        for name in ("weight", "compressed", "bitmask", "shape"):
            if name in layer._parameters or name in layer._modules:
                delattr(layer, name)
        layer.weight_packed = nn.Parameter(packed, requires_grad=False)

    def _is_int8(self) -> bool:
        """Whether kernels multiply the weight's 8-bit integers. Those with scales for groups are dequantized."""
        return self.kind.dtype == "int8" and self.kind.group_size is None

    def _group_size(self) -> int | None:
        """The group size where kernels multiply the weight's 4-bit integers; -1 is a whole row."""
        size = PER_CHANNEL if self.kind.group_size is None else self.kind.group_size
        return size if self.kind.dtype == "int4" and size in (GROUP, PER_CHANNEL) else None

    def _packed(self, layer: nn.Module, rows: int, cols: int) -> torch.Tensor:
        storage = self.quant_config.storage
        if storage == "dense":
            weight = layer.weight.data
            return (
                pack_by_rule(weight, "magnitude", transpose=False)[0]
                if self.quant_config.prune
                else pack_sparse(weight)
            ).forward
        if storage == "canonical":
            values, meta = layer.weight.values.data, layer.weight.meta.data.view(torch.int32)
            if self.kind.dtype == "float" or self._is_int8():
                return operators.from_canonical(values, meta, cols)
            scales, group_size = layer.weight.scales.data, self._group_size()
            if group_size is not None:
                return operators.pack_int4(values, meta, scales, cols, group_size)
            group_size = self.kind.group_size
            dense = PackedWeight(
                self.prefix, Compressed(values, meta, (rows, cols), self.kind.dtype, scales, group_size)
            ).dense()
            return pack_sparse(dense.to(layer.twofour_dtype)).forward
        weight = compress_bitmask("", layer.compressed.data, layer.bitmask.data, (rows, cols))
        return operators.from_canonical(weight.values, weight.meta, cols)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ W.T + bias`` for ``x`` of shape ``[..., input features of this rank]``."""
        rows, cols = layer.twofour_shape
        packed = layer.weight_packed
        if self._is_int8():
            if bias is None:
                return operators.linear_quantized(x, packed, layer.weight_scales, rows)
            return operators.linear_quantized_bias(x, packed, layer.weight_scales, bias, rows, 0)
        group_size = self._group_size()
        if group_size is not None:
            if bias is None:
                return operators.linear_int4(x, packed, rows, group_size)
            return operators.linear_int4_bias(x, packed, bias, rows, group_size, 0)
        return Packed(rows, cols, packed).times_transpose(x, bias)
