"""Checking, pruning and compressing where a tensor is. Results are those of the host's functions, bit for bit.

Each function returns ``None`` where it is for the host to compute, or to say what is wrong.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F

from .. import operators
from ..operators import masks
from .bytes import is_tensor

#: The methods of :func:`twofour.prune` that operators choose masks by.
METHODS = frozenset({"magnitude", "greedy", "greedy-signed", "causal1122", "optimal"})

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_BYTES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


def of(matrix: Any) -> torch.Tensor | None:
    """The dense tensor, where a matrix is one with elements on a GPU; a 2:4 tensor counts as its dense form."""
    if not is_tensor(matrix) or matrix.device.type != "cuda" or matrix.dim() != 2 or not matrix.numel():
        return None
    dense = matrix.detach()
    if isinstance(matrix, torch.sparse.SparseSemiStructuredTensor):
        dense = dense.to_dense()
    return dense if dense.layout == torch.strided and dense.dtype in (*_FLOATS, *_BYTES) else None


def _comparable(dense: torch.Tensor) -> torch.Tensor:
    """The numbers in a type that operators compare: float16 has all of int8 and of 8-bit floats."""
    return dense if dense.dtype in _FLOATS else dense.half()


def conformity(
    dense: torch.Tensor, pattern: str, axis: int, places: int
) -> tuple[int, int, list[tuple[int | None, ...]], int] | None:
    """Groups, groups that violate an N:M pattern, the first of those as :func:`twofour._native.verify` lists them, and
    zeros."""
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    n, m = map(int, found.groups()) if found else (0, 0)
    if not 1 <= n <= m <= 64:
        return None
    nonzero = _comparable(dense if axis == 1 else dense.t()) != 0
    counts = F.pad(nonzero, (0, -nonzero.shape[1] % m)).view(nonzero.shape[0], -1, m).sum(-1, dtype=torch.int32)
    violating = counts > n
    total = int(violating.sum())
    # In the order of memory.
    found = violating.nonzero() if axis == 1 else violating.t().nonzero().flip(1)
    first = found[: max(places, 0)]
    nonzeros = counts[first[:, 0], first[:, 1]].tolist()
    listed = [(line, group, None, None, count, n) for (line, group), count in zip(first.tolist(), nonzeros)]
    return counts.numel(), total, listed, dense.numel() - int(nonzero.sum())


def pruned(dense: torch.Tensor, pattern: str, axis: int, method: str) -> torch.Tensor | None:
    """The matrix with +0.0 in the place of what a method does not keep."""
    if pattern != "2:4" or method not in METHODS:
        return None
    along = method == "magnitude" and axis == 0
    mask = _mask(dense.t() if along else dense, method)
    if mask is None:
        return None
    return _kept(dense, mask.t() if along else mask)


def compressed(dense: torch.Tensor, prune: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Values and metadata in canonical form, of a matrix that is 2:4 or is to be pruned by magnitude."""
    mask = _mask(dense, "magnitude") if prune else _comparable(dense) != 0
    if mask is None:
        return None
    (rows, cols), device = dense.shape, dense.device
    pad = (0, -cols % 4)
    weights = 1 << torch.arange(4, device=device, dtype=torch.int32)
    bits = (F.pad(mask, pad).view(rows, -1, 4) * weights).sum(-1, dtype=torch.int64)
    codes = torch.tensor(_CODES, dtype=torch.int64, device=device)[bits]
    if (codes < 0).any():
        return None
    # As bytes or words, since not every operator of torch knows 8-bit floats.
    holder = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dense.element_size()]
    plain = F.pad(_kept(dense, mask & (_comparable(dense) != 0)).contiguous().view(holder), pad).view(rows, -1, 4)
    values = plain.gather(2, torch.stack((codes & 3, codes >> 2), -1)).view(rows, -1).view(dense.dtype)
    words = F.pad(codes, (0, -codes.shape[1] % 8)).view(rows, -1, 8) << (4 * torch.arange(8, device=device))
    return values, words.sum(-1).to(torch.int32)


def _mask(dense: torch.Tensor, method: str) -> torch.Tensor | None:
    """What a method keeps; ``None`` where it meets a NaN, whose place the host reports."""
    try:
        return masks.mask_of(
            operators.select(_comparable(dense).contiguous(), operators.rule_number(method)), *dense.shape
        )
    except ValueError:
        return None


def _kept(dense: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if dense.dtype in _BYTES:
        return (dense.contiguous().view(torch.uint8) * mask).view(dense.dtype)
    return torch.where(mask, dense, 0)


def _code(bits: int) -> int:
    """The metadata of a group by what is kept of it, filled up with the lowest free positions; -1 where that is too
    much."""
    kept = [i for i in range(4) if bits >> i & 1]
    if len(kept) > 2:
        return -1
    first, second = sorted((kept + [i for i in range(4) if i not in kept])[:2])
    return first | second << 2


_CODES = [_code(bits) for bits in range(16)]
