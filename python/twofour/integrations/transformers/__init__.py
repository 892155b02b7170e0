"""2:4 weights in Hugging Face transformers: quantization method ``"twofour"``.

Importing this module registers the method; it must be imported before a model is loaded or saved::

    import twofour.transformers
    from transformers import AutoModelForCausalLM

    config = twofour.transformers.TwoFourConfig(prune=True)
    model = AutoModelForCausalLM.from_pretrained("folder", quantization_config=config)
    model.save_pretrained("folder-24")  # half the bytes in linear layers
    model = AutoModelForCausalLM.from_pretrained("folder-24")

Each ``nn.Linear`` becomes a :class:`twofour.Linear`, weight by weight while the checkpoint is read. Folders are those
of the command line tool (docs/reference/format.md): what it compressed or quantized is loaded, integers as
:class:`twofour.quantization.QuantizedLinear` and :class:`twofour.Int4Linear`, and it reads what ``save_pretrained``
writes, of models whose layers :func:`twofour.quantization.quantize_` replaced as well. What is packed the files say
themselves; ``config.json`` names the method and the layers that are dense. The files are named
``twofour-model.safetensors``, so that without this package a folder fails to load, instead of having layers
initialized at random.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import json
import re
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers.core_model_loading import (
    ConversionOps,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...files import compressed_entry
from ...modules.conversion import is_training_layer, refusal_of, replace
from ...modules.int4 import Int4Linear
from ...modules.int8 import QuantizedLinear
from ...modules.linear import Linear
from ...modules.low_rank import LowRankLinear
from ...modules.packed_layer import deferred_weights
from ...modules.roles import reasons_to_stay_dense
from ..checkpoints import Entry, PackedWeight, described, manifest_of, restacked, stacks_of, with_weights
from . import wrapped

__all__ = ["TwoFourConfig", "TwoFourQuantizer"]

#: The layers whose weights are saved packed.
_LAYERS = (Linear, QuantizedLinear, Int4Linear)
#: The parts of a weight: the names of a layer's buffers, and those in files.
_PARTS = ("values", "meta", "scales")


@register_quantization_config("twofour")
class TwoFourConfig(QuantizationConfigMixin):
    """Which layers of a dense checkpoint become 2:4, and how. Of a packed checkpoint the files say what is packed.

    Args:
        modules_to_not_convert: names, suffixes or regular expressions of modules that stay dense; each must match a
            module of the model. By default all but the layers that :func:`twofour.linear_layers` names, which are those
            that the command prunes: heads, what lies outside the repeated layers, and routers of experts stay dense.
            Layers that share their weight with another module, as tied embeddings do, and those whose weight the model
            itself changes always stay dense.
        prune: keeps the two largest magnitudes of each group of four weights of a dense checkpoint. By default the
            checkpoint must be 2:4 already, and a weight that is not is an error.
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
            ValueError: for a regular expression that is none.
        """
        names = self.modules_to_not_convert
        if names is not None and not (
            isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)
        ):
            raise TypeError(f"modules_to_not_convert must be a list of names, not {names!r}")
        if not isinstance(self.prune, bool):
            raise TypeError(f"prune must be True or False, not {self.prune!r}")
        for name in names or []:
            try:
                re.compile(name)
            except re.error as error:
                raise ValueError(f"modules_to_not_convert: `{name}` is no regular expression: {error}") from None


@register_quantizer("twofour")
class TwoFourQuantizer(HfQuantizer):
    """Compresses linear layers while a checkpoint is read, and saves and reads them packed."""

    requires_calibration = False
    quantization_config: TwoFourConfig

    def __init__(self, quantization_config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        # Packed weights are handed over as dense ones are: each when it has been read.
        self.pre_quantized, self._says_packed = False, self.pre_quantized
        self._entries: dict[str, Entry] = {}
        self._stacks: dict[str, tuple[list[int], bool]] = {}
        self._convertible: set[str] = set()
        self._layers: dict[str, nn.Module] = {}
        self._failures: list[str] = []
        self._dense_failures = False

    def validate_environment(self, *args, device_map=None, **kwargs):
        """Refuses offloading.

        Raises:
            ValueError: where the device map puts modules on a disk, or on the CPU beside another device.
        """
        if not isinstance(device_map, dict):
            return
        kinds = {name: getattr(device, "type", str(device)) for name, device in device_map.items()}
        offloaded = [
            name for name, kind in kinds.items() if kind == "disk" or (kind == "cpu" and set(kinds.values()) != {"cpu"})
        ]
        if offloaded:
            named = ", ".join(f"`{name}`" if name else "the model" for name in offloaded[:4]) + (
                " …" if len(offloaded) > 4 else ""
            )
            raise ValueError(
                f"2:4 weights cannot be offloaded to the CPU or a disk, and device_map puts {named} there: give the "
                f"model "
                "more memory "
                'of the device (max_memory), or load it on the CPU alone, with device_map="cpu"'
            )

    def update_attn_implementation(self, config):
        """Called with the model's configuration before its files are searched, which may have the names of packed
        weights."""
        wrapped.hint(config)
        return super().update_attn_implementation(config)

    def _process_model_before_weight_loading(self, model, checkpoint_files=None, **kwargs):
        self._entries = manifest_of(checkpoint_files or [])
        self._stacks = stacks_of(checkpoint_files or [])
        if not self._entries and not self._says_packed:
            self._convertible = self._chosen(model)

    def _chosen(self, model) -> set[str]:
        """The linear layers of a dense checkpoint that are to be 2:4.

        Raises:
            ValueError: for a name that matches no module, and where there is no such layer.
        """
        listed = self.quantization_config.modules_to_not_convert
        for pattern in listed or []:
            _expect_known(model, pattern)
        left_out = _always_dense(model)
        if listed is None:
            left_out |= {name for name, reason in reasons_to_stay_dense(model).items() if reason is not None}
        chosen, left = set(), {}
        for name, module in model.named_modules():
            if not should_convert_module(name, listed):
                continue
            reason = _reason_against(module)
            if reason is not None:
                left.setdefault((type(module).__name__, reason), []).append(name)
            elif _is_linear(module) and name not in left_out:
                chosen.add(name)
        told = "; ".join(
            f"{len(names)} of {kind}, such as `{names[0]}`: {reason}" for (kind, reason), names in left.items()
        )
        if not chosen:
            raise ValueError(
                f"no layer of {type(model).__name__} can become 2:4{': ' + told if told else ''}. Load it without "
                "TwoFourConfig"
                f"{', or leave out fewer modules' if listed else ''}"
            )
        if told:
            warnings.warn(f"layers of {type(model).__name__} stay dense: {told}", stacklevel=2)
        return chosen

    def with_packed_weights(self, model, state, load_config):
        """The tensors of a checkpoint with each packed weight under its own name.

        Raises:
            ValueError: where the parts of a weight are not all there.
            NotImplementedError: for a model that is distributed while it is loaded.
        """
        mapping = copy.deepcopy(load_config.weight_mapping or [])
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        tensors = model.state_dict()
        layers = {
            name for name, module in model.named_modules(remove_duplicate=False) if _is_linear(module)
        } - _always_dense(model)

        def target(name: str) -> tuple[str, str | None]:
            found = rename_source_key(name, renamings, converters, model.base_model_prefix, tensors)
            if found[0] not in tensors and name in tensors:
                found = rename_source_key(name, [], [], model.base_model_prefix, tensors)
            return found

        def columns(name: str) -> int | None:
            tensor = tensors.get(target(name)[0])
            return None if tensor is None or tensor.dim() != 2 else tensor.shape[1]

        def stays_packed(name: str) -> bool:
            key, converter = target(name)
            module, _, leaf = key.rpartition(".")
            if converter is not None or leaf != "weight" or module not in layers or key not in tensors:
                return False
            self._convertible.add(module)
            return True

        result = restacked(with_weights(state, self._entries, columns, stays_packed), self._stacks)
        if self._convertible and getattr(load_config, "device_mesh", None) is not None:
            raise NotImplementedError(
                "2:4 weights cannot be split over devices while they are loaded: leave out tp_plan and "
                "distributed_config"
            )
        return result

    def param_needs_quantization(self, model, param_name: str, **kwargs) -> bool:
        """Whether a parameter becomes a packed weight."""
        module, _, leaf = param_name.rpartition(".")
        return leaf == "weight" and module in self._convertible

    def get_quantize_ops(self):
        """What transformers applies to each of these weights when it has been read."""
        return _Take(self)

    def take(self, model, name: str, weight: torch.Tensor | PackedWeight) -> None:
        """Makes the layer of a weight, which takes its place when all are loaded."""
        module_name, _, _ = name.rpartition(".")
        module = model.get_submodule(module_name)
        try:
            if tuple(weight.shape) != (module.out_features, module.in_features):
                raise ValueError(
                    f"tensor `{name}`: its shape is {list(weight.shape)} in the file, "
                    f"{[module.out_features, module.in_features]} in the model"
                )
            if isinstance(weight, PackedWeight):
                self._layers[module_name] = weight.layer()
                return
            dense = nn.Linear(weight.shape[1], weight.shape[0], False, device="meta")
            dense.weight = nn.Parameter(weight, requires_grad=False)
            self._layers[module_name] = Linear.from_dense(dense, self.quantization_config.prune, name=name)
        except (ValueError, NotImplementedError) as error:
            # transformers collects what operations raise into a report without its type.
            self._failures.append(str(error))
            self._dense_failures |= isinstance(weight, torch.Tensor)

    def _process_model_after_weight_loading(self, model, **kwargs):
        vars(model.config).pop("transformers_weights", None)
        if self._failures:
            shown = "; ".join(self._failures[:4])
            more = f"; and {len(self._failures) - 4} more" if len(self._failures) > 4 else ""
            advice = (
                ". Pass TwoFourConfig(prune=True) to prune them, or name them in modules_to_not_convert"
                if self._dense_failures
                else ""
            )
            raise ValueError(f"{shown}{more}{advice}")
        for name, layer in self._layers.items():
            old = model.get_submodule(name)
            if old.bias is not None:
                layer.bias = old.bias if isinstance(layer, Linear) else old.bias.detach()
            _replace(model, old, layer.train(old.training))
        self._layers.clear()
        return model

    def get_state_dict_and_metadata(self, model, original_format: bool = True):
        """The state dict under the names of the command line tool's format, and the manifest for the file's header.

        Args:
            model: the model.
            original_format: whether transformers gives tensors the names of the checkpoint that the model is from. A
                weight that it stores in another arrangement there, and one whose name it would not find again, is
                saved dense. Those of ``Conv1D`` always are.
        """
        with deferred_weights():
            state = dict(model.state_dict())
        packed = {name: entry for name, entry in state.items() if _is_packed(entry)}
        stored_as = _saved_names(model, list(packed)) if original_format else {name: name for name in packed}
        tied = getattr(model, "all_tied_weights_keys", {})
        in_out = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
        weights, seen = {}, set()
        for name, entry in packed.items():
            del state[name]
            if id(entry) in seen and name in tied:
                # A module under another name, which is found by the first.
                state.pop(f"{name.removesuffix('weight')}bias", None)
                continue
            seen.add(id(entry))
            stored = stored_as[name]
            if stored is None or name in in_out:
                state[name] = _dense_weight(entry, model.dtype)
                continue
            weight = compressed_entry(name, entry, None)
            parts = zip(_PARTS, (weight.values, weight.meta.view(torch.uint32), weight.scales), strict=True)
            state.update({f"{name}.{part}": tensor for part, tensor in parts if tensor is not None})
            weights[stored] = described(weight)
        # Of a model with adapters only these are saved.
        if not weights or getattr(model, "_hf_peft_config_loaded", False):
            return state, {}
        return state, {"twofour": json.dumps({"version": 1, "weights": weights})}

    def _dequantize(self, model, dtype=None):
        for _, module in list(model.named_modules()):
            if isinstance(module, _LAYERS):
                _replace(model, module, _dense_of(module, dtype))
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


class _Take(ConversionOps):
    """Hands a weight that was read to the quantizer."""

    def __init__(self, quantizer: TwoFourQuantizer):
        self.quantizer = quantizer

    def convert(self, input_dict, *, full_layer_name=None, model=None, missing_keys=None, **kwargs):
        for value in input_dict.values():
            self.quantizer.take(model, full_layer_name, value[0] if isinstance(value, list) else value)
        if missing_keys is not None:
            missing_keys.discard(full_layer_name)
        return {}


def _is_linear(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` does."""
    if isinstance(module, (*_LAYERS, nn.modules.linear.NonDynamicallyQuantizableLinear)):
        # nn.MultiheadAttention reads the weight of the last.
        return False
    return isinstance(module, nn.Linear) and (refusal_of(module) is None or type(module).__name__ == "FalconLinear")


def _reason_against(module: nn.Module) -> str | None:
    """Why a module with matrices that are multiplied stays dense; ``None`` for other modules."""
    if isinstance(module, Conv1D):
        return "its weight is stored [in_features, out_features], along which the format has no groups of four"
    if isinstance(module, nn.Linear) and not isinstance(module, _LAYERS) and not _is_linear(module):
        return "it is a subclass of nn.Linear that is used in another way"
    if isinstance(module, nn.MultiheadAttention):
        return "it multiplies with its weights itself"
    if "expert" in type(module).__name__.lower() and any(p.dim() == 3 for p in module.parameters(recurse=False)):
        return "the weights of all experts are one tensor of three dimensions"
    return None


def _shared(model: nn.Module) -> set[str]:
    """The names of modules whose weight another module has as well."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    modules = dict(model.named_modules(remove_duplicate=False))
    shared = {
        name
        for name, module in modules.items()
        if any(len(owners[id(p)]) > 1 for p in module.parameters(recurse=False))
    }
    for pair in getattr(model, "all_tied_weights_keys", {}).items():
        one, other = (key.rpartition(".")[0] for key in pair)
        if modules.get(one) is not modules.get(other):
            shared |= {one, other}
    return shared


def _always_dense(model: nn.Module) -> set[str]:
    """The names of layers whose weight another module has, or the model changes in place: RWKV divides those that end
    a block."""
    blocks = [name for name, module in model.named_modules() if type(module).__name__ == "RwkvBlock"]
    return _shared(model) | {
        f"{block}.{layer}" for block in blocks for layer in ("attention.output", "feed_forward.value")
    }


def _expect_known(model: nn.Module, pattern: str) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    if all(should_convert_module(name, [pattern]) for name in names):
        last = sorted({name.rpartition(".")[2] for name in names})
        close = dict.fromkeys(
            difflib.get_close_matches(pattern, last, 3) + difflib.get_close_matches(pattern, names, 3)
        )
        hint = (
            f"; close are {', '.join(f'`{name}`' for name in close)}"
            if close
            else f"; there are {', '.join(f'`{name}`' for name in last[:8])} …"
        )
        raise ValueError(f"modules_to_not_convert: `{pattern}` matches no module of {type(model).__name__}{hint}")


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Puts a module in the place of another, under all its names, with the hook by which accelerate moves inputs."""
    hook = getattr(old, "_hf_hook", None)
    if hook is not None:
        from accelerate.hooks import add_hook_to_module, remove_hook_from_module

        remove_hook_from_module(old)
        add_hook_to_module(new, hook)
    replace(model, [(old, new)])


def _is_packed(entry) -> bool:
    """Whether an entry of a state dict, or a parameter, is a packed weight: a layer that stands for its weight, or a
    sparse tensor."""
    return isinstance(entry, _LAYERS) or (isinstance(entry, torch.Tensor) and hasattr(entry, "packed_weight"))


def _dense_weight(entry, dtype: torch.dtype | None) -> torch.Tensor:
    dense = entry.to_dense()
    return (dense.weight if isinstance(dense, nn.Linear) else dense).detach().to(dtype)


def _dense_of(module: nn.Module, dtype: torch.dtype | None) -> nn.Linear:
    if isinstance(module, Linear):
        return module.to_dense().to(dtype)
    dense = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
    dense.weight = nn.Parameter(_dense_weight(module, dtype))
    if module.bias is not None:
        dense.bias = nn.Parameter(module.bias.detach().to(dtype, copy=True))
    return dense.train(module.training)


def _saved_names(model, weights: list[str]) -> dict[str, str | None]:
    """The names that transformers gives to weights when it saves them; ``None`` for a weight that is not only renamed
    then, and for one that would not be found under its new name.
    """
    marks = {f"{name}.{part}": torch.empty(0) for name in weights for part in _PARTS}
    try:
        renamed = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(marks)).items()}
    except Exception:
        # An operation of a conversion, which these are no tensors for: one by one.
        renamed = {}
        for name, mark in marks.items():
            with contextlib.suppress(Exception):
                renamed.update(
                    {id(tensor): new for new, tensor in revert_weight_conversion(model, {name: mark}).items()}
                )
    target = _target_of(model, weights)
    names: dict[str, str | None] = {}
    for weight in weights:
        parts = [renamed.get(id(marks[f"{weight}.{part}"])) for part in _PARTS]
        bases = {name and name.removesuffix(f".{part}") for name, part in zip(parts, _PARTS, strict=True)}
        base = bases.pop() if len(bases) == 1 else None
        names[weight] = base if base is not None and base not in parts and target(base) == weight else None
    return names


def _target_of(model, weights: list[str]) -> Callable[[str], str]:
    """The name in the model of a tensor that is saved in its original format."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping = getattr(model, "_weight_conversions", None)
    mapping = copy.deepcopy(get_model_conversion_mapping(model) if mapping is None else mapping)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    tensors = dict.fromkeys(weights, True)

    def target(name: str) -> str:
        key, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, tensors)
        return key if converter is None else ""

    return target


def _saver_of(model, original_format: bool) -> contextlib.AbstractContextManager | None:
    """What a model with packed layers is saved in; ``None`` for one without.

    Raises:
        ValueError: for a model that another method has quantized besides; for one with layers of a lower rank, unless
            its adapters alone are saved.
    """
    _warn_of_masters(model)
    factored = next((name for name, module in model.named_modules() if isinstance(module, LowRankLinear)), None)
    if factored is not None and not getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"`{factored}` is a LowRankLinear, and from_pretrained would initialize a dense layer in its place at "
            "random: save the state dict by torch.save, which twofour.load_low_rank_ loads, or make the model dense by "
            "twofour.to_dense first"
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if not any(_is_packed(entry) for entry in (*model.modules(), *model.parameters())):
        if isinstance(quantizer, TwoFourQuantizer):
            quantizer.remove_quantization_config(model)
        return None
    if quantizer is not None and not isinstance(quantizer, TwoFourQuantizer):
        method = quantizer.quantization_config.quant_method
        raise ValueError(
            f"the model has 2:4 layers of twofour and layers of the quantization method "
            f"{getattr(method, 'value', method)}: "
            "it cannot be saved"
        )
    return _packed_state(model, original_format)


def _warn_of_masters(model) -> None:
    """Says that what is saved of layers which prune in training is their dense weights, from which training goes on."""
    layers = [name for name, module in model.named_modules() if is_training_layer(module)]
    if layers:
        kind = type(model.get_submodule(layers[0])).__name__
        warnings.warn(
            f"{len(layers)} layers, such as the {kind} `{layers[0]}`, prune in training, and what is saved are their "
            "dense master weights: to go on with training, load them and swap the layers again. To save the network "
            "that was trained, convert the layers before, by twofour.sparsity.sparsify_(model, semi_sparse_weight()) "
            "or swap_semi_sparse_linear_with_linear(model)",
            stacklevel=4,
        )


class _Saver(TwoFourQuantizer):
    """The quantizer of a model that is being saved."""

    def __init__(self, quantization_config: TwoFourConfig, original_format: bool):
        super().__init__(quantization_config)
        self.original_format = original_format

    def get_state_dict_and_metadata(self, model):
        return super().get_state_dict_and_metadata(model, self.original_format)


@contextlib.contextmanager
def _packed_state(model, original_format: bool) -> Iterator[None]:
    """Inside, the model says that it is packed, and which of its layers are dense."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    dense = [name for name, module in linear if not (_is_packed(module) or _is_packed(module.weight))]
    config = TwoFourConfig(modules_to_not_convert=sorted(dense))
    kept = [(vars(model), "hf_quantizer"), (vars(model.config), "quantization_config")]
    before = [(owner, name, owner[name]) if name in owner else (owner, name) for owner, name in kept]
    model.hf_quantizer, model.config.quantization_config = _Saver(config, original_format), config
    try:
        yield
    finally:
        for owner, name, *value in before:
            if value:
                owner[name] = value[0]
            else:
                owner.pop(name, None)


wrapped.wrap(TwoFourQuantizer, _saver_of)
