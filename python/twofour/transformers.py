"""2:4 weights in Hugging Face transformers: quantization method ``"twofour"``.

Importing this module registers the method; it must be imported before a model is loaded::

    import twofour.transformers
    from transformers import AutoModelForCausalLM

    config = twofour.transformers.TwoFourConfig(prune=True)
    model = AutoModelForCausalLM.from_pretrained("folder", quantization_config=config)
    model.save_pretrained("folder-24")  # half the bytes in linear layers
    model = AutoModelForCausalLM.from_pretrained("folder-24")

Each ``nn.Linear`` becomes a :class:`twofour.Linear`, weight by weight while the checkpoint is read. Saved files hold the weights in the
command line tool's format (docs/format.md): ``<name>.values``, ``<name>.meta`` and the manifest, which transformers writes into every shard of a
large model. Weights that the tool has compressed are loaded where ``config.json`` says ``"quantization_config": {"quant_method": "twofour"}``.
"""

from __future__ import annotations

import json

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ._arrays import dtype_name
from ._files import STORED
from ._linear import Linear

__all__ = ["TwoFourConfig", "TwoFourQuantizer"]


@register_quantization_config("twofour")
class TwoFourConfig(QuantizationConfigMixin):
    """Which layers become 2:4, and how.

    Args:
        modules_to_not_convert: names, suffixes or regular expressions of modules that stay dense. By default those that share a weight with
            another, and the output layer (``lm_head``); an empty list converts every linear layer.
        prune: keeps the two largest magnitudes of each group of four weights of a dense checkpoint. By default the checkpoint must be 2:4
            already, and a weight that is not is an error.
    """

    def __init__(self, modules_to_not_convert: list[str] | None = None, prune: bool = False, **kwargs):
        self.quant_method = "twofour"
        self.modules_to_not_convert = modules_to_not_convert
        self.prune = prune
        self.post_init()

    def post_init(self):
        """Checks the fields.

        Raises:
            TypeError: for a field of another type.
        """
        names = self.modules_to_not_convert
        if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
            raise TypeError(f"modules_to_not_convert must be a list of names, not {names!r}")
        if not isinstance(self.prune, bool):
            raise TypeError(f"prune must be True or False, not {self.prune!r}")


@register_quantizer("twofour")
class TwoFourQuantizer(HfQuantizer):
    """Compresses linear layers while a checkpoint is read, and saves and reads them compressed."""

    requires_calibration = False
    quantization_config: TwoFourConfig

    def __init__(self, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self._convertible: set[str] = set()
        self._compressed: dict[str, Linear] = {}
        self._failures: list[str] = []

    def validate_environment(self, *args, device_map=None, **kwargs):
        """Refuses offloading.

        Raises:
            ValueError: where the device map puts modules on a disk.
        """
        if isinstance(device_map, dict) and "disk" in device_map.values():
            raise ValueError("2:4 weights cannot be offloaded to a disk; leave the disk out of device_map")

    def _process_model_before_weight_loading(self, model, **kwargs):
        skipped = self.get_modules_to_not_convert(model, self.quantization_config.modules_to_not_convert)
        self._convertible = {
            name for name, module in model.named_modules() if type(module) is nn.Linear and should_convert_module(name, skipped)
        }
        if self.pre_quantized:
            for name in self._convertible:
                dense = model.get_submodule(name)
                layer = Linear(dense.in_features, dense.out_features, False, device="meta", dtype=dense.weight.dtype)
                layer.bias = dense.bias
                model.set_submodule(name, layer)

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        """Whether a parameter of a dense checkpoint is a weight to compress."""
        module, _, leaf = param_name.rpartition(".")
        return leaf == "weight" and module in self._convertible and not self.pre_quantized

    def get_quantize_ops(self):
        """What transformers applies to each weight that it has read."""
        return _Compress(self)

    def get_weight_conversions(self):
        """Files have the names of the command line tool's format, modules those of their buffers."""
        if not self.pre_quantized:
            return []
        return [WeightRenaming("weight.values", "weight_values"), WeightRenaming("weight.meta", "weight_meta")]

    def compress(self, model, name: str, weight: torch.Tensor) -> None:
        """Compresses the weight of a module, which takes its place when all are loaded."""
        module, _, _ = name.rpartition(".")
        dense = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
        dense.weight = nn.Parameter(weight, requires_grad=False)
        try:
            self._compressed[module] = Linear.from_dense(dense, self.quantization_config.prune, name=name)
        except (ValueError, NotImplementedError) as error:
            # transformers collects what operations raise into a report without its type.
            self._failures.append(str(error))

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self._failures:
            shown = "; ".join(self._failures[:4])
            more = f"; and {len(self._failures) - 4} more" if len(self._failures) > 4 else ""
            raise ValueError(f"{shown}{more}. Pass TwoFourConfig(prune=True) to prune them, or name them in modules_to_not_convert")
        for name in self._convertible:
            module = model.get_submodule(name)
            if isinstance(module, Linear):
                try:
                    module.pack()
                except RuntimeError as error:
                    raise ValueError(f"tensor `{name}.weight`: {error}") from None
            elif name in self._compressed:
                layer = self._compressed.pop(name)
                layer.bias = module.bias
                model.set_submodule(name, layer.train(module.training))
        return model

    def get_state_dict_and_metadata(self, model):
        """The state dict under the names of the command line tool's format, and the manifest for the file's header."""
        state = model.state_dict()
        weights = {}
        for name, module in model.named_modules():
            if isinstance(module, Linear):
                values = state.pop(f"{name}.weight_values")
                state[f"{name}.weight.values"] = values
                state[f"{name}.weight.meta"] = state.pop(f"{name}.weight_meta").view(torch.uint32)
                shape = [module.out_features, module.in_features]
                weights[f"{name}.weight"] = {"shape": shape, "dtype": STORED[dtype_name(values.dtype)], "pattern": "2:4"}
        own = {"weight.values", "weight.meta"}
        conversions = getattr(model, "_weight_conversions", None) or []
        if any(not own.issuperset(conversion.source_patterns) for conversion in conversions):
            # transformers renames what it saves, so these names would not be the file's.
            return state, {}
        return state, {"twofour": json.dumps({"version": 1, "weights": weights})}

    def _dequantize(self, model, dtype=None):
        for name, module in list(model.named_modules()):
            if isinstance(module, Linear):
                model.set_submodule(name, module.to_dense().to(dtype))
        return model

    def is_serializable(self):
        """Whether ``save_pretrained`` works: yes."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters can be trained: yes, gradients pass through the frozen weights."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether ``torch.compile`` takes the model: yes."""
        return True


class _Compress(ConversionOps):
    """Hands a weight that was read to the quantizer."""

    def __init__(self, quantizer: TwoFourQuantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, *, full_layer_name=None, model=None, missing_keys=None, **kwargs):
        for value in input_dict.values():
            self.quantizer.compress(model, full_layer_name, value[0] if isinstance(value, list) else value)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}
