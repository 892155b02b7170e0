"""Pruning and compressing the layers of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from ..operators.magnitude import two_largest
from ..tensor.blocksparse import BlockSparseTensor
from ..tensor.conversion import to_sparse_semi_structured
from . import registration
from .conversion import (
    SHARDED,
    chosen,
    dense_layer,
    expect_no_adapters,
    is_in_out,
    is_sharded,
    is_sparse,
    is_training_layer,
    replace,
    weight_of,
)
from .linear import Linear
from .roles import by_default


@dataclasses.dataclass(frozen=True)
class SemiSparseWeightConfig:
    """Weights become 2:4 tensors, whose GEMMs are sparse.

    Attributes:
        alg_id: accepted for the peers' sake; kernels are chosen by shape.
    """

    alg_id: int = 0


@dataclasses.dataclass(frozen=True)
class BlockSparseWeightConfig:
    """Of a weight in square blocks those with a nonzero are stored and multiplied.

    Attributes:
        blocksize: rows and columns of a block.
    """

    blocksize: int = 64


#: The peers' older names.
semi_sparse_weight = SemiSparseWeightConfig
block_sparse_weight = BlockSparseWeightConfig

#: Decides by module and name whether a layer's weight is replaced.
Filter = Callable[[nn.Module, str], bool]


def _chosen(model: nn.Module, filter_fn: Filter | None) -> list[tuple[str, nn.Module]]:
    """The modules that the filter takes, with their names.

    Raises:
        ValueError: for one without a weight that is a matrix.
    """
    layers = chosen(model, filter_fn or by_default(model, in_out=True))
    expect_no_adapters(model, layers)
    for name, module in layers:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise ValueError(f"filter_fn takes {_quoted(name)}, a {type(module).__name__}, which has no 2-D weight")
        if isinstance(module, nn.Module) and "weight" not in module._parameters and not isinstance(module, Linear):
            raise ValueError(
                f"{_quoted(name)}: the weight is no parameter, since a parametrization or a hook computes it: call "
                f"squash_mask of the sparsifier, "
                "remove_parametrizations, torch.nn.utils.prune.remove or remove_weight_norm first"
            )
        if is_sharded(weight):
            raise ValueError(f"{_quoted(name)}: {SHARDED}")
    return layers


def _quoted(name: str) -> str:
    return repr(name) if name else "the model itself"


def sparsify_(
    model: nn.Module,
    config: SemiSparseWeightConfig | BlockSparseWeightConfig,
    filter_fn: Filter | None = None,
    *,
    prune: bool | str = False,
) -> nn.Module:
    """Replaces the weights of linear layers, in place, by 2:4 tensors or by block-sparse ones: for inference.

    A layer that prunes its weight itself, such as :class:`twofour.sparsity.training.SemiSparseLinear` or those of
    :mod:`twofour.pretrain`, is replaced by a linear layer with the weight that it multiplies with in evaluation: the
    mask that was trained is kept, and ``prune`` is for the others. Weights that are sparse already stay as they are.
    Other layers keep their class, and so a ``forward`` of their own. The weight of transformers' ``Conv1D``, stored
    ``[in_features, out_features]``, is 2:4 along its columns, which the layer sums.

    Args:
        model: the model; its weights are float32, bfloat16 or float16.
        config: a :class:`SemiSparseWeightConfig` or a :class:`BlockSparseWeightConfig`.
        filter_fn: ``filter_fn(module, name)`` says whether a module's weight is replaced. By default those are that
            :func:`twofour.linear_layers` names, and layers that prune in training: heads and routers, for instance,
            stay dense.
        prune: ``True`` keeps the two largest magnitudes of each group of four; or the name of a mask rule, as in
            :func:`twofour.sparse.to_sparse_semi_structured`. By default the weights must be 2:4 already. Block-sparse
            weights are not pruned here.

    Returns:
        the model. The new weights need no gradient.

    Raises:
        ValueError: where a weight is not 2:4: the message names the module, the row and the group. The model is then as
            it was. Also where no linear layer is chosen by default; for a module without a matrix for a weight, for a
            weight that a parametrization or a hook computes, for a part of an adapter, such as peft's LoRA, and for
            ``prune`` with block-sparse weights.
        RuntimeError: for a weight of another type; the message names the module.
        TypeError: for another config; for a layer that prunes its input, and for a subclass of a training layer whose
            own methods would be lost.
    """
    if config in (SemiSparseWeightConfig, BlockSparseWeightConfig):
        config = config()
    if not isinstance(config, (SemiSparseWeightConfig, BlockSparseWeightConfig)):
        raise TypeError(f"sparsify_ requires a SemiSparseWeightConfig or a BlockSparseWeightConfig, not {config!r}")
    if prune and isinstance(config, BlockSparseWeightConfig):
        raise ValueError("prune is for 2:4 weights: set whole blocks to zero before sparsify_ with block_sparse_weight")
    layers = [(name, module) for name, module in _chosen(model, filter_fn) if not _is_done(name, module, config)]
    sparse: dict[int, nn.Parameter] = {}
    pairs = []
    for name, module in layers:
        trained = is_training_layer(module)
        if trained and module is model:
            raise ValueError(
                f"the model itself is a {type(model).__name__}, which cannot be replaced in place: wrap it in "
                f"nn.Sequential"
            )
        try:
            if trained:
                weight, is_pruned = weight_of(module)
                pairs.append((module, dense_layer(module, _parameter(weight, config, prune and not is_pruned, False))))
            elif id(module.weight) not in sparse:
                sparse[id(module.weight)] = _parameter(module.weight.detach(), config, prune, is_in_out(module))
        except ValueError as error:
            hint = "; prune it first, or pass prune=True" if "2:4 allows" in str(error) and not prune else ""
            raise ValueError(f"{_quoted(name)}: {error}{hint}") from error
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise type(error)(f"{_quoted(name)}: {error}") from error
    for _, module in layers:
        if not is_training_layer(module):
            module.weight = sparse[id(module.weight)]
    replace(model, pairs)
    changed = {id(module) for _, module in layers}
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(id(module) in changed for module in encoder.modules()):
            # Padded batches stay as they are: torch multiplies nested tensors with plain weights alone.
            encoder.use_nested_tensor = False
    registration.with_transformers()
    return model


def _is_done(name: str, module: nn.Module, config: SemiSparseWeightConfig | BlockSparseWeightConfig) -> bool:
    """Whether a module's weight has the form that a configuration asks for.

    Raises:
        ValueError: where it has the other sparse form.
    """
    weight = module.weight
    if not is_sparse(weight):
        return False
    if isinstance(weight, BlockSparseTensor) != isinstance(config, BlockSparseWeightConfig):
        raise ValueError(
            f"{_quoted(name)}: its weight is sparse already, in the other of the two forms: make it dense first, "
            f"weight.to_dense()"
        )
    return True


def _parameter(
    weight: torch.Tensor, config: SemiSparseWeightConfig | BlockSparseWeightConfig, prune: bool | str, in_out: bool
) -> nn.Parameter:
    """A dense weight as a frozen sparse parameter."""
    if isinstance(config, BlockSparseWeightConfig):
        if in_out:
            raise ValueError("a weight that is stored [in_features, out_features] cannot be block-sparse: leave it out")
        compressed = BlockSparseTensor.from_dense(weight, config.blocksize)
    elif in_out:
        compressed = to_sparse_semi_structured(weight.t().contiguous(), alg_id=config.alg_id, prune=prune).t()
    else:
        compressed = to_sparse_semi_structured(weight, alg_id=config.alg_id, prune=prune)
    return nn.Parameter(compressed.detach(), requires_grad=False)


@torch.no_grad()
def apply_fake_sparsity(model: nn.Module, filter_fn: Filter | None = None) -> nn.Module:
    """Prunes the weights of linear layers in place: the two smallest magnitudes of each group of four along the inputs
    become zero, which are rows, and columns of transformers' ``Conv1D``. They stay dense tensors.

    Args:
        model: the model.
        filter_fn: ``filter_fn(module, name)`` says whether a module's weight is pruned; by default as for
            :func:`sparsify_`.

    Returns:
        the model.

    Raises:
        ValueError: for a NaN in a weight that a kernel takes, with its place; for a module without a matrix for a
            weight; for a weight that a parametrization or a hook computes; for a layer that prunes its weight by a rule
            of its own.
    """
    layers = [(name, module) for name, module in _chosen(model, filter_fn) if not is_sparse(module.weight)]
    for name, module in layers:
        if is_training_layer(module):
            raise ValueError(
                f"{_quoted(name)} is a {type(module).__name__}, which prunes by its own rule: swap it back, or "
                f"compress it as it is by sparsify_"
            )
    for _, module in layers:
        weight = module.weight.detach()
        kept = two_largest(weight.t().contiguous()).t() if is_in_out(module) else two_largest(weight)
        module.weight.masked_fill_(~kept, 0)
    return model
