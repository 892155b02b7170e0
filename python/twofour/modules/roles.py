"""Which linear layers of a model are worth pruning: the choice of the command, from names and shapes
(``docs/how-to/pruning.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from .. import _native
from .conversion import is_in_out, is_training_layer


def linear_layers(model: nn.Module) -> list[str]:
    """The names of the linear layers that ``twofour prune`` chooses in a model: those inside its repeated layers,
    without routers of experts, and, in a model without repeated layers, all but those that are named as embeddings and
    heads.

    It is what :func:`twofour.sparsity.sparsify_`, :func:`twofour.quantize_` and the others choose by default::

        swap_linear_with_semi_sparse_linear(model, dict.fromkeys(twofour.linear_layers(model), SemiSparseLinear))

    Args:
        model: the model, on any device, ``meta`` included.

    Returns:
        names as in ``model.named_modules()``, in that order; a layer that has several names under each that is chosen.
    """
    return [name for name, reason in reasons_to_stay_dense(model).items() if reason is None]


def by_default(model: nn.Module, *, in_out: bool = False) -> Callable[[nn.Module, str], bool]:
    """The filter of functions that convert layers, where none is given: :func:`linear_layers`, and layers of this
    package that prune in training.

    Args:
        model: the model.
        in_out: chooses among layers that store their weight ``[in_features, out_features]``, too.

    Raises:
        ValueError: where the model has linear layers and none of them is chosen, with the reason.
    """
    reasons = reasons_to_stay_dense(model, in_out=in_out)
    names = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if is_training_layer(module) or reasons.get(name, "") is None
    }
    if reasons and not names:
        name, reason = next(iter(reasons.items()))
        raise ValueError(
            f"no linear layer of {type(model).__name__} is chosen by default: {name!r}, for instance, is left out "
            f"({reason}); choose layers with filter_fn{_in_out(model)}"
        )
    return lambda module, name: name in names


def _in_out(model: nn.Module) -> str:
    """What a message adds where a model has layers of GPT-2's kind."""
    name = next((name for name, module in model.named_modules() if is_in_out(module)), None)
    return "" if name is None else (
        f". {name!r} and others of its kind store their weight [in_features, out_features]: sparsify_, "
        f"apply_fake_sparsity and WandaSparsifier prune those"
    )


def reasons_to_stay_dense(model: nn.Module, *, in_out: bool = False) -> dict[str, str | None]:
    """Why each linear layer of a model is not to be pruned, by name; ``None`` for those that are."""
    # A layer without an output or an input has nothing to prune.
    layers = {
        _joined(name, "weight"): name
        for name, module in model.named_modules(remove_duplicate=False)
        if (isinstance(module, nn.Linear) and module.in_features and module.out_features)
        or (in_out and is_in_out(module) and 0 not in module.weight.shape)
    }
    tensors = dict(_tensors(model))
    has_conv1d = any(map(is_in_out, model.modules()))
    reasons = zip(tensors, _native.reasons_to_stay_dense(list(tensors.items()), has_conv1d), strict=True)
    return {layers[name]: reason for name, reason in reasons if name in layers}


def _tensors(model: nn.Module) -> Iterator[tuple[str, list[int]]]:
    """Names and shapes of what a checkpoint of the model would hold, weights dense and under their own names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not nn.parameter.is_lazy(tensor):
                yield _joined(prefix, name), list(tensor.shape)
        if hasattr(module, "in_features") and hasattr(module, "out_features"):
            # Packed, or computed by a parametrization or a hook.
            yield _joined(prefix, "weight"), [module.out_features, module.in_features]


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
