"""Which linear layers another layer can take the place of, and what it takes over from them. Every function that
converts layers asks here."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.module import _WrappedHook

from . import sparse_weight

#: What a subclass may define without computing, moving or saving in a way of its own.
_HARMLESS = frozenset(
    {
        "__init__",
        "__new__",
        "__init_subclass__",
        "__class_getitem__",
        "__repr__",
        "__str__",
        "_get_name",
        "extra_repr",
        "reset_parameters",
    }
    | {
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__weakref__",
        "__slots__",
        "__constants__",
        "__parameters__",
        "__orig_bases__",
    }
    | {
        "__annotations__",
        "__annotate__",
        "__annotate_func__",
        "__annotations_cache__",
        "__firstlineno__",
        "__static_attributes__",
    }
    | {"__abstractmethods__", "_abc_impl", "__type_params__", "__hash__"}
)


class SparseLayer:
    """A layer of this package that multiplies with a 2:4 weight."""

    @property
    def is_pruned(self) -> bool:
        """Whether :meth:`dense_weight` is 2:4."""
        return True

    def dense_weight(self) -> torch.Tensor:
        """The weight that the layer multiplies with in evaluation, ``[out_features, in_features]``, dense with zeros,
        without a gradient."""
        raise NotImplementedError

    def to_dense(self) -> nn.Linear:
        """A dense layer that computes what this one computes in evaluation: with :meth:`dense_weight`, a copy, and the
        same bias, hooks, attributes and training flag. This layer stays as it is.

        Raises:
            TypeError: for a layer of another class, and for a subclass whose own methods the dense layer would lose.
        """
        if not isinstance(self, SparseLayer):
            raise TypeError(
                f"to_dense requires a layer that prunes its weight, such as SemiSparseLinear, not a "
                f"{type(self).__name__}"
            )
        weight, _ = weight_of(self)
        return dense_layer(self, nn.Parameter(weight, requires_grad=self.weight.requires_grad))


def _anchor(cls: type) -> type:
    """The class that a layer's class is measured by: ``nn.Linear``, or the layer's class in this package."""
    package = __name__.partition(".")[0]
    ours = (
        base for base in cls.__mro__ if issubclass(base, nn.Linear) and base.__module__.partition(".")[0] == package
    )
    return next(ours, nn.Linear)


def _computes_as_linear(anchor: type) -> bool:
    """Whether a class computes ``F.linear`` with its weight as it is."""
    return anchor in (nn.Linear, sparse_weight.Linear)


@functools.cache
def _template(anchor: type) -> dict:
    """What every layer of a class has in its ``__dict__``; the rest is what a user or a subclass has set."""
    return anchor(4, 4, device="meta").__dict__


#: The hooks of a module: the names of dictionaries.
_HOOKS = [name for name, value in _template(nn.Linear).items() if isinstance(value, dict) and "hooks" in name]


def _subclasses(cls: type) -> list[type]:
    """The classes that a layer's class adds to its anchor, mixins included."""
    anchor = _anchor(cls)
    return [base for base in cls.__mro__ if base not in anchor.__mro__]


SHARDED = (
    "its weight is sharded: load the whole state dict, torch.distributed.checkpoint.state_dict.get_model_state_dict "
    "with full_state_dict=True, into a "
    "model that is not, and convert that"
)


def is_in_out(module: nn.Module) -> bool:
    """Whether a module is a linear layer whose weight is stored ``[in_features, out_features]``: transformers'
    ``Conv1D``, of GPT-2."""
    return any(base.__name__ == "Conv1D" and hasattr(module, "nf") for base in type(module).__mro__)


def is_sharded(weight: torch.Tensor | None) -> bool:
    """Whether a weight is a part of one that several ranks hold."""
    return hasattr(weight, "full_tensor")


def refusal_of(linear: nn.Module) -> str | None:
    """Why no other layer can take the place of a layer, or ``None`` where one can.

    An ``nn.Linear`` can be replaced, and so can a subclass that adds attributes and no methods.
    """
    if not isinstance(linear, nn.Linear):
        stored = ", whose weight is stored [in_features, out_features]" if is_in_out(linear) else ""
        return f"a torch.nn.Linear is required, not a {type(linear).__name__}{stored}"
    if nn.utils.parametrize.is_parametrized(linear):
        return (
            "it has parametrizations, which the new layer would lose: call "
            "torch.nn.utils.parametrize.remove_parametrizations, or squash_mask of a "
            "sparsifier, first"
        )
    if nn.parameter.is_lazy(linear._parameters.get("weight")):
        return "its parameters are not initialized: run it once first"
    kind, anchor = type(linear), _anchor(type(linear))
    for base in _subclasses(kind):
        own = [
            name
            for name, value in vars(base).items()
            if name not in _HARMLESS and (hasattr(anchor, name) or not _is_data(value))
        ]
        if own:
            return (
                f"it is a {kind.__name__}, whose own {_listed(own)} the new layer would lose: leave it out, or make it a "
                f"{anchor.__name__} first"
            )
    if "forward" in linear.__dict__:
        return (
            "its forward was replaced on the layer itself, as accelerate's hooks do, which the new layer would lose: "
            "undo that first"
        )
    if is_sharded(linear._parameters.get("weight")):
        return SHARDED
    if isinstance(linear, SparseLayer):
        return None
    if not _computes_as_linear(anchor):
        return (
            f"it is a {kind.__name__}, which prunes its input, as no other layer does: leave it out, or call its "
            "to_dense first"
        )
    if "weight" not in linear._parameters or "bias" not in linear._parameters:
        return (
            "its weight or bias is computed in a hook and no parameter: call torch.nn.utils.prune.remove, "
            "remove_weight_norm or "
            "remove_spectral_norm first"
        )
    return None


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def is_training_layer(module: nn.Module) -> bool:
    """Whether a module is a linear layer of this package that prunes its weight or its input in every forward pass."""
    if not isinstance(module, nn.Linear) or _computes_as_linear(_anchor(type(module))):
        return False
    return "weight" in module._parameters or nn.utils.parametrize.is_parametrized(module, "weight")


def expect_convertible(linear: nn.Module) -> None:
    """Raises:
    TypeError: for something other than a linear layer, and for a subclass of which the new layer would lose something.
    ValueError: for a layer whose weight is no parameter yet, or no longer.
    """
    refusal = refusal_of(linear)
    if refusal is not None:
        raise (TypeError if refusal.startswith(("a torch.nn.Linear", "it is a ")) else ValueError)(refusal)


def is_sparse(weight: torch.Tensor) -> bool:
    """Whether a weight is a sparse tensor of this package: 2:4, or in blocks."""
    return hasattr(weight, "packed_weight") or hasattr(weight, "bsr_values")


def weight_of(linear: nn.Linear) -> tuple[torch.Tensor, bool]:
    """The weight that a convertible layer multiplies with in evaluation, dense and without a gradient; and whether the
    layer has it sparse, by a rule of its own or as a sparse tensor, so that it is not to be pruned again.

    Raises:
        TypeError, ValueError: as :func:`expect_convertible`.
    """
    expect_convertible(linear)
    if isinstance(linear, SparseLayer):
        return linear.dense_weight(), linear.is_pruned
    weight = linear.weight.detach()
    return (weight.to_dense(), True) if is_sparse(weight) else (weight, False)


def dense_layer(old: nn.Linear, weight: nn.Parameter) -> nn.Linear:
    """The dense layer with a weight, and with everything else that a layer has: of the class that the layer had before
    it was swapped."""
    kind = old.__dict__.get("_dense_class", nn.Linear)
    new = kind.__new__(kind)
    plain = nn.Linear(old.in_features, old.out_features, bias=False, device="meta")
    new.__dict__.update(plain.__dict__)
    new._parameters["bias"] = old._parameters["bias"]
    new.weight = weight
    return take_over(new, old)


def take_over(new: nn.Module, old: nn.Linear) -> nn.Module:
    """Gives a layer what the one that it replaces has beside weight and bias: the training flag, hooks, attributes that
    were set, further parameters, buffers and modules.

    Returns:
        the new layer.

    Raises:
        ValueError: for an attribute of a name that the new layer has a use of its own for.
    """
    new.training = old.training
    for name in _HOOKS:
        new.__dict__[name] = OrderedDict(old.__dict__[name])
    new.__dict__["_is_full_backward_hook"] = old.__dict__["_is_full_backward_hook"]
    _rebind_hooks(new)
    for name, value in _attributes(old).items():
        if getattr(type(new), name, None) is not value:
            _expect_free(new, name)
            new.__dict__[name] = value
    own = _template(_anchor(type(old)))
    for kind in ("_parameters", "_buffers", "_modules"):
        for name, value in old.__dict__[kind].items():
            if name in own[kind]:
                continue
            _expect_free(new, name)
            new.__dict__[kind][name] = value
            if name in old._non_persistent_buffers_set:
                new._non_persistent_buffers_set.add(name)
    return new


def _attributes(linear: nn.Linear) -> dict[str, object]:
    """The data that subclasses have as classes, and what was set on a layer."""
    found: dict[str, object] = {}
    for base in reversed(_subclasses(type(linear))):
        found |= {name: value for name, value in vars(base).items() if name not in _HARMLESS and _is_data(value)}
    own = _template(_anchor(type(linear)))
    # What torch.compile compiled is the old class's, and a group of layers the old layer's.
    left_out = {"_compiled_call_impl", "_dense_class", "_fused"}
    return found | {name: value for name, value in linear.__dict__.items() if name not in own and name not in left_out}


def _is_data(value: object) -> bool:
    return not callable(value) and not hasattr(type(value), "__get__")


def _expect_free(new: nn.Module, name: str) -> None:
    taken = name in new.__dict__ or any(name in new.__dict__[kind] for kind in ("_parameters", "_buffers", "_modules"))
    if taken or isinstance(getattr(type(new), name, None), (property, types.FunctionType)):
        raise ValueError(
            f"it has an attribute `{name}`, a name that {type(new).__name__} has a use of its own for: rename it first"
        )


def _rebind_hooks(module: nn.Module) -> None:
    """Hooks that are called with the module that they were registered on are called with this one."""
    for name in _HOOKS:
        hooks = module.__dict__[name]
        for key, hook in hooks.items():
            if isinstance(hook, _WrappedHook) and hook.with_module:
                hooks[key] = _WrappedHook(hook.hook, module)


def chosen(model: nn.Module, takes: Callable[[nn.Module, str], bool]) -> list[tuple[str, nn.Module]]:
    """The modules of a model that a filter takes, each once, with the name that it was taken by. A module that has
    several names is taken where the filter takes one of them."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) not in found and takes(module, name):
            found[id(module)] = (name, module)
    return list(found.values())


def expect_no_adapters(model: nn.Module, layers: list[tuple[str, nn.Module]]) -> None:
    """Raises:
    ValueError: where a layer is a part of an adapter, such as peft's LoRA, which reads its weight and which pruning
        would damage.
    """
    parts: dict[int, str] = {}
    for module in model.modules():
        base = module._modules.get("base_layer")
        if base is not None:
            own = {id(part) for part in module.modules()} - {id(part) for part in base.modules()} - {id(module)}
            parts |= dict.fromkeys(own, type(module).__name__)
    for name, layer in layers:
        if id(layer) in parts:
            raise ValueError(
                f"{name!r} is a part of the adapter of a {parts[id(layer)]}, which reads its weight: choose base "
                f"layers alone, whose names end in "
                "base_layer, or merge the adapter first"
            )


def replace(model: nn.Module, replacements: list[tuple[nn.Module, nn.Module]]) -> None:
    """Replaces modules below the root, given as pairs of old and new, under all of their names. Hooks move, so that the
    handles that were returned when they were registered still remove them."""
    new_of = {id(old): new for old, new in replacements}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in new_of:
                setattr(parent, name, new_of[id(child)])
    for old, new in replacements:
        for name in _HOOKS:
            new.__dict__[name] = old.__dict__[name]
        _rebind_hooks(new)
