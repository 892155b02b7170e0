"""Pruning and compressing the layers of a model, under the names of ``torchao.sparsity.sparse_api``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from ..sparse import to_sparse_semi_structured
from ._masks import two_largest
from .blocksparse import BlockSparseTensor

__all__ = [
    "BlockSparseWeightConfig",
    "SemiSparseWeightConfig",
    "apply_fake_sparsity",
    "block_sparse_weight",
    "semi_sparse_weight",
    "sparsify_",
]


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


def _is_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear)


def _chosen(model: nn.Module, filter_fn: Filter | None) -> list[tuple[str, nn.Module]]:
    """The modules that the filter takes, with their names.

    Raises:
        ValueError: for one without a weight that is a matrix.
    """
    filter_fn = filter_fn or _is_linear
    chosen = [(name, module) for name, module in model.named_modules() if filter_fn(module, name)]
    for name, module in chosen:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
            raise ValueError(f"filter_fn takes {_quoted(name)}, a {type(module).__name__}, which has no 2-D weight")
    return chosen


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

    Args:
        model: the model; its weights are float32, bfloat16 or float16.
        config: a :class:`SemiSparseWeightConfig` or a :class:`BlockSparseWeightConfig`.
        filter_fn: ``filter_fn(module, name)`` says whether a module's weight is replaced; all linear layers' by default.
        prune: ``True`` keeps the two largest magnitudes of each group of four; or the name of a mask rule, as in
            :func:`twofour.sparse.to_sparse_semi_structured`. By default the weights must be 2:4 already. Block-sparse weights are not pruned
            here.

    Returns:
        the model. The new weights need no gradient.

    Raises:
        ValueError: where a weight is not 2:4: the message names the module, the row and the group. The model is then as it was. Also for a
            module without a matrix for a weight, and for ``prune`` with block-sparse weights.
        RuntimeError: for a weight of another type; the message names the module.
        TypeError: for another config.
    """
    if config in (SemiSparseWeightConfig, BlockSparseWeightConfig):
        config = config()
    if not isinstance(config, (SemiSparseWeightConfig, BlockSparseWeightConfig)):
        raise TypeError(f"sparsify_ requires a SemiSparseWeightConfig or a BlockSparseWeightConfig, not {config!r}")
    if prune and isinstance(config, BlockSparseWeightConfig):
        raise ValueError("prune is for 2:4 weights: set whole blocks to zero before sparsify_ with block_sparse_weight")
    sparse: dict[int, nn.Parameter] = {}
    chosen = _chosen(model, filter_fn)
    for name, module in chosen:
        if nn.utils.parametrize.is_parametrized(module, "weight"):
            raise ValueError(f"{_quoted(name)}: the weight has a parametrization; call squash_mask of the sparsifier first")
        weight = module.weight.detach()
        if id(module.weight) in sparse:
            continue
        try:
            if isinstance(config, BlockSparseWeightConfig):
                compressed = BlockSparseTensor.from_dense(weight, config.blocksize)
            else:
                compressed = to_sparse_semi_structured(weight, alg_id=config.alg_id, prune=prune)
        except ValueError as error:
            hint = "" if prune or isinstance(config, BlockSparseWeightConfig) else "; prune it first, or pass prune=True"
            raise ValueError(f"{_quoted(name)}: {error}{hint}") from error
        except (RuntimeError, NotImplementedError) as error:
            raise type(error)(f"{_quoted(name)}: {error}") from error
        sparse[id(module.weight)] = nn.Parameter(compressed.detach(), requires_grad=False)
    for _, module in chosen:
        module.weight = sparse[id(module.weight)]
    return model


@torch.no_grad()
def apply_fake_sparsity(model: nn.Module, filter_fn: Filter | None = None) -> nn.Module:
    """Prunes the weights of linear layers in place: the two smallest magnitudes of each group of four along a row become zero. They stay
    dense tensors.

    Args:
        model: the model.
        filter_fn: ``filter_fn(module, name)`` says whether a module's weight is pruned; all linear layers' by default.

    Returns:
        the model.

    Raises:
        ValueError: for a NaN in a weight that a kernel takes, with its place, and for a module without a matrix for a weight.
    """
    for _, module in _chosen(model, filter_fn):
        module.weight.masked_fill_(~two_largest(module.weight.detach()), 0)
    return model
