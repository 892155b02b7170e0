"""Layers for training with 2:4 weights or activations.

The dense weight stays what the optimizer updates. A mask is chosen anew from it in every forward pass, 2:4 along rows
and along columns, and gradients reach pruned elements, too (straight-through), so that they can grow back.
"""

from __future__ import annotations

import contextlib
import difflib
import warnings

import torch
from torch import nn

from .. import operators
from ..operators import masks
from ..operators.autograd import packed_linear, stand_in
from ..operators.derivatives import is_in_graph
from ..operators.errors import wrong_features
from ..operators.master import (
    autocast_type,
    cast_activations,
    cast_for_autocast,
    compiled_master_linear,
    master_linear,
    pack_masters,
)
from ..operators.packed import Packed
from ..tensor import pointwise
from ..tensor.semi_structured import rule_of_algorithm
from ..tensor.sparsify import GRADIENT_TYPE, semi_structured_sparsify, semi_structured_sparsify_like
from .conversion import (
    SparseLayer,
    chosen,
    dense_layer,
    expect_convertible,
    expect_no_adapters,
    is_sparse,
    is_training_layer,
    replace,
    take_over,
)
from .readers import ServesReaders, Unreadable
from .tracing import traceable

pointwise.install()


class _DynamicLinear(ServesReaders, nn.Linear):
    """A linear layer one of whose operands is pruned in every forward pass.

    Args:
        algo: how the mask is chosen. ``""`` and ``"largest_values_greedy"``: greedily by signed value, the peers'
            default, which prunes large negative values; ``"largest_abs_values_greedy"``: greedily by magnitude;
            ``"causal1122"``; ``"optimal"``: the best of the 90 patterns that are 2:4 both ways.

    Raises:
        RuntimeError: for an unknown ``algo``.
    """

    algo: str

    def __init__(self, in_features, out_features, bias=True, device=None, dtype=None, *, algo: str = ""):
        super().__init__(in_features, out_features, bias, device, dtype)
        self._set_algo(algo)

    def _set_algo(self, algo: str) -> None:
        self._rule = operators.rule_number(rule_of_algorithm(algo))
        self.algo = algo

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, algo={self.algo!r}"

    @classmethod
    def from_dense(cls, linear: nn.Linear, algo: str = ""):
        """A layer of this class with the parameters of a linear layer: the same objects, so that optimizers keep hold
        of them.

        Hooks, attributes and the training flag are those of the linear layer.

        Raises:
            TypeError: for something other than a linear layer, and for a subclass whose own methods, such as
                ``forward``, would be lost.
            ValueError: for a layer with parametrizations, with a sparse weight, or without initialized parameters.
            RuntimeError: for an unknown ``algo``.
        """
        rule_of_algorithm(algo)
        expect_convertible(linear)
        if isinstance(linear, SparseLayer) or is_sparse(linear.weight):
            raise ValueError(
                f"the weight of this {type(linear).__name__} is sparse already: {cls.__name__} prunes a dense one; see "
                f"to_dense"
            )
        new = cls(linear.in_features, linear.out_features, bias=False, device="meta", algo=algo)
        new._parameters.update(weight=linear._parameters["weight"], bias=linear._parameters["bias"])
        if type(linear) is not nn.Linear:
            new._dense_class = type(linear)
        return take_over(new, linear)


class SemiSparseLinear(SparseLayer, _DynamicLinear):
    """A linear layer whose weight is pruned to 2:4 in every forward pass: ``y = x @ (mask * W).T + bias``.

    ``x`` is ``[..., in_features]`` of float32, bfloat16 or float16, of any rank from 1 on; the output is ``[...,
    out_features]``. Forward pass and input gradient are sparse GEMMs, the weight gradient is dense and not masked. The
    mask is a function of the weight: it is the same in all micro-steps between two optimizer steps and when
    ``torch.utils.checkpoint`` computes the forward pass again. :func:`keep_masks` spares choosing it again. Any
    ``in_features`` and ``out_features``. The method is that of Cai et al., "Accelerating Neural Network Training with
    Semi-Structured (2:4) Sparsity", 2024.

    Raises:
        ValueError: in the forward pass on a CPU, for a weight with a NaN; the message names row and column. On a GPU a
            NaN spreads as in a dense layer, since a search for it would wait for the device.
        RuntimeError: where the last dimension of ``x`` is not ``in_features``.
        NotImplementedError: for other types, and where those of ``x`` and of the weight differ without autocast.
    """

    _kept: Packed | None = None

    def __getstate__(self):
        # A copy is not inside keep_masks.
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}

    @property
    def mask(self) -> torch.Tensor:
        """What the forward pass keeps of the present weight, ``[out_features, in_features]`` of bool."""
        weight = self.master.detach()
        return masks.mask_of(operators.select(weight, self._rule), *weight.shape)

    def dense_weight(self) -> torch.Tensor:
        """What the mask keeps of the present weight, dense with zeros, without a gradient."""
        return self.master.detach().masked_fill(~self.mask, 0)

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._kept is not None:
            x, bias = cast_for_autocast(x, self.bias)
            return master_linear(x, self.master, bias, self._rule, packed=self._kept)
        parameters = self._parameters
        if "weight" in parameters and "bias" in parameters and is_in_graph():
            # Each attribute of a module that torch.compile sees read is guarded in every call; its dictionary once.
            return compiled_master_linear(x, parameters["weight"], parameters["bias"], self._rule)
        x, bias = cast_activations(x, self.master, self.bias)
        return master_linear(x, self.master, bias, self._rule)


@contextlib.contextmanager
def keep_masks(model: nn.Module, dtype: torch.dtype | None = None):
    """Chooses the mask of every :class:`SemiSparseLinear` in ``model`` once, for all forward passes inside: gradient
    accumulation. On a GPU a launch chooses those of 24 layers, which takes less of the host than one for each.

    Results are the same as without it. No weight may change inside: call the optimizer outside.

    Args:
        model: the model.
        dtype: the type in which the forward passes multiply; autocast's where it is on, and otherwise that of each
            weight.

    Raises:
        RuntimeError: on leaving, where a weight was changed inside.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, SemiSparseLinear)]
    dtypes = [dtype or autocast_type(layer.weight) for layer in layers]
    kept = _packed_now(layers, dtypes)
    try:
        for layer, packed in zip(layers, kept, strict=True):
            layer._kept = packed
        yield model
    finally:
        for layer in layers:
            layer._kept = None
    # Versions of tensors do not count what is written through `.data`.
    if not all(packed.is_same(now) for packed, now in zip(kept, _packed_now(layers, dtypes), strict=True)):
        raise RuntimeError(
            "a weight was changed inside keep_masks, whose forward passes used the old one: step the optimizer outside"
        )


def _packed_now(layers: list[SemiSparseLinear], dtypes: list[torch.dtype]) -> list[Packed]:
    """What each layer keeps of its present weight, in few launches."""
    weights = [layer.weight.detach() for layer in layers]
    packed = pack_masters(weights, [layer._rule for layer in layers], dtypes)
    return [Packed(*weight.shape, *both) for weight, both in zip(weights, packed, strict=True)]


class SemiSparseActivationLinear(_DynamicLinear):
    """A linear layer whose input is pruned to 2:4 in every forward pass: ``y = P(x) @ W.T + bias``.

    ``x`` is ``[..., in_features]`` of float32, bfloat16 or float16; its leading dimensions count as one, tokens. ``P``
    keeps 2:4 along tokens and along features. Forward pass and weight gradient are sparse GEMMs. The input gradient is
    dense and not masked (straight-through). Any shape, with and without bias. The peers' layer refuses a bias, 3-D
    inputs and inference.

    Raises:
        ValueError: in the forward pass on a CPU, for an input with a NaN; the message names token and feature.
        RuntimeError: where the last dimension of ``x`` is not ``in_features``.
        NotImplementedError: for other types, and where those of ``x`` and of the weight differ without autocast.
    """

    def read_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight that another module cannot multiply with, since that would not prune the input."""
        return weight.detach().as_subclass(Unreadable)

    def to_dense(self) -> nn.Linear:
        """The linear layer with the same parameters, hooks, attributes and training flag. It prunes no input, so it
        computes something else, and a warning says so."""
        warnings.warn(
            "a linear layer multiplies all activations, where SemiSparseActivationLinear prunes them: the model "
            "computes something else from here on",
            stacklevel=2,
        )
        return dense_layer(self, self.master)

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight, bias = cast_for_autocast(x, self.master, self.bias)
        if not x.shape or x.shape[-1] != weight.shape[1]:
            raise wrong_features(x, *weight.shape)
        tokens = x.reshape(-1, x.shape[-1])
        # The transpose serves the weight gradient.
        transpose = torch.is_grad_enabled() and weight.requires_grad
        forward, transposed, _ = operators.pack(tokens.detach(), self._rule, 1.0, transpose, False)
        packed = Packed(*tokens.shape, forward, transposed if transpose else None)
        # The product of the weight with the transpose of P(x). The input is kept as P(x) alone.
        y = packed_linear(weight, stand_in(tokens), None, packed).mT.contiguous()
        y = y if bias is None else y + bias
        return y.reshape(*x.shape[:-1], weight.shape[0])


def _qualified(current: str, name: str) -> str:
    return f"{current}.{name}" if current else name


def swap_linear_with_semi_sparse_linear(
    model: nn.Module, config: dict[str, type], current: str = "", *, algo: str = ""
) -> None:
    """Replaces linear layers of ``model``, in place, by layers with the same parameters that prune in every forward
    pass.

    Args:
        model: the model.
        config: the layers to replace, by their names as in ``model.named_modules()``, and their new classes:
            :class:`SemiSparseLinear` or :class:`SemiSparseActivationLinear`.
        current: the name of ``model`` itself, which every name in ``config`` then begins with.
        algo: how the new layers choose masks; see :class:`SemiSparseLinear`.

    A layer that has several names is replaced under all of them.

    Raises:
        ValueError: for names that no linear layer in ``model`` has, with the closest ones that exist; for the name of
            ``model`` itself, which cannot be replaced in place; for a layer with parametrizations or a sparse weight,
            and a part of an adapter. Nothing is replaced then.
        TypeError: for a class that is neither of the two; for a layer of a subclass of ``nn.Linear`` whose own methods,
            such as ``forward``, would be lost.
        RuntimeError: for an unknown ``algo``.
    """
    names = {
        _qualified(current, name) if name else current: module
        for name, module in model.named_modules(remove_duplicate=False)
    }
    linears = [name for name, module in names.items() if isinstance(module, nn.Linear) and module is not model]
    problems = []
    for name, cls in config.items():
        if not (isinstance(cls, type) and issubclass(cls, _DynamicLinear)):
            raise TypeError(f"config[{name!r}] must be SemiSparseLinear or SemiSparseActivationLinear, not {cls!r}")
        if names.get(name) is model:
            problems.append(
                f"{name!r} is the model itself, which cannot be replaced in place: use {cls.__name__}.from_dense(model)"
            )
        elif name in names and name not in linears:
            problems.append(f"{name!r} is a {type(names[name]).__name__}, not a Linear")
        elif name not in names:
            close = difflib.get_close_matches(name, linears, n=3, cutoff=0.3)
            hint = f"; close are {', '.join(map(repr, close))}" if close else ""
            problems.append(f"{name!r} is no module of the model{hint}")
    if problems:
        raise ValueError(
            f"swap_linear_with_semi_sparse_linear: {'; '.join(problems)}. See model.named_modules() for the names"
        )
    expect_no_adapters(model, [(name, names[name]) for name in config])
    pairs = {}
    for name, cls in config.items():
        module = names[name]
        try:
            pairs.setdefault(id(module), (module, cls.from_dense(module, algo=algo)))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name!r}: {error}") from None
        if type(pairs[id(module)][1]) is not cls:
            raise ValueError(f"{name!r} is also another name of config, with another class: one layer has one class")
    for attention in model.modules():
        if isinstance(attention, nn.MultiheadAttention) and isinstance(
            pairs.get(id(attention.out_proj), (0, 0))[1], SemiSparseActivationLinear
        ):
            raise ValueError(
                "out_proj of a MultiheadAttention cannot be a SemiSparseActivationLinear: the module reads its weight "
                "and never calls it, so no input "
                "would be pruned; leave its name out of config"
            )
    replace(model, list(pairs.values()))


def swap_semi_sparse_linear_with_linear(model: nn.Module, current: str = "") -> None:
    """Replaces the training layers of ``model``, in place, by linear layers that compute what the training layers
    compute in evaluation.

    A layer that prunes its weight, :class:`SemiSparseLinear` or one of :mod:`twofour.pretrain`, leaves behind a linear
    layer whose weight is pruned by the layer's own rule. The parameter is the same object, so that optimizers keep hold
    of it. To go on training with the dense master weights instead, call ``model.state_dict()`` before and
    ``model.load_state_dict`` after. A :class:`SemiSparseActivationLinear` leaves its weight as it is, with a warning,
    since no linear layer prunes activations.

    Args:
        model: the model.
        current: the name of ``model`` itself, for errors.

    Raises:
        ValueError: where ``model`` itself is such a layer, which cannot be replaced in place; where a weight that is to
            be pruned is also that of another module; on a CPU, for a weight with a NaN. Nothing is replaced then.
        TypeError: for a subclass of such a layer whose own methods would be lost.
    """
    if is_training_layer(model):
        raise ValueError(
            f"swap_semi_sparse_linear_with_linear: {current!r} is the model itself, which cannot be replaced in place: "
            f"use "
            f"{type(model).__name__}.to_dense(model)"
        )
    pairs = []
    layers = chosen(model, lambda module, _: is_training_layer(module))
    for name, layer in layers:
        try:
            pairs.append((layer, layer.to_dense()))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{_qualified(current, name)!r}: {error}") from None
    _expect_untied(model, layers, current)
    for layer, dense in pairs:
        if dense.weight is not layer.weight:
            # Not in place: a state dict that was taken before keeps the master weight.
            layer.weight.data = dense.weight.data
            dense.weight = layer.weight
    replace(model, pairs)


def _expect_untied(model: nn.Module, layers: list[tuple[str, nn.Module]], current: str) -> None:
    """Raises:
    ValueError: where a weight that is to be pruned is a parameter of another module, too, or of a layer with another
        rule.
    """
    swapped = {id(layer): (name, layer) for name, layer in layers if isinstance(layer, SparseLayer)}
    owners = {id(layer.weight): (name, layer) for name, layer in swapped.values()}
    for other_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            name, layer = owners.get(id(parameter), (None, None))
            if layer is None or layer is module:
                continue
            if id(module) not in swapped or not torch.equal(layer.dense_weight(), module.dense_weight()):
                raise ValueError(
                    f"{_qualified(current, name)!r}: its weight is also {_qualified(other_name, parameter_name)!r}, "
                    f"which pruning would change: "
                    "give the layer a copy first, layer.weight = torch.nn.Parameter(layer.weight.detach().clone())"
                )
