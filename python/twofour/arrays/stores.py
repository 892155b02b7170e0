"""Sparse weights of any pattern: coordinates, compressed rows and columns, and blocks; to and from torch and scipy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from .. import _native
from .bytes import Bytes, bytes_of, empty, is_tensor, returned, writable_bytes

FORMS = ("coo", "csr", "csc", "bsr")


@dataclasses.dataclass(frozen=True, eq=False)
class Store:
    """A sparse matrix in the host's memory, whose parts are checked when it is made.

    Attributes:
        form: ``"coo"``, coordinates in order of row, then of column; ``"csr"`` and ``"csc"``, compressed sparse rows
            and columns; ``"bsr"``, block sparse rows.
        shape: rows and columns.
        starts: int64: where each row, column or row of blocks begins, and where the last one ends; of coordinates the
            row of each element.
        indices: int64: the column of each element, of ``"csc"`` the row, of ``"bsr"`` the column of each block.
        values: the elements, or the blocks ``[blocks, height, width]``: an array, or a tensor where the matrix was one.
        block: rows and columns of a block; ``None`` of other forms.
        dtype: the dtype of the values by its name, also where an array of integers holds its bits.

    Raises:
        ValueError: for parts that fit no matrix, with the part, its place and what it must be.
        TypeError: for a dtype that twofour does not support.
    """

    form: str
    shape: tuple[int, int]
    starts: np.ndarray
    indices: np.ndarray
    values: Any
    block: tuple[int, int] | None = None
    dtype: str | None = None

    def __post_init__(self):
        source = bytes_of(self.values, None if is_tensor(self.values) else self.dtype)
        if (self.block is None) != (self.form != "bsr"):
            raise ValueError("block is the rows and columns of a block of the form bsr, and of no other")
        for part in ("starts", "indices"):
            given = getattr(self, part)
            array = np.ascontiguousarray(given.cpu() if is_tensor(given) else given)
            if array.ndim != 1 or array.dtype.kind not in "iu" and array.size:
                raise ValueError(f"{part} must be a list of whole numbers, not {array.dtype} of shape {array.shape}")
            object.__setattr__(self, part, array.astype(np.int64, copy=False))
        object.__setattr__(self, "dtype", source.dtype)
        object.__setattr__(self, "shape", tuple(map(int, self.shape)))
        starts, indices, values = self._convert(source, self.form, self.block)
        object.__setattr__(self, "starts", starts)
        object.__setattr__(self, "indices", indices)
        object.__setattr__(self, "values", _elements(values, self.form, self.block, source))

    @property
    def stored(self) -> int:
        """Elements, or blocks, that are stored."""
        return len(self.indices)

    @classmethod
    def from_dense(
        cls, matrix: Any, form: str = "csr", block: tuple[int, int] | None = None, *, dtype: str | None = None
    ) -> Store:
        """The nonzeros of a matrix, or its blocks with a nonzero. A zero of either sign is not stored, but in a block.

        Args:
            matrix: a numpy array or a torch tensor ``[rows, cols]`` of float32, float16, bfloat16, int8, float8_e4m3fn
                or float8_e5m2.
            form: ``"coo"``, ``"csr"``, ``"csc"`` or ``"bsr"``.
            block: rows and columns of a block of ``"bsr"``; 64 and 64 if absent.
            dtype: what an array of unsigned integers holds, ``"bfloat16"`` for instance.
        """
        source = bytes_of(matrix, dtype)
        rows, cols = source.matrix()
        block = _block(form, block)
        starts, indices, values = _native.store_of_dense(
            source.data, source.dtype, rows, cols, form, block or (1, 1)
        )
        return cls(form, (rows, cols), starts, indices, _elements(values, form, block, source), block, source.dtype)

    def to_dense(self):
        """The dense matrix, an array or tensor as the values are."""
        out = empty(self.shape, self.dtype, True) if is_tensor(self.values) else np.empty(self.shape, self.values.dtype)
        source = self._source()
        _native.store_to_dense(*self._parts(source), writable_bytes(out))
        return returned(out, source)

    def to(self, form: str, block: tuple[int, int] | None = None) -> Store:
        """The same matrix in another form. Zeros that are stored stay stored, but those of blocks."""
        block, source = _block(form, block), self._source()
        starts, indices, values = self._convert(source, form, block)
        return Store(form, self.shape, starts, indices, _elements(values, form, block, source), block, self.dtype)

    def linear(self, x: Any, bias: Any = None):
        """``x @ W.T + bias`` on the CPU, for ``x`` of shape ``[..., cols]`` and of the dtype of the values: float32,
        float16 or bfloat16. Products accumulate in float32. No gradient passes through.

        Raises:
            ValueError: for another shape.
            TypeError: for another dtype.
        """
        source = bytes_of(x, None if is_tensor(x) or self.dtype == np.asarray(x).dtype.name else self.dtype)
        rows, cols = self.shape
        if source.dtype != self.dtype:
            raise TypeError(f"x is of {source.dtype}, the weight of {self.dtype}: convert one of them")
        if not source.shape or source.shape[-1] != cols:
            raise ValueError(f"x has the shape {list(source.shape)}; its last dimension must be {cols}")
        shape = (*source.shape[:-1], rows)
        out = empty(shape, self.dtype, True) if is_tensor(x) else np.empty(shape, source.like.dtype)
        tokens = int(np.prod(shape[:-1], dtype=np.int64))
        if bias is not None:
            bias = bias.detach().float().cpu().numpy() if is_tensor(bias) else np.asarray(bias, np.float32)
            bias = np.ascontiguousarray(bias)
        _native.store_linear(*self._parts(self._source()), source.data, tokens, bias, writable_bytes(out))
        return returned(out, source)

    @classmethod
    def from_torch(cls, tensor: Any) -> Store:
        """A matrix of torch's layouts ``sparse_coo``, ``sparse_csr``, ``sparse_csc`` and ``sparse_bsr``. Coordinates
        that are there more than once are summed, as torch does.

        Raises:
            TypeError: for another layout.
            ValueError: for another number of dimensions than two, and for elements that are tensors themselves.
        """
        import torch

        if tensor.layout == torch.strided:
            raise TypeError("a strided tensor is dense: use Store.from_dense")
        if tensor.dim() != 2 or tensor.dense_dim():
            raise ValueError(f"a sparse matrix is required, not {tensor.dim()} dimensions, {tensor.dense_dim()} dense")
        shape, tensor = tuple(tensor.shape), tensor.detach()
        match tensor.layout:
            case torch.sparse_coo:
                tensor = tensor.coalesce()
                return cls("coo", shape, *tensor.indices().cpu().numpy(), tensor.values())
            case torch.sparse_csr:
                return cls("csr", shape, tensor.crow_indices(), tensor.col_indices(), tensor.values())
            case torch.sparse_csc:
                return cls("csc", shape, tensor.ccol_indices(), tensor.row_indices(), tensor.values())
            case torch.sparse_bsr:
                values = tensor.values()
                return cls("bsr", shape, tensor.crow_indices(), tensor.col_indices(), values, tuple(values.shape[1:]))
        raise TypeError(f"a tensor of layout {tensor.layout} is not a sparse matrix of torch; use Store.from_dense")

    def to_torch(self):
        """torch's tensor of this form, on the device of the values.

        Raises:
            ValueError: for blocks that do not fill the matrix, which torch does not have.
        """
        import torch

        values = self.values
        if not is_tensor(values):
            dtype, data = getattr(torch, self.dtype), bytearray(values.tobytes())
            values = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            values = values.reshape(self.values.shape)
        starts, indices = (torch.from_numpy(part.copy()).to(values.device) for part in (self.starts, self.indices))
        match self.form:
            case "coo":
                places = torch.stack((starts, indices))
                return torch.sparse_coo_tensor(places, values, self.shape, is_coalesced=True, check_invariants=True)
            case "csr":
                return torch.sparse_csr_tensor(starts, indices, values, self.shape, check_invariants=True)
            case "csc":
                return torch.sparse_csc_tensor(starts, indices, values, self.shape, check_invariants=True)
        if any(size % side for size, side in zip(self.shape, self.block)):
            raise ValueError(f"torch's blocks {list(self.block)} must fill the matrix, of shape {list(self.shape)}")
        return torch.sparse_bsr_tensor(starts, indices, values, self.shape, check_invariants=True)

    @classmethod
    def from_scipy(cls, matrix: Any) -> Store:
        """A matrix or array of ``scipy.sparse`` in the formats coo, csr, csc and bsr. What is there more than once is
        summed, as scipy does.

        Raises:
            TypeError: for another format.
        """
        form = getattr(matrix, "format", None)
        if form not in FORMS:
            raise TypeError(f"a scipy.sparse matrix of the formats {', '.join(FORMS)} is required, not of {form}")
        matrix = matrix.copy()
        matrix.sum_duplicates()
        if form == "coo":
            order = np.lexsort((matrix.col, matrix.row))
            return cls("coo", matrix.shape, matrix.row[order], matrix.col[order], matrix.data[order])
        matrix.sort_indices()
        block = tuple(map(int, matrix.blocksize)) if form == "bsr" else None
        return cls(form, matrix.shape, matrix.indptr, matrix.indices, matrix.data, block)

    def to_scipy(self):
        """scipy's array of this form. Values of types that numpy lacks, such as bfloat16, become float32.

        Raises:
            ValueError: for blocks that do not fill the matrix, which scipy does not have.
        """
        import scipy.sparse

        values = self.values
        if is_tensor(values) or values.dtype.name != self.dtype:
            values = _wide(values, self.dtype)
        if self.form == "coo":
            return scipy.sparse.coo_array((values, (self.starts, self.indices)), shape=self.shape)
        parts = (values, self.indices, self.starts)
        if self.form != "bsr":
            make = scipy.sparse.csr_array if self.form == "csr" else scipy.sparse.csc_array
            return make(parts, shape=self.shape)
        if any(size % side for size, side in zip(self.shape, self.block)):
            raise ValueError(f"scipy's blocks {list(self.block)} must fill the matrix, of shape {list(self.shape)}")
        return scipy.sparse.bsr_array(parts, shape=self.shape, blocksize=self.block)

    def _source(self) -> Bytes:
        return bytes_of(self.values, None if is_tensor(self.values) else self.dtype)

    def _parts(self, source: Bytes):
        matrix = (self.form, self.block or (1, 1), self.shape, source.dtype)
        return matrix, (self.starts, self.indices, source.data)

    def _convert(self, source: Bytes, form: str, block: tuple[int, int] | None):
        return _native.store_converted(*self._parts(source), form, block or (1, 1))


def _block(form: str, block: tuple[int, int] | None) -> tuple[int, int] | None:
    if form == "bsr":
        return (64, 64) if block is None else (int(block[0]), int(block[1]))
    if block is not None:
        raise ValueError(f"block is for the form bsr, not for {form}")
    return None


def _elements(data: np.ndarray, form: str, block: tuple[int, int] | None, source: Bytes):
    """Values of the kind, dtype and device of a source, from their bytes."""
    if is_tensor(source.like):
        import torch

        dtype = source.like.dtype
        values = torch.from_numpy(data).view(dtype) if data.size else torch.empty(0, dtype=dtype)
    else:
        values = data.view(source.like.dtype)
    return returned(values.reshape(-1, *block) if form == "bsr" else values, source)


def _wide(values: Any, dtype: str) -> np.ndarray:
    """Values as a type that numpy has."""
    import torch

    if not is_tensor(values):
        values = torch.from_numpy(values.copy()).view(getattr(torch, dtype))
    values = values.detach().cpu()
    narrow = values.dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    return (values.float() if narrow else values).numpy()
