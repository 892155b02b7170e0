"""What transformers has no hook for: the three functions of its that :mod:`twofour.transformers` wraps.

====================================  =================================================================================
``_get_resolved_checkpoint_files``    finds the files of packed weights, which have names of their own
``convert_and_load_state_dict_...``   is given each packed weight under its own name, in the place of its parts
``PreTrainedModel.save_pretrained``   writes packed weights under these names, whatever replaced the layers
====================================  =================================================================================
"""

from __future__ import annotations

import functools
import inspect
import os
import tempfile
from collections.abc import Callable
from typing import Any

import transformers
from transformers import modeling_utils
from transformers.utils import cached_file

from ..checkpoints import has_packed
from ..folders import PREFIX, README, is_of_weights, names_of, packed_in, publish

_ORDINARY = "model.safetensors"


def hint(config) -> None:
    """Tells the search for files, in the configuration of a model that is loaded, that they may have the names of
    packed weights."""
    config.transformers_weights = PREFIX + (getattr(config, "transformers_weights", None) or _ORDINARY)


def _found(
    path: str | os.PathLike | None, explicit: str | None, variant: str | None, download: dict[str, Any]
) -> str | None:
    """The name of the file, or index, to load: one of packed weights where there is one; ``None`` for what
    transformers itself finds."""
    hinted = explicit is not None and explicit.startswith(PREFIX)
    ordinary = explicit.removeprefix(PREFIX) if explicit else _ORDINARY
    plain, own = names_of(ordinary, variant)
    if path is not None and os.path.isdir(path):
        folder = os.path.join(path, download.get("subfolder") or "")
        packed = packed_in(folder, plain, own)
    elif path is not None and hinted and not os.path.isfile(path):
        download = {name: value for name, value in download.items() if name != "force_download"}
        there = (cached_file(path, name, _raise_exceptions_for_missing_entries=False, **download) for name in own)
        packed = [os.path.basename(found) for found in there if found is not None]
    else:
        packed = []
    if packed:
        return packed[0]
    return None if hinted and ordinary == _ORDINARY else ordinary if hinted else explicit


def _resolving(original: Callable) -> Callable:
    @functools.wraps(original)
    def resolve(*args, **kwargs):
        bound = _bound(original, args, kwargs)
        asked = bound.arguments
        asked["transformers_explicit_filename"] = _found(
            asked.get("pretrained_model_name_or_path"),
            asked.get("transformers_explicit_filename"),
            asked.get("variant"),
            asked.get("download_kwargs") or {},
        )
        return original(*bound.args, **bound.kwargs)

    return resolve


def _loading(original: Callable, quantizer_class: type) -> Callable:
    @functools.wraps(original)
    def load(*args, **kwargs):
        bound = _bound(original, args, kwargs)
        model, state, load_config = (bound.arguments[name] for name in ("model", "state_dict", "load_config"))
        if isinstance(load_config.hf_quantizer, quantizer_class):
            bound.arguments["state_dict"] = load_config.hf_quantizer.with_packed_weights(model, state, load_config)
        elif has_packed(state):
            raise ValueError(
                f"{load_config.pretrained_model_name_or_path}: the files hold packed weights, which config.json does "
                f"not "
                "say; "
                "pass quantization_config=twofour.transformers.TwoFourConfig()"
            )
        return original(*bound.args, **bound.kwargs)

    return load


def _saving(original: Callable, saver_of: Callable) -> Callable:
    @functools.wraps(original)
    def save_pretrained(self, *args, **kwargs):
        bound = _bound(original, (self, *args), kwargs)
        asked = bound.arguments
        folder, variant = os.fspath(asked["save_directory"]), asked.get("variant")
        # Versions before it has a method leave that to the caller.
        writes = getattr(self, "should_save_on_this_rank", bool)(asked.get("is_main_process", True))
        saver = saver_of(self, asked.get("save_original_format", True))
        if getattr(self, "_hf_peft_config_loaded", False) or os.path.isfile(folder):
            return original(*bound.args, **bound.kwargs)
        if saver is None:
            result = original(*bound.args, **bound.kwargs)
            if writes and os.path.isdir(folder):
                _remove_packed(folder, variant)
            return result
        if asked.get("distributed_checkpoint"):
            raise ValueError("packed weights cannot be saved with distributed_checkpoint=True: leave it out")
        os.makedirs(folder, exist_ok=True)
        other = sorted(
            name for name in os.listdir(folder) if name.startswith("pytorch_model") and name.endswith(".bin")
        )
        if other:
            raise ValueError(
                f"{folder} has {other[0]}, which would be loaded in the place of the packed weights: remove it, or "
                f"save "
                "elsewhere"
            )
        push, asked["push_to_hub"] = asked.get("push_to_hub", False), False
        hub = {"token": asked["token"]} if asked.get("token") is not None else {}
        hub.update(asked.pop("kwargs", {}))
        with tempfile.TemporaryDirectory(prefix=".twofour-", dir=folder) as staged:
            asked["save_directory"] = staged
            with saver:
                original(*bound.args, **bound.kwargs)
            if writes:
                publish(staged, folder, variant)
        if push and writes:
            self.push_to_hub(hub.pop("repo_id", os.path.basename(os.path.abspath(folder))), **hub)

    return save_pretrained


def _remove_packed(folder: str, variant: str | None) -> None:
    for name in os.listdir(folder):
        if name == README or (name.startswith(PREFIX) and is_of_weights(name, variant)):
            os.remove(os.path.join(folder, name))


def _bound(original: Callable, args: tuple, kwargs: dict) -> inspect.BoundArguments:
    return inspect.signature(original).bind(*args, **kwargs)


def wrap(quantizer_class: type, saver_of: Callable) -> None:
    """Wraps the functions.

    Args:
        quantizer_class: the quantizer whose method ``with_packed_weights`` is given the tensors of a checkpoint.
        saver_of: of a model, and whether it is saved in its original format, a context manager inside which it saves
            packed weights, or ``None`` for a model without any.

    Raises:
        ImportError: where this version of transformers lacks one of them.
    """
    try:
        modeling_utils._get_resolved_checkpoint_files = _resolving(modeling_utils._get_resolved_checkpoint_files)
        modeling_utils.convert_and_load_state_dict_in_model = _loading(
            modeling_utils.convert_and_load_state_dict_in_model, quantizer_class
        )
    except AttributeError as error:
        raise ImportError(
            f"transformers {transformers.__version__} does not fit this version of twofour: {error}"
        ) from None
    modeling_utils.PreTrainedModel.save_pretrained = _saving(modeling_utils.PreTrainedModel.save_pretrained, saver_of)
