"""Kernels of torch's 2:4 operators, ``torch._sparse_semi_structured_*`` and ``torch._cslt_*``, which
:func:`twofour.install` registers.

Each rounds once, to the type of its result, as torch's kernels do: bias, scales and activation meet sums that are not
rounded yet.
"""

from __future__ import annotations

import weakref

import torch

from .. import operators
from ..operators import masks
from ..operators.float8 import FLOAT8, saturated, scaled_product
from ..operators.packed import _ACTIVATIONS, Packed, same_bytes
from ..tensor import cusparselt, torch_layouts
from ..tensor.semi_structured import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS, rule_of_algorithm

# A packed weight that was made from a program's tensors in the host's memory, by what it is and by the identity of
# those: converting torch's layouts takes longer than a GEMM. It serves while the tensors have the bytes that they had;
# their versions do not count what is written through `.data`. On a GPU comparing would wait for the device, so weights
# are converted in every call.

_CONVERTED: dict[tuple, tuple] = {}


def _converted(kind: str, tensors: tuple[torch.Tensor, ...], make) -> Packed:
    if tensors[0].device.type != "cpu":
        return make()
    key = (kind, *map(id, tensors))
    known = _CONVERTED.get(key)
    if known is not None and all(r() is t and same_bytes(c, t) for r, c, t in zip(*known[:2], tensors, strict=True)):
        return known[2]
    packed = make()
    references = [weakref.ref(tensor, lambda _: _CONVERTED.pop(key, None)) for tensor in tensors]
    _CONVERTED[key] = (references, [tensor.detach().clone() for tensor in tensors], packed)
    return packed


class _Weight:
    """A weight in one of torch's compressed forms.

    Attributes:
        tensors: what the program passed.
        packed: the weight, packed for this device.
    """

    def __init__(self, tensors: tuple[torch.Tensor, ...], make):
        self.tensors = tensors
        self.packed = _converted("as it is", tensors, make)

    def times_transpose(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T`` in the type of the operands; of integers the exact sums, in int32."""
        packed = self.packed
        if packed.dtype is torch.int8 or packed.dtype in FLOAT8:
            return self.sums(x)
        return packed.times_transpose(x)

    def sums(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T``, not rounded to the type of the operands: in float32, or in int32 of integers."""
        packed = self.packed
        if packed.dtype is torch.int8:
            return operators.linear_i8(x, packed.forward, packed.rows)
        if packed.dtype in FLOAT8:
            one = torch.ones((), device=x.device)
            return scaled_product(x, packed, one, one, None, torch.float32)
        if packed.dtype.itemsize == 2:
            packed = _converted("in float32", self.tensors, lambda: self.packed.to(dtype=torch.float32))
        return packed.times_transpose(x.to(packed.dtype))


def _of_cutlass(values: torch.Tensor, meta: torch.Tensor) -> _Weight:
    """The weight of torch's CUTLASS layout."""
    rows, cols = values.shape[0], 2 * values.shape[1]

    def make():
        return Packed(
            rows,
            cols,
            operators.from_canonical(values.contiguous(), torch_layouts.meta_from_torch(meta.contiguous()), cols),
        )

    return _Weight((values, meta), make)


def _tile(input, algorithm="", use_cutlass=True):
    if input.dim() != 2 or input.stride(1) != 1:
        raise RuntimeError("Can only sparsify contiguous tensors. Sparsify the transpose otherwise.")
    rule_of_algorithm(algorithm)
    pruned = SparseSemiStructuredTensorCUTLASS.prune_dense_static_sort(input.detach(), algorithm)
    bitmask = pruned.compressed_swizzled_bitmask
    if use_cutlass:
        return pruned.packed, pruned.meta, pruned.packed_t, pruned.meta_t, bitmask
    weight = pruned.packed_weight
    empty = input.new_empty((0,))
    return (
        cusparselt.blob_of(weight.forward, weight.rows, weight.cols).view(-1),
        empty,
        cusparselt.blob_of(weight.transposed, weight.cols, weight.rows).view(-1),
        empty,
        bitmask,
    )


def _apply(input, thread_masks):
    rows, cols = input.shape
    forward, transposed = operators.pack_masked(input, torch_layouts.bitmask_from_torch(thread_masks), True)
    return operators.canonical(forward, rows, cols)[0], operators.canonical(transposed, cols, rows)[0]


def _apply_dense(input, thread_masks):
    mask = masks.mask_of(torch_layouts.bitmask_from_torch(thread_masks), *input.shape)
    return input * mask


def _checked(mat1: torch.Tensor, mat1_meta: torch.Tensor, mat2: torch.Tensor) -> _Weight:
    weight = _of_cutlass(mat1, mat1_meta)
    if mat2.dtype != mat1.dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, and have {mat1.dtype} and {mat2.dtype}")
    if mat2.dim() != 2 or mat2.shape[0] != weight.packed.cols:
        raise RuntimeError(
            f"shapes cannot be multiplied: {(weight.packed.rows, weight.packed.cols)} and {tuple(mat2.shape)}"
        )
    return weight


def _mm(mat1, mat1_meta, mat2, *, out_dtype=None):
    weight = _checked(mat1, mat1_meta, mat2)
    if out_dtype in (None, mat1.dtype, torch.int32):
        y = weight.times_transpose(mat2.t())
    else:
        y = weight.sums(mat2.t())
    y = y.t().contiguous()
    return y if out_dtype is None else y.to(out_dtype)


def _addmm(input, mat1, mat1_meta, mat2, *, alpha=1, beta=1, out_dtype=None):
    y = _checked(mat1, mat1_meta, mat2).sums(mat2.t()).t()
    # A vector is added to the rows of the result.
    bias = input[:, None] if input.dim() == 1 else input
    if out_dtype is None:
        out_dtype = mat1.dtype if y.is_floating_point() else y.dtype
    return (alpha * y + beta * bias.to(y.dtype)).to(out_dtype).contiguous()


def _linear(input, weight, meta, *, bias=None, activation=None, out_dtype=None):
    if activation not in (None, "none", "relu", "silu"):
        raise RuntimeError(f'Unknown activation "{activation}"; known are "relu" and "silu"')
    number = operators.ACTIVATIONS[None if activation == "none" else activation]
    weight = _of_cutlass(weight, meta)
    if out_dtype in (None, weight.packed.dtype) and weight.packed.direct is not None:
        return weight.packed.times_transpose(input, bias, number)
    y = weight.sums(input)
    y = y if bias is None else y + bias
    y = _ACTIVATIONS[number](y)
    return y if out_dtype is None else y.to(out_dtype)


def _cslt_compress(input):
    tensor = SparseSemiStructuredTensor.from_dense(input.detach())
    return cusparselt.blob_of(tensor.packed_weight.forward, *input.shape)


def _cslt_sparse_mm(
    compressed_A,
    dense_B,
    bias=None,
    alpha=None,
    out_dtype=None,
    transpose_result=False,
    alg_id=0,
    split_k=1,
    split_k_mode=-1,
):
    if compressed_A.dim() != 2 or dense_B.dim() != 2:
        raise RuntimeError("_cslt_sparse_mm: both operands must have 2 dimensions")
    rows, cols = compressed_A.shape[0], dense_B.shape[0]
    weight = _Weight((compressed_A,), lambda: Packed(rows, cols, cusparselt.packed_of(compressed_A, cols)))
    if weight.packed.cols != cols:
        raise RuntimeError(
            f"_cslt_sparse_mm: shapes cannot be multiplied: {(rows, weight.packed.cols)} and {tuple(dense_B.shape)}"
        )
    if out_dtype is None:
        out_dtype = compressed_A.dtype
    if alpha is None and bias is None and out_dtype is compressed_A.dtype:
        y = weight.times_transpose(dense_B.t())
    else:
        y = weight.sums(dense_B.t())
    if alpha is not None:
        y = y * alpha.reshape(-1).float()
    if bias is not None:
        y = y + bias
    if out_dtype is torch.int8:
        # Saturated, as quantized results are.
        y = y.round().clamp(-128, 127) if y.is_floating_point() else y.clamp(-128, 127)
    y = saturated(y, out_dtype) if out_dtype in FLOAT8 else y.to(out_dtype)
    return y if transpose_result else y.t().contiguous()


def _cslt_sparse_mm_search(compressed_A, dense_B, bias=None, alpha=None, out_dtype=None, transpose_result=False):
    return 0


#: The kernels of torch's CUTLASS operators, by their names in ``aten``.
CUTLASS = {
    "_sparse_semi_structured_tile": _tile,
    "_sparse_semi_structured_apply": _apply,
    "_sparse_semi_structured_apply_dense": _apply_dense,
    "_sparse_semi_structured_mm": _mm,
    "_sparse_semi_structured_addmm": _addmm,
    "_sparse_semi_structured_linear": _linear,
}

#: All of them.
OPERATORS = {
    **CUTLASS,
    "_cslt_compress": _cslt_compress,
    "_cslt_sparse_mm": _cslt_sparse_mm,
    "_cslt_sparse_mm_search": _cslt_sparse_mm_search,
}
