"""Replaces torch's 2:4 tensors and operators by twofour's, so that unmodified programs run: on CPUs, and on GPUs where torch refuses."""

from __future__ import annotations

import warnings
import weakref

import torch

from . import _layouts, _ops, sparse
from ._packed import _ACTIVATIONS, Packed
from ._tensor import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS, rule_of_algorithm

_NAMES = (
    "SparseSemiStructuredTensor",
    "SparseSemiStructuredTensorCUTLASS",
    "SparseSemiStructuredTensorCUSPARSELT",
    "to_sparse_semi_structured",
)

_installed: _Installed | None = None


class _Installed:
    """What :func:`install` changed. As a context manager it undoes that at the end."""

    def __init__(self):
        self.replaced = {name: getattr(torch.sparse, name) for name in _NAMES}
        module = torch.sparse.semi_structured
        self.replaced_in_module = {name: getattr(module, name) for name in _NAMES}
        for name in _NAMES:
            setattr(torch.sparse, name, getattr(sparse, name))
            setattr(module, name, getattr(sparse, name))
        self.libraries = [_register("CPU")]
        if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 8:
            # torch's CUTLASS kernels are for compute capability 8 alone; its cuSPARSELt kernels stay.
            self.libraries.append(_register("CUDA", only=_CUTLASS))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        uninstall()

    def undo(self):
        for library in self.libraries:
            library._destroy()
        for name, value in self.replaced.items():
            setattr(torch.sparse, name, value)
        for name, value in self.replaced_in_module.items():
            setattr(torch.sparse.semi_structured, name, value)


def install() -> _Installed:
    """Puts twofour's classes and ``to_sparse_semi_structured`` into ``torch.sparse``, and registers kernels for
    ``torch._sparse_semi_structured_tile``, ``_apply``, ``_apply_dense``, ``_mm``, ``_addmm`` and ``_linear``, ``torch._cslt_compress``,
    ``_cslt_sparse_mm`` and ``_cslt_sparse_mm_search``: on CPUs, where torch has none, and on GPUs where torch's refuse to run.

    A second call changes nothing. The result is a context manager::

        with twofour.install():
            run_a_program_that_uses_torch_sparse()
    """
    global _installed
    if _installed is None:
        _installed = _Installed()
    return _installed


def uninstall() -> None:
    """Undoes :func:`install`; without one it does nothing."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None


# A packed weight that was made from a program's tensors, by the identity and version of its values: converting torch's layout takes longer than
# a GEMM.

_CONVERTED: dict[int, tuple] = {}


def _converted(values: torch.Tensor, make) -> Packed:
    known = _CONVERTED.get(id(values))
    if known is not None and known[0]() is values and known[1] == values._version:
        return known[2]
    packed = make()
    key = id(values)
    reference = weakref.ref(values, lambda _: _CONVERTED.pop(key, None))
    _CONVERTED[key] = (reference, values._version, packed)
    return packed


def _of_cutlass(values: torch.Tensor, meta: torch.Tensor) -> Packed:
    """The weight of torch's CUTLASS layout."""
    rows, cols = values.shape[0], 2 * values.shape[1]

    def make():
        return Packed(rows, cols, _ops.from_canonical(values.contiguous(), _layouts.meta_from_torch(meta.contiguous()), cols))

    return _converted(values, make)


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
        _blob(weight.forward, weight.rows, weight.cols).view(-1),
        empty,
        _blob(weight.transposed, weight.cols, weight.rows).view(-1),
        empty,
        bitmask,
    )


def _apply(input, thread_masks):
    rows, cols = input.shape
    forward, transposed = _ops.pack_masked(input, _layouts.bitmask_from_torch(thread_masks), True)
    return _ops.canonical(forward, rows, cols)[0], _ops.canonical(transposed, cols, rows)[0]


def _apply_dense(input, thread_masks):
    mask = _layouts.mask_of(_layouts.bitmask_from_torch(thread_masks), *input.shape)
    return input * mask


def _checked_mm(mat1, mat1_meta, mat2, out_dtype):
    packed = _of_cutlass(mat1, mat1_meta)
    if mat2.dtype != mat1.dtype:
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, and have {mat1.dtype} and {mat2.dtype}")
    if mat2.dim() != 2 or mat2.shape[0] != packed.cols:
        raise RuntimeError(f"shapes cannot be multiplied: {(packed.rows, packed.cols)} and {tuple(mat2.shape)}")
    y = _product(packed, mat2.t()).t().contiguous()
    return y if out_dtype is None else y.to(out_dtype)


def _product(packed: Packed, x: torch.Tensor) -> torch.Tensor:
    """``x @ W.T``; of integers in int32, as torch's CUTLASS kernels."""
    if packed.dtype == torch.int8:
        return _ops.linear_i8(x, packed.forward, packed.rows)
    return packed.times_transpose(x)


def _mm(mat1, mat1_meta, mat2, *, out_dtype=None):
    return _checked_mm(mat1, mat1_meta, mat2, out_dtype)


def _addmm(input, mat1, mat1_meta, mat2, *, alpha=1, beta=1, out_dtype=None):
    # A vector is added to the rows of the result.
    bias = input[:, None] if input.dim() == 1 else input
    return alpha * _checked_mm(mat1, mat1_meta, mat2, out_dtype) + beta * bias


def _linear(input, weight, meta, *, bias=None, activation=None, out_dtype=None):
    if activation not in (None, "none", "relu", "silu"):
        raise RuntimeError(f'Unknown activation "{activation}"; known are "relu" and "silu"')
    y = _product(_of_cutlass(weight, meta), input)
    y = y if bias is None else y + bias
    y = _ACTIVATIONS[_ops.ACTIVATIONS[None if activation == "none" else activation]](y)
    return y if out_dtype is None else y.to(out_dtype)


# cuSPARSELt's layout is opaque. Here it is the canonical form in one tensor of the values' type: values, then metadata.


def _blob(packed: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    values, meta = _ops.canonical(packed, rows, cols)
    if cols % 32:
        raise RuntimeError(f"the compressed form in one tensor requires columns to be a multiple of 32, not {cols}")
    return torch.cat((values, meta.view(values.dtype)), 1)


def _of_blob(compressed: torch.Tensor, cols: int) -> Packed:
    rows = compressed.shape[0]

    def make():
        values, meta = compressed[:, : cols // 2].contiguous(), compressed[:, cols // 2 :].contiguous()
        return Packed(rows, cols, _ops.from_canonical(values, meta.view(torch.int32), cols))

    return _converted(compressed, make)


def _cslt_compress(input):
    tensor = SparseSemiStructuredTensor.from_dense(input.detach())
    return _blob(tensor.packed_weight.forward, *input.shape)


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
    y = _product(_of_blob(compressed_A, dense_B.shape[0]), dense_B.t())
    if out_dtype is None:
        out_dtype = compressed_A.dtype
    if not y.is_floating_point() and alpha is not None:
        y = y.float()
    if alpha is not None:
        y = y * alpha.to(y.dtype) if alpha.numel() == 1 else y * alpha.to(y.dtype)[None, :]
    if bias is not None:
        y = y + bias
    if out_dtype == torch.int8:
        # Saturated, as quantized results are.
        y = y.round().clamp(-128, 127) if y.is_floating_point() else y.clamp(-128, 127)
    y = y.to(out_dtype)
    return y if transpose_result else y.t().contiguous()


def _cslt_sparse_mm_search(compressed_A, dense_B, bias=None, alpha=None, out_dtype=None, transpose_result=False):
    return 0


_CUTLASS = {
    "_sparse_semi_structured_tile": _tile,
    "_sparse_semi_structured_apply": _apply,
    "_sparse_semi_structured_apply_dense": _apply_dense,
    "_sparse_semi_structured_mm": _mm,
    "_sparse_semi_structured_addmm": _addmm,
    "_sparse_semi_structured_linear": _linear,
}

_OPERATORS = {
    **_CUTLASS,
    "_cslt_compress": _cslt_compress,
    "_cslt_sparse_mm": _cslt_sparse_mm,
    "_cslt_sparse_mm_search": _cslt_sparse_mm_search,
}


def _register(key: str, only: dict | None = None) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL", key)
    with warnings.catch_warnings():
        # torch warns of a kernel that is replaced, which is what this is for.
        warnings.simplefilter("ignore")
        for name, kernel in (_OPERATORS if only is None else only).items():
            library.impl(name, kernel)
    return library
