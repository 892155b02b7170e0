"""What ``torch._cslt_compress`` makes of a weight. On a CPU it is the canonical form in one tensor of the values' type:
values, then metadata. On a GPU cuSPARSELt's layout is opaque."""

from __future__ import annotations

import torch

from .. import operators
from ..operators.float8 import FLOAT8
from ..operators.packed import pack_sparse


def blob_of(packed: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """A packed weight in one tensor.

    Raises:
        RuntimeError: where the columns are no multiple of 32.
    """
    values, meta = operators.canonical(packed, rows, cols)
    if cols % 32:
        raise RuntimeError(f"the compressed form in one tensor requires columns to be a multiple of 32, not {cols}")
    return torch.cat((values, meta.view(values.dtype)), 1)


def packed_of(compressed: torch.Tensor, cols: int) -> torch.Tensor:
    """The packed weight of such a tensor.

    Raises:
        RuntimeError: where it has not so many columns.
    """
    meta_columns = compressed.shape[1] - cols // 2
    if cols % 32 or meta_columns * compressed.element_size() * 8 != cols:
        raise RuntimeError(
            f"a compressed tensor of shape {tuple(compressed.shape)} and {compressed.dtype} has not {cols} columns"
        )
    values, meta = compressed[:, : cols // 2].contiguous(), compressed[:, cols // 2 :].contiguous()
    return operators.from_canonical(values, meta.view(torch.int32), cols)


def of_cusparselt(compressed: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The packed weight ``[rows, cols]`` of a tensor that ``torch._cslt_compress`` or
    ``torch._sparse_semi_structured_tile`` has made.

    On a GPU the layout is known to cuSPARSELt alone, so the weight is multiplied by the identity: an infinite value
    becomes NaNs there.
    """
    compressed = compressed.view(rows, -1)
    if compressed.device.type == "cpu":
        return packed_of(compressed, cols)
    identity = torch.eye(cols, device=compressed.device).to(compressed.dtype)
    # cuSPARSELt takes another output type of 8-bit operands only; e4m3 to e4m3 it does not multiply.
    out_dtype = torch.float16 if compressed.dtype in FLOAT8 else None
    dense = torch._cslt_sparse_mm(compressed, identity.t(), out_dtype=out_dtype).to(compressed.dtype)
    return pack_sparse(dense.contiguous()).forward
