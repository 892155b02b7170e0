"""Weights in square blocks, most of which are zero.

The format is torch's BSR (block compressed sparse rows): of a matrix in blocks of ``blocksize`` by ``blocksize`` those
with a nonzero are stored.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import operators
from ..operators.derivatives import applied, derivable, is_differentiated, save
from ..operators.errors import wrong_features
from . import memory


class BlockSparseTensor(torch.Tensor):
    """A matrix ``[rows, cols]`` of which the blocks with a nonzero are stored. ``F.linear`` with it computes those
    alone; it is for inference, and has no gradient of its own.

    It is made by :meth:`from_dense`, or by :func:`twofour.sparsity.sparsify_`. Our kernels multiply the stored blocks
    where they lie: on a CPU any, on a GPU those of bfloat16 and float16 with 16, 32 or a multiple of 64 rows, of a
    matrix whose columns are a multiple of 8. Other products, and those in float64, make a dense matrix first: that
    saves memory alone.

    Attributes:
        bsr_crow_indices: ``[block rows + 1]`` of int64: where each row of blocks begins.
        bsr_col_indices: ``[blocks]`` of int64: the column of each block, ascending within a row of blocks.
        bsr_values: ``[blocks, blocksize, blocksize]``.
        blocksize: rows and columns of a block; zeros complete the last ones.
    """

    bsr_crow_indices: torch.Tensor
    bsr_col_indices: torch.Tensor
    bsr_values: torch.Tensor
    blocksize: int

    @staticmethod
    def __new__(cls, shape, blocksize, bsr_crow_indices, bsr_col_indices, bsr_values, requires_grad=False):
        """From the parts of torch's BSR format.

        Raises:
            ValueError: where the parts have other shapes than a matrix of that shape needs.
        """
        if requires_grad:
            raise ValueError("a block-sparse matrix has no gradient of its own: it is for inference")
        blocks, crow = bsr_col_indices.numel(), (-(-shape[0] // blocksize) + 1,)
        if tuple(bsr_crow_indices.shape) != crow or tuple(bsr_values.shape) != (blocks, blocksize, blocksize):
            raise ValueError(
                f"a matrix of shape {tuple(shape)} in {blocks} blocks of {blocksize} needs crow_indices {crow} and "
                f"values "
                f"{(blocks, blocksize, blocksize)}, not {tuple(bsr_crow_indices.shape)} and {tuple(bsr_values.shape)}"
            )
        # torch's BSR may have indices of 32 bits.
        bsr_crow_indices, bsr_col_indices = bsr_crow_indices.to(torch.int64), bsr_col_indices.to(torch.int64)
        self = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), device=bsr_values.device, dtype=bsr_values.dtype)
        self.bsr_crow_indices, self.bsr_col_indices, self.bsr_values = bsr_crow_indices, bsr_col_indices, bsr_values
        self.blocksize = blocksize
        # Attributes of a tensor subclass that torch has, too, go through __torch_function__, which takes longer than
        # reading these.
        self._size = (shape[0], shape[1])
        return self

    def __init__(self, *args, **kwargs):
        super().__init__()

    @classmethod
    def from_dense(cls, dense: torch.Tensor, blocksize: int = 64) -> BlockSparseTensor:
        """Stores the blocks of a matrix that have a nonzero.

        Args:
            dense: ``[rows, cols]`` of floats, of any shape.
            blocksize: rows and columns of a block.

        Raises:
            ValueError: for a ``blocksize`` below 1.
            RuntimeError: for another rank, or another dtype than float32, bfloat16, float16 and float64.
        """
        if blocksize < 1:
            raise ValueError(f"blocksize is {blocksize}; it must be at least 1")
        if dense.dim() != 2 or not dense.is_floating_point() or dense.dtype.itemsize < 2:
            raise RuntimeError(
                f"a block-sparse matrix is made of a 2-D tensor of floats, not of {dense.dim()}-D {dense.dtype}"
            )
        rows, cols = dense.shape
        tall, wide = -(-rows // blocksize), -(-cols // blocksize)
        padded = F.pad(dense.detach(), (0, wide * blocksize - cols, 0, tall * blocksize - rows))
        blocks = padded.reshape(tall, blocksize, wide, blocksize).permute(0, 2, 1, 3)
        kept = (blocks != 0).any(-1).any(-1)
        crow = F.pad(kept.sum(1).cumsum(0), (1, 0))
        return cls((rows, cols), blocksize, crow, kept.nonzero()[:, 1].contiguous(), blocks[kept].contiguous())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={tuple(self.shape)}, blocksize={self.blocksize}, blocks={self._nnz()})"

    def crow_indices(self) -> torch.Tensor:
        """Where each row of blocks begins."""
        return self.bsr_crow_indices

    def col_indices(self) -> torch.Tensor:
        """The column of each block."""
        return self.bsr_col_indices

    def values(self) -> torch.Tensor:
        """The blocks."""
        return self.bsr_values

    def _nnz(self) -> int:
        return self.bsr_col_indices.numel()

    def to_dense(self) -> torch.Tensor:
        """The matrix with zeros where no block is stored."""
        return _dense(self.bsr_crow_indices, self.bsr_col_indices, self.bsr_values, *self.shape)

    # What torch.compile takes apart and puts together.

    def __tensor_flatten__(self):
        return list(_PARTS), self.blocksize

    @classmethod
    def __tensor_unflatten__(cls, inner, blocksize, outer_size, outer_stride):
        return cls(outer_size, blocksize, *(inner[part] for part in _PARTS))

    def _map(self, function) -> BlockSparseTensor:
        return type(self)(self.shape, self.blocksize, *(function(getattr(self, part)) for part in _PARTS))

    # Copying and saving.

    def __deepcopy__(self, memo):
        copy = self._map(torch.Tensor.clone)
        copy._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol):
        is_parameter = getattr(self, "_is_param", False)
        return _rebuild, (tuple(self.shape), self.blocksize, *(getattr(self, part) for part in _PARTS), is_parameter)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            if not all(issubclass(kind, torch.Tensor) for kind in types):
                # A symbol of torch.fx, which records the call.
                return NotImplemented
            return handler(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        handler = _DISPATCH.get(func._overloadpacket)
        if handler is None:
            raise NotImplementedError(
                f"{cls.__name__} is multiplied by F.linear and nn.Linear; it has no {func.__name__}; {memory.advice()}"
            )
        return handler(*args, **(kwargs or {}))


_PARTS = ("bsr_crow_indices", "bsr_col_indices", "bsr_values")


def _rebuild(shape, blocksize, crow, col, values, is_parameter=False):
    """A tensor from its saved form."""
    tensor = BlockSparseTensor(shape, blocksize, crow, col, values)
    if is_parameter:
        tensor._is_param = True
    return tensor


def _copied(tensor, *, dtype=None, device=None, non_blocking=False, **_):
    def move(part):
        return part.to(
            device=device, dtype=dtype if part.is_floating_point() else None, non_blocking=non_blocking, copy=True
        )

    return tensor._map(move)


def _copy_(tensor, source, non_blocking=False):
    """Overwrites a block-sparse matrix with another one, or with a dense one; or a dense one with a block-sparse
    one."""
    if not isinstance(tensor, BlockSparseTensor):
        return tensor.copy_(source.to_dense(), non_blocking)
    if tensor.shape != source.shape:
        raise RuntimeError(f"copy_: the shapes differ: {tuple(tensor.shape)} and {tuple(source.shape)}")
    kind = {"dtype": tensor.bsr_values.dtype, "device": tensor.bsr_values.device}
    dense = isinstance(source, BlockSparseTensor) and source.blocksize != tensor.blocksize
    source = source.to_dense() if dense else source
    new = (
        _copied(source, **kind)
        if isinstance(source, BlockSparseTensor)
        else BlockSparseTensor.from_dense(source.to(**kind), tensor.blocksize)
    )
    memory.replace_parts(tensor, new)
    return tensor


def _empty_like(tensor, *, dtype=None, device=None, **_):
    """A matrix without blocks."""
    crow, col, values = (getattr(tensor, part) for part in _PARTS)
    parts = (
        torch.zeros_like(crow, device=device),
        col.new_empty(0, device=device),
        values.new_empty(0, *values.shape[1:], dtype=dtype, device=device),
    )
    return type(tensor)(tensor.shape, tensor.blocksize, *parts)


_DISPATCH = {
    torch.ops.aten.copy_: _copy_,
    torch.ops.aten.empty_like: _empty_like,
    torch.ops.aten.detach: lambda tensor: tensor._map(torch.Tensor.detach),
    torch.ops.aten.alias: lambda tensor: tensor._map(torch.Tensor.detach),
    torch.ops.aten.clone: lambda tensor, **_: tensor._map(torch.Tensor.clone),
    torch.ops.aten._to_copy: _copied,
}


def _set_data(self, value):
    """``self.data = value``, for a block-sparse value, or a dense one, which is stored in blocks of the same size."""
    new = value if isinstance(value, BlockSparseTensor) else BlockSparseTensor.from_dense(value, self.blocksize)
    memory.replace_contents(self, new)


# GEMMs.


def _linear(input: torch.Tensor, weight: BlockSparseTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if not isinstance(weight, BlockSparseTensor) or isinstance(input, BlockSparseTensor):
        raise NotImplementedError("F.linear takes a block-sparse weight, not a block-sparse input")
    (rows, cols), values = weight._size, weight.bsr_values
    device = input.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            y = _linear(input.to(values.dtype), weight, None if bias is None else bias.to(values.dtype))
        return y.to(torch.get_autocast_dtype(device))
    if input.dtype != values.dtype:
        raise NotImplementedError(
            f"the input has dtype {input.dtype}, the block-sparse weight {values.dtype}: convert one of them"
        )
    if not input.shape or input.shape[-1] != cols:
        raise wrong_features(input, rows, cols)
    if input.device != values.device:
        raise RuntimeError(
            f"the input is on {input.device}, the block-sparse weight on {values.device}: move one to the other's "
            f"device"
        )
    y = _differentiable(input, weight.bsr_crow_indices, weight.bsr_col_indices, values, rows)
    return y if bias is None else y + bias


_FUNCTIONS = {F.linear: _linear} | memory.functions(BlockSparseTensor, _set_data)


def _differentiable(x, crow, col, values, rows):
    if is_differentiated(x):
        return applied(_BlockSparseLinear, x, crow, col, values, rows)
    return _forward(x, crow, col, values, rows)


@derivable
class _BlockSparseLinear(torch.autograd.Function):
    """``x @ W.T`` with derivatives of ``x``, which are products of the same kind."""

    @staticmethod
    def forward(x, crow, col, values, rows):
        return _forward(x, crow, col, values, rows)

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, *parts, ctx.rows = inputs
        ctx.cols = x.shape[-1]
        save(ctx, *parts)

    @staticmethod
    def backward(ctx, dy):
        if is_differentiated(dy):
            dx = _differentiable(dy, *_transposed(*ctx.saved_tensors, ctx.cols), ctx.cols)
        else:
            dx = _call(_gradient, "input_gradient", dy, *ctx.saved_tensors, ctx.cols)
        return dx, None, None, None, None

    @staticmethod
    def vmap(info, in_dims, x, crow, col, values, rows):
        if any(dim is not None for dim in in_dims[1:]):
            raise NotImplementedError(
                "torch.vmap over block-sparse weights: their numbers of blocks may differ; call F.linear with one at a "
                "time"
            )
        return _differentiable(x.movedim(in_dims[0], 0), crow, col, values, rows), 0

    @staticmethod
    def tangent(ctx, x_tangent, *_):
        return _differentiable(x_tangent, *ctx.saved_tensors, ctx.rows)


def _forward(x, crow, col, values, rows):
    return _call(_times_transpose, "linear", x, crow, col, values, rows)


def _call(function, operator, *args):
    # For torch.compile a product is one operator: how blocks are walked depends on their number.
    if torch.compiler.is_compiling():
        return getattr(torch.ops.twofour_blocks, operator)(*args)
    return function(*args)


def _rows_of(crow: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """The rows of blocks by their numbers. Nothing here waits for a GPU."""
    return torch.searchsorted(crow, blocks, right=True) - 1


def _dense(crow, col, values, rows: int, cols: int) -> torch.Tensor:
    """The matrix with zeros where no block is stored."""
    size = values.shape[-1]
    # On a GPU this would wait.
    if crow.device.type == "cpu" and int(crow[-1]) != col.numel():
        raise RuntimeError(f"crow_indices end with {int(crow[-1])}, and there are {col.numel()} blocks")
    tall, wide = crow.numel() - 1, -(-cols // size)
    dense = values.new_zeros(tall, wide, size, size)
    dense[_rows_of(crow, torch.arange(col.numel(), device=col.device)), col] = values
    return dense.permute(0, 2, 1, 3).reshape(tall * size, wide * size)[:rows, :cols].contiguous()


def _times_transpose(x, crow, col, values, rows: int) -> torch.Tensor:
    """``x @ W.T`` for ``x`` of shape ``[..., cols]``."""
    if _becomes_dense(values, x.shape[-1]):
        return x @ _dense(crow, col, values, rows, x.shape[-1]).t()
    return operators.block_sparse_linear(x, crow, col, values, rows)


def _gradient(dy, crow, col, values, cols: int) -> torch.Tensor:
    """``dy @ W`` for ``dy`` of shape ``[..., rows]``."""
    if _becomes_dense(values, dy.shape[-1]):
        return dy @ _dense(crow, col, values, dy.shape[-1], cols)
    return operators.block_sparse_linear(dy, *_transposed(crow, col, values, cols), cols)


#: What `is_supported` of crate twofour-cuda's `block_sparse` says: the types and the sides of blocks that the kernel
#: multiplies; larger blocks have a multiple of the last.
_GPU_TYPES, _GPU_SIDES = (torch.bfloat16, torch.float16), (16, 32, 64)


def _becomes_dense(values, features: int) -> bool:
    """Whether a product with tokens of so many features is one with a dense matrix."""
    if not values.is_cuda:
        return values.dtype == torch.float64
    side = values.shape[-1]
    has_side = side in _GPU_SIDES or side % _GPU_SIDES[-1] == 0
    return values.dtype not in _GPU_TYPES or not has_side or features % 8 != 0


def _transposed(crow, col, values, cols: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of the transpose, whose blocks are in the order of columns."""
    wide = -(-cols // values.shape[-1])
    columns, order = torch.sort(col, stable=True)
    start = torch.searchsorted(columns, torch.arange(wide + 1, device=col.device))
    return start, _rows_of(crow, order), values[order].transpose(1, 2).contiguous()


# A namespace of its own: in `twofour` are the native operators.
_LIBRARY = torch.library.Library("twofour_blocks", "FRAGMENT")
for _name, _function in (("linear", _times_transpose), ("input_gradient", _gradient)):
    _LIBRARY.define(f"{_name}(Tensor x, Tensor crow, Tensor col, Tensor values, SymInt features) -> Tensor")
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _key)

    @torch.library.register_fake(f"twofour_blocks::{_name}", lib=_LIBRARY)
    def _(x, crow, col, values, features):
        return x.new_empty((*x.shape[:-1], features))
