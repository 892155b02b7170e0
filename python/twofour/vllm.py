"""2:4 weights in vLLM: quantization method ``"twofour"``, through vLLM's entry point group ``vllm.general_plugins``.

vLLM calls :func:`register` in each of its processes; nothing needs to be imported. Three kinds of checkpoints are served:

=====================  ============================================================  ========================================================
what is stored         config.json                                                   how
=====================  ============================================================  ========================================================
canonical 2:4          ``"quantization_config": {"quant_method": "twofour"}``        ``<name>.weight.values`` and ``.meta`` are read as they are
dense, 2:4             no ``quantization_config``; ``vllm serve --quantization       each weight is verified and compressed when it is loaded
                       twofour``
sparse-24-bitmask      compressed-tensors with ``sparsity_config.format:             ``<name>.compressed`` and ``.bitmask`` are read; vLLM itself
                       "sparse-24-bitmask"`` and no quantization besides             has refused such checkpoints since 2026
=====================  ============================================================  ========================================================

The signatures are those of vLLM 0.33. They were tested with stand-ins for vLLM's classes: the engine itself was not run.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from . import _ops
from ._compression import compress_bitmask, parts_shapes
from ._linear import DTYPES
from ._packed import Packed, pack_by_rule, pack_sparse

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
        prune: for ``"dense"``: keeps the two largest magnitudes of each group of four; by default the weights must be 2:4.
    """

    def __init__(self, storage: str = "dense", ignored: list[str] | None = None, prune: bool = False):
        super().__init__()
        self.storage = storage
        self.ignored = list(ignored or [])
        self.prune = prune

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
            raise ValueError(f"quant_method {method!r} is neither {_NAME!r} nor compressed-tensors with sparsity_config.format {_BITMASK!r}")
        if config.get("config_groups"):
            raise ValueError(
                f"the checkpoint is {_BITMASK} and quantized besides (format {config.get('format')!r}); only weights of float32, bfloat16 and "
                "float16 are served: make a dense checkpoint of it"
            )
        sparsity = config["sparsity_config"]
        return cls(_BITMASK, [*(config.get("ignore") or []), *(sparsity.get("ignore") or [])])

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None) -> str | None:
        """Claims checkpoints of compressed-tensors in ``sparse-24-bitmask``, unless the user has asked for another method."""
        if hf_quant_cfg and _has_bitmask(hf_quant_cfg) and user_quant in (None, _NAME, "compressed-tensors"):
            return _NAME
        return None

    def get_quant_method(self, layer: nn.Module, prefix: str):
        """The method of a linear layer; ``None`` for other layers.

        Raises:
            ValueError: where only some of the weights that vLLM fuses into the layer are ignored.
        """
        if not isinstance(layer, LinearBase):
            return None
        return UnquantizedLinearMethod() if self._is_ignored(prefix) else TwoFourLinearMethod(self, prefix)

    def _is_ignored(self, prefix: str) -> bool:
        parent, _, leaf = prefix.rpartition(".")
        parts = self.packed_modules_mapping.get(leaf)
        names = [f"{parent}.{part}" if parent else part for part in parts] if parts else [prefix]
        ignored = [name for name in names if any(_matches(name, pattern) for pattern in self.ignored)]
        if ignored and len(ignored) < len(names):
            raise ValueError(f"{prefix} joins {', '.join(names)}, of which only {', '.join(ignored)} are dense; ignore all of them or none")
        return bool(ignored)


def _has_bitmask(config: dict[str, Any]) -> bool:
    sparsity = config.get("sparsity_config")
    return config.get("quant_method") == "compressed-tensors" and isinstance(sparsity, dict) and sparsity.get("format") == _BITMASK


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern names a layer, or a module around it, as transformers has it: from the start to a dot, or as a suffix."""
    expression = pattern.removeprefix("re:")
    return bool(re.match(rf"(?:{expression})(?:(?<=\.)|(?=\.|$))", name)) or name.endswith(pattern)


class TwoFourLinearMethod(LinearMethodBase):
    """Reads the weight of a linear layer, packs it, and multiplies with it.

    Args:
        quant_config: the configuration.
        prefix: the layer's name, for errors.
    """

    def __init__(self, quant_config: TwoFourConfig, prefix: str = ""):
        self.quant_config = quant_config
        self.prefix = prefix

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
        """Registers the parameters that the checkpoint is read into: this rank's rows and columns of the stored tensors.

        Raises:
            ValueError: where the input features of a rank do not begin at a whole word of metadata or byte of bitmask; for a dtype that
                kernels do not multiply.
        """
        storage = self.quant_config.storage
        if params_dtype not in DTYPES:
            raise ValueError(f"{self.prefix}: no kernel multiplies {params_dtype}; serve in bfloat16")
        step = {"dense": 4, "canonical": 32, _BITMASK: 8}[storage]
        if input_size_per_partition != input_size and input_size_per_partition % step:
            raise ValueError(
                f"{self.prefix}: {input_size_per_partition} input features a rank, which must be a multiple of {step} for {storage} weights; "
                "lower the tensor-parallel size"
            )
        rows, cols = sum(output_partition_sizes), input_size_per_partition
        layer.twofour_shape = (rows, cols)

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
            parts.register_parameter("values", parameter(values, params_dtype))
            parts.register_parameter("meta", parameter(meta, torch.uint32))
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
        for name in ("weight", "compressed", "bitmask", "shape"):
            if name in layer._parameters or name in layer._modules:
                delattr(layer, name)
        layer.weight_packed = nn.Parameter(packed, requires_grad=False)

    def _packed(self, layer: nn.Module, rows: int, cols: int) -> torch.Tensor:
        storage = self.quant_config.storage
        if storage == "dense":
            weight = layer.weight.data
            return (pack_by_rule(weight, "magnitude", transpose=False)[0] if self.quant_config.prune else pack_sparse(weight)).forward
        if storage == "canonical":
            return _ops.from_canonical(layer.weight.values.data, layer.weight.meta.data.view(torch.int32), cols)
        weight = compress_bitmask("", layer.compressed.data, layer.bitmask.data, (rows, cols))
        return _ops.from_canonical(weight.values, weight.meta, cols)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``x @ W.T + bias`` for ``x`` of shape ``[..., input features of this rank]``."""
        rows, cols = layer.twofour_shape
        return Packed(rows, cols, layer.weight_packed).times_transpose(x, bias)
