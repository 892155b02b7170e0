"""Element-wise operators on sparse tensors, and their gradients.

The result has the mask of the last sparse operand. Operators are computed where that mask keeps something and nowhere
else.
"""

from __future__ import annotations

import torch

from ..operators.packed import pack_by_mask
from . import semi_structured
from .semi_structured import SparseSemiStructuredTensor

_ATEN = torch.ops.aten

#: The operators, and which of their operands may be dense: what the mask keeps of them is used.
_DENSE_OPERANDS = {
    _ATEN.relu: (),
    _ATEN.gelu: (),
    _ATEN.silu: (),
    _ATEN.mul: (0, 1),
    _ATEN.add: (),
    _ATEN.gelu_backward: (0,),
    _ATEN.silu_backward: (0, 1),
    _ATEN.threshold_backward: (0,),
}


def _is_sparse(operand) -> bool:
    return isinstance(operand, SparseSemiStructuredTensor)


def _is_matrix(operand) -> bool:
    """Whether an operand is a dense tensor, other than a number."""
    return isinstance(operand, torch.Tensor) and not _is_sparse(operand) and operand.dim() > 0


def _dense(operand):
    return operand.packed_weight.to_dense() if _is_sparse(operand) else operand


def _pattern(name: str, args: tuple) -> tuple[SparseSemiStructuredTensor, torch.Tensor]:
    """The last sparse operand and its mask, in tiles.

    Raises:
        ValueError: where another sparse operand has another mask.
    """
    sparse = [arg for arg in args if _is_sparse(arg)]
    tiles = sparse[-1]._kept_tiles()
    for other in sparse[:-1]:
        kept = other._kept_tiles()
        if kept is not tiles and not (other.shape == sparse[-1].shape and torch.equal(kept, tiles)):
            raise ValueError(
                f"`{name}` requires all operands to be SparseSemiStructuredTensors with the same sparsity pattern: "
                f"make the others with "
                "semi_structured_sparsify_like"
            )
    return sparse[-1], tiles


def _elementwise(func, types, args, kwargs):
    """Computes an operator under the mask of its last sparse operand."""
    allowed = _DENSE_OPERANDS[func._overloadpacket]
    for index, arg in enumerate(args):
        if _is_matrix(arg) and index not in allowed:
            raise ValueError(
                f"`{func.__name__}`: operand {index} is dense; it must be a SparseSemiStructuredTensor with the same "
                f"sparsity pattern as the "
                "others: make it with semi_structured_sparsify_like"
            )
    pattern, tiles = _pattern(func.__name__, args)
    result = func(*map(_dense, args), **kwargs)
    if result.shape != pattern.shape:
        raise ValueError(
            f"`{func.__name__}`: the operands broadcast to {tuple(result.shape)}; the sparse one has shape "
            f"{tuple(pattern.shape)}"
        )
    return type(pattern)._of(pack_by_mask(result, tiles, pattern.packed_weight.transposed is not None), tiles)


def _add(func, types, args, kwargs):
    """The sum of tensors of one mask is sparse, that with a dense matrix is dense."""
    if any(map(_is_matrix, args)):
        return func(*map(_dense, args), **kwargs)
    return _elementwise(func, types, args, kwargs)


def _add_(func, types, args, kwargs):
    """Adds in place, as torch does where gradients meet."""
    into, other = args[:2]
    if not _is_sparse(into):
        return func(into, *map(_dense, args[1:]), **kwargs)
    if _is_matrix(other):
        raise ValueError(
            "`add_`: a dense matrix cannot be added to a SparseSemiStructuredTensor in place: use to_dense()"
        )
    _pattern("add_", args)
    into.copy_(_elementwise(_ATEN.add.Tensor, types, args, kwargs))
    return into


HANDLERS = {packet: _elementwise for packet in _DENSE_OPERANDS} | {_ATEN.add: _add, _ATEN.add_: _add_}


def install() -> None:
    """Adds the operators to the tables of all sparse tensor classes, also of those that were loaded before.

    An operator that a table has already stays as it is.
    """
    tables = [semi_structured.DISPATCH]
    classes = [SparseSemiStructuredTensor]
    while classes:
        cls = classes.pop()
        classes.extend(cls.__subclasses__())
        if cls.__dict__.get("SPARSE_DISPATCH"):
            tables.append(cls.SPARSE_DISPATCH)
    for table in tables:
        for packet, handler in HANDLERS.items():
            table.setdefault(packet, handler)
