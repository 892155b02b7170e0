"""A packed 2:4 matrix: what every layer and tensor of the package multiplies with."""

from __future__ import annotations

import torch

from .. import operators
from ..canonical import parts_shapes


class Packed:
    """A 2:4 matrix ``W`` of shape ``[rows, cols]``, packed along its rows, along its columns, or both. It is not
    changed.

    Attributes:
        rows: rows of ``W``.
        cols: columns of ``W``.
        forward: ``W`` packed along its rows, or ``None``.
        transposed: the transpose, packed along the columns of ``W``, or ``None``.
        dtype: the type of the values.
        direct: ``forward`` where the operators of floats take it as it is, else ``None``.
    """

    __slots__ = ("rows", "cols", "forward", "transposed", "dtype", "direct")

    def __init__(self, rows: int, cols: int, forward: torch.Tensor | None, transposed: torch.Tensor | None = None):
        self.rows = rows
        self.cols = cols
        self.forward = forward
        self.transposed = transposed
        self.dtype = (transposed if forward is None else forward).dtype
        self.direct = None if self.dtype.itemsize == 1 else forward

    def t(self) -> Packed:
        """The transpose, which shares the memory."""
        return Packed(self.cols, self.rows, self.transposed, self.forward)

    def times_transpose(self, x: torch.Tensor, bias: torch.Tensor | None = None, activation: int = 0) -> torch.Tensor:
        """``activation(x @ W.T + bias)`` for ``x`` of shape ``[..., cols]``."""
        if self.dtype is torch.int8:
            return self._of_integers(x, bias)
        if self.dtype in operators.FLOAT8:
            raise NotImplementedError(
                f"`SparseSemiStructuredTensor` matmul: a GEMM with a 2:4 matrix of {self.dtype} requires scales; "
                f"please use `torch._scaled_mm` "
                "instead"
            )
        if self.forward is not None:
            if bias is None:
                if activation == 0:
                    return operators.linear(x, self.forward, self.rows)
                bias = x.new_zeros(self.rows)
            return operators.linear_bias(x, self.forward, bias, self.rows, activation)
        y = operators.input_gradient(x, self.transposed, self.rows)
        if bias is not None:
            y = y + bias
        return _ACTIVATIONS[activation](y)

    def _of_integers(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ W.T + bias`` of integers: exact sums, whose low eight bits are the result, as in torch's dense GEMMs of
        int8."""
        self.check_integers()
        y = operators.linear_i8(x, self.forward, self.rows)
        return (y if bias is None else y + bias).to(torch.int8)

    def check_integers(self) -> None:
        """Refuses an int8 matrix that has no GEMM along its rows.

        Raises:
            NotImplementedError: where it is packed along its columns alone.
        """
        if self.forward is None:
            raise NotImplementedError(
                "`SparseSemiStructuredTensor` matmul: operation is not supported: an int8 matrix that is packed along "
                "its columns alone has no GEMM "
                "along its rows; pack it again"
            )

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W`` for ``x`` of shape ``[..., rows]``."""
        return self.t().times_transpose(x)

    def to_dense(self) -> torch.Tensor:
        """``W`` with zeros where nothing is kept."""
        if self.forward is not None:
            return operators.unpack(self.forward, self.rows, self.cols)
        return operators.unpack(self.transposed, self.cols, self.rows).t().contiguous()

    def tensors(self) -> list[torch.Tensor]:
        """The packed tensors that there are."""
        return [tensor for tensor in (self.forward, self.transposed) if tensor is not None]

    def is_same(self, other: Packed) -> bool:
        """Whether another matrix is packed the same ways into the same bytes, on the same device."""
        if (self.rows, self.cols, self.dtype) != (other.rows, other.cols, other.dtype):
            return False
        pairs = ((self.forward, other.forward), (self.transposed, other.transposed))
        return all(a is b or (a is not None and b is not None and same_bytes(a, b)) for a, b in pairs)

    def map(self, function) -> Packed:
        """The same matrix with each packed tensor replaced by ``function(tensor)``, which must keep its bytes."""
        forward, transposed = (None if t is None else function(t) for t in (self.forward, self.transposed))
        return Packed(self.rows, self.cols, forward, transposed)

    def with_tensors(self, tensors) -> Packed:
        """The same matrix with the tensors of :meth:`tensors` replaced."""
        tensors = iter(tensors)
        return self.map(lambda _: next(tensors))

    def to(self, *, device=None, dtype=None) -> Packed:
        """The same matrix on another device or in another type. It is packed anew, since the layout depends on both."""

        def move(packed: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
            values, meta = operators.canonical(packed, rows, cols)
            return operators.from_canonical(values.to(device=device, dtype=dtype), meta.to(device=device), cols)

        forward = None if self.forward is None else move(self.forward, self.rows, self.cols)
        transposed = None if self.transposed is None else move(self.transposed, self.cols, self.rows)
        return Packed(self.rows, self.cols, forward, transposed)


_ACTIVATIONS = (
    lambda y: y,
    torch.nn.functional.relu,
    torch.nn.functional.silu,
    torch.nn.functional.gelu,
)


def packed_zeros(rows: int, cols: int, dtype: torch.dtype, device) -> torch.Tensor:
    """A packed matrix of zeros."""
    values, meta = parts_shapes(rows, cols)
    return operators.from_canonical(
        torch.zeros(values, dtype=dtype, device=device), metadata_of_zeros(meta, -(-cols // 4), device), cols
    )


def metadata_of_zeros(shape: tuple[int, int], groups: int, device) -> torch.Tensor:
    """The metadata of a weight of zeros: every group keeps its first two elements."""
    meta = torch.full(shape, 0x44444444, device=device, dtype=torch.int32)
    if groups % 8 and shape[1]:
        meta[:, -1] &= (1 << 4 * (groups % 8)) - 1
    return meta


def pack_by_rule(
    dense: torch.Tensor, rule: str, scale: float = 1.0, transpose: bool = True, check: bool = True
) -> tuple[Packed, torch.Tensor]:
    """Chooses a mask and packs what it keeps, along rows and, with ``transpose``, along columns.

    Returns:
        the packed matrix, and its mask in tiles (:func:`twofour.operators.masks.tiles_of`).

    Raises:
        ValueError: for a NaN, with its place. On a GPU finding it waits for the device, so there ``check=False`` leaves
            it out.
    """
    rows, cols = _shape(dense)
    forward, transposed, mask = operators.pack(dense, operators.rule_number(rule), scale, transpose, check)
    return Packed(rows, cols, forward, transposed if transpose else None), mask


def pack_by_mask(dense: torch.Tensor, tiles: torch.Tensor, transpose: bool) -> Packed:
    """Packs what a mask in tiles keeps.

    Raises:
        ValueError: on a CPU, where the mask is not 2:4 along rows, or not along columns where the transpose is packed.
    """
    rows, cols = _shape(dense)
    forward, transposed = operators.pack_masked(dense, tiles, transpose)
    return Packed(rows, cols, forward, transposed if transpose else None)


def pack_quantized(dense: torch.Tensor) -> tuple[Packed, torch.Tensor]:
    """Quantizes a 2:4 matrix to 8-bit integers, symmetrically and with a scale for each row, and packs it.

    Returns:
        the packed integers, and the scales ``[rows]`` in float32.

    Raises:
        ValueError: where the matrix is not 2:4, or not finite.
    """
    host = dense.detach().float().cpu()
    # A value that is rounded to zero would hide a third nonzero of its group.
    pack_sparse(host)
    values, scales = operators.quantize_rows(host)
    return pack_sparse(values).to(device=dense.device), scales.to(dense.device)


def pack_sparse(dense: torch.Tensor) -> Packed:
    """Packs a matrix that is 2:4 along its rows.

    Raises:
        ValueError: where it is not; the message names the first row and column.
    """
    rows, cols = _shape(dense)
    if dense.device.type == "cpu":
        return Packed(rows, cols, operators.pack_sparse(dense))
    if dense.dtype is torch.int8:
        # Packed in the host's memory.
        return pack_sparse(dense.cpu()).to(device=dense.device)
    # The two largest magnitudes of each group are all that a 2:4 matrix has.
    if dense.dtype in operators.FLOAT8:
        number, dense = operators.FLOAT8[dense.dtype], dense.half()
        weight = Packed(
            rows, cols, operators.pack(dense, operators.rule_number("magnitude"), 1.0, False, True, number)[0]
        )
        lost = weight.to_dense().half() != dense
    else:
        weight, _ = pack_by_rule(dense, "magnitude", transpose=False)
        lost = weight.to_dense() != dense
    if lost.any():
        row, col = lost.nonzero()[0].tolist()
        nonzeros = int((dense[row, col // 4 * 4 : col // 4 * 4 + 4] != 0).sum())
        raise ValueError(
            f"row {row}, group {col // 4}: {nonzeros} non-zeros where 2:4 allows 2; prune the tensor first"
        )
    return weight


def _shape(dense: torch.Tensor) -> tuple[int, int]:
    if dense.dim() != 2:
        raise RuntimeError(
            f"Error original_tensor.dim = {dense.dim()} is not supported! Only 2d tensors are currently supported."
        )
    return dense.shape[0], dense.shape[1]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one type, shape and device, and the same bytes."""
    if (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    if not a.is_contiguous() or not b.is_contiguous():
        a, b = a.contiguous(), b.contiguous()
    holder = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(holder), b.view(holder))
