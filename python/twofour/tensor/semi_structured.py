"""The 2:4 tensor subclass, with the interface of ``torch.sparse.SparseSemiStructuredTensor``."""

from __future__ import annotations

import itertools
from multiprocessing.reduction import ForkingPickler

import torch
import torch.nn.functional as F
from torch import is_grad_enabled
from torch._C import _are_functorch_transforms_active as _is_transforming
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from .. import operators
from ..operators import masks
from ..operators.autograd import eager_packed_linear, linear_of_tensor, packed_linear
from ..operators.derivatives import applied, derivable, is_in_graph
from ..operators.errors import wrong_features
from ..operators.float8 import FLOAT8, saturated, scaled_product
from ..operators.packed import Packed, pack_by_mask, pack_by_rule, pack_sparse, packed_zeros
from . import cusparselt, memory, torch_layouts

_TORCH = torch.sparse.SparseSemiStructuredTensor
_PLAIN = torch._C._disabled_torch_function_impl
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_EAGER_LINEAR, _EAGER_LINEAR_BIAS = operators.eager_linear, operators.eager_linear_bias

#: torch's names of the algorithms that choose a transposable mask, and "optimal", which only twofour has.
ALGORITHMS = {
    "": "greedy-signed",
    "largest_values_greedy": "greedy-signed",
    "largest_abs_values_greedy": "greedy",
    "causal1122": "causal1122",
    "optimal": "optimal",
}


def rule_of_algorithm(algorithm: str) -> str:
    """The mask rule of an algorithm of torch's.

    Raises:
        RuntimeError: for an unknown one, as torch does.
    """
    try:
        return ALGORITHMS[algorithm]
    except KeyError:
        raise RuntimeError(
            f'Unknown algorithm "{algorithm}"; known are {", ".join(repr(a) for a in ALGORITHMS)}'
        ) from None


class SparseSemiStructuredTensor(_TORCH):
    """A 2:4 matrix. GEMMs with it are sparse, on CPUs and on GPUs.

    It is made by :func:`twofour.sparse.to_sparse_semi_structured`, :meth:`from_dense` or
    :meth:`prune_dense_static_sort`; the constructor takes torch's layouts. ``packed``, ``meta``, ``packed_t``,
    ``meta_t`` and ``compressed_swizzled_bitmask`` are computed in torch's layouts when they are read.
    """

    BACKEND = "twofour"
    _FORCE_CUTLASS = False
    _FUSE_TRANSPOSE = False
    _DEFAULT_ALG_ID = 0
    _PROTOTYPE_WARNING_SHOWN = True
    _CLASSES: dict[str, type] = {}
    #: The smallest shapes of torch's own kernels, by type: of those that have a tensor in torch's layouts. GEMMs take
    #: any shape.
    _DTYPE_SHAPE_CONSTRAINTS: dict[torch.dtype, tuple] = {}

    packed_weight: Packed
    tiles: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        shape,
        packed=None,
        meta=None,
        packed_t=None,
        meta_t=None,
        compressed_swizzled_bitmask=None,
        fuse_transpose_cusparselt=False,
        alg_id_cusparselt=0,
        requires_grad=False,
    ):
        """From the values and metadata of torch's CUTLASS layout, or from what ``torch._cslt_compress`` made, which has
        no metadata of its own.

        Raises:
            ValueError: where neither ``packed`` nor ``packed_t`` is given.
            RuntimeError: for tensors that do not have the shape.
        """
        if packed is None and packed_t is None:
            raise ValueError("At least one of packed or packed_t must be provided")
        rows, cols = shape

        def packed_of(values, meta, rows, cols):
            if values is None:
                return None
            if meta is None or not meta.numel():
                return cusparselt.of_cusparselt(values, rows, cols)
            return operators.from_canonical(values.contiguous(), torch_layouts.meta_from_torch(meta), cols)

        tiles = (
            None
            if compressed_swizzled_bitmask is None
            else torch_layouts.bitmask_from_torch(compressed_swizzled_bitmask)
        )
        weight = Packed(rows, cols, packed_of(packed, meta, rows, cols), packed_of(packed_t, meta_t, cols, rows))
        self = cls._of(weight, tiles, requires_grad)
        self.fuse_transpose_cusparselt = fuse_transpose_cusparselt
        self.alg_id_cusparselt = alg_id_cusparselt
        return self

    @classmethod
    def _of(cls, weight: Packed, tiles: torch.Tensor | None = None, requires_grad: bool = False):
        """The tensor of a packed matrix; ``tiles`` is its mask, where it was chosen by tiles."""
        some = weight.forward if weight.forward is not None else weight.transposed
        self = torch.Tensor._make_wrapper_subclass(
            cls, (weight.rows, weight.cols), device=some.device, dtype=some.dtype, requires_grad=requires_grad
        )
        self.packed_weight = weight
        # Parts under names of their own, since a compiled model reads them in every call.
        self._forward, self._transposed, self.tiles = weight.forward, weight.transposed, tiles
        self._parts = _INNER[weight.forward is not None, weight.transposed is not None, tiles is not None]
        self._size = (weight.rows, weight.cols)
        self.fuse_transpose_cusparselt = False
        self.alg_id_cusparselt = 0
        return self

    def __init__(self, *args, **kwargs):
        super().__init__()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(shape={self.shape})"

    # What torch.compile and torch's functional wrappers take apart and put together.

    def __tensor_flatten__(self):
        return self._parts, self._size

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        rows, cols = context
        return cls._of(Packed(rows, cols, inner.get("_forward"), inner.get("_transposed")), inner.get("tiles"))

    # Saving: the canonical form, which every version and device reads.

    def __reduce_ex__(self, protocol):
        weight = self.packed_weight
        parts = [
            None if packed is None else operators.canonical(packed, rows, cols)
            for packed, rows, cols in (
                (weight.forward, weight.rows, weight.cols),
                (weight.transposed, weight.cols, weight.rows),
            )
        ]
        is_parameter = getattr(self, "_is_param", False)
        return _rebuild, (
            type(self).BACKEND,
            weight.rows,
            weight.cols,
            *parts,
            self.tiles,
            self.requires_grad,
            is_parameter,
        )

    def __deepcopy__(self, memo):
        copy = type(self)._of(
            self.packed_weight.map(torch.Tensor.clone),
            None if self.tiles is None else self.tiles.clone(),
            self.requires_grad,
        )
        copy._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = copy
        return copy

    # torch's layouts.

    def _torch_parts(self, packed, rows, cols):
        if packed is None:
            return None, None
        values, meta = operators.canonical(packed, rows, cols)
        return values, torch_layouts.meta_to_torch(meta, cols, values.dtype)

    @property
    def packed(self):
        """The kept values ``[rows, cols / 2]``, or ``None`` where the matrix is not packed along its rows."""
        weight = self.packed_weight
        return None if weight.forward is None else operators.canonical(weight.forward, weight.rows, weight.cols)[0]

    @property
    def meta(self):
        """The metadata in torch's CUTLASS order."""
        weight = self.packed_weight
        return self._torch_parts(weight.forward, weight.rows, weight.cols)[1]

    @property
    def packed_t(self):
        """The kept values of the transpose ``[cols, rows / 2]``, or ``None``."""
        weight = self.packed_weight
        return (
            None if weight.transposed is None else operators.canonical(weight.transposed, weight.cols, weight.rows)[0]
        )

    @property
    def meta_t(self):
        """The transpose's metadata in torch's CUTLASS order."""
        weight = self.packed_weight
        return self._torch_parts(weight.transposed, weight.cols, weight.rows)[1]

    @property
    def compressed_swizzled_bitmask(self):
        """The mask in torch's order, or ``None`` where the tensor was not pruned by tiles."""
        return None if self.tiles is None else torch_layouts.bitmask_to_torch(self.tiles)

    @property
    def mask(self) -> torch.Tensor:
        """What is kept, ``[rows, cols]`` of bool."""
        return masks.mask_of(self._kept_tiles(), self.packed_weight.rows, self.packed_weight.cols)

    # Making one.

    @classmethod
    def _validate_device_dim_dtype_shape(cls, original_tensor: torch.Tensor) -> None:
        if original_tensor.dim() != 2:
            raise RuntimeError(
                f"Error original_tensor.dim = {original_tensor.dim()} is not supported! Only 2d tensors are currently "
                f"supported."
            )
        if original_tensor.dtype not in SUPPORTED_DTYPES:
            raise RuntimeError(
                f"Error original_tensor.dtype {original_tensor.dtype} is not a supported dtype for {cls}! Supported "
                f"are "
                f"{', '.join(str(d) for d in SUPPORTED_DTYPES)}"
            )

    @classmethod
    def from_dense(cls, original_tensor: torch.Tensor, alg_id: int = 0):
        """Compresses a matrix that is 2:4 along its rows.

        Raises:
            ValueError: where it is not 2:4; the message names the row and the group.
            RuntimeError: for another rank or an unsupported type, as torch.
        """
        cls._validate_device_dim_dtype_shape(original_tensor)
        self = cls._of(pack_sparse(original_tensor.detach()), None, original_tensor.requires_grad)
        self.alg_id_cusparselt = alg_id
        return self

    @classmethod
    def prune_dense_static_sort(cls, original_tensor: torch.Tensor, algorithm: str = ""):
        """Prunes a matrix to 2:4 along rows and along columns, tile by tile, and packs it both ways.

        Raises:
            RuntimeError: for an unknown algorithm, another rank or an unsupported type.
            ValueError: for a NaN; the message names its place.
        """
        if is_dynamo_compiling():
            return _pruned_in_graph(cls.BACKEND, original_tensor, algorithm)
        cls._validate_device_dim_dtype_shape(original_tensor)
        weight, tiles = pack_by_rule(original_tensor.detach(), rule_of_algorithm(algorithm))
        return cls._of(weight, tiles)

    def to_dense(self) -> torch.Tensor:
        """The matrix with zeros where nothing is kept; gradients pass through."""
        if torch.is_grad_enabled() and self.requires_grad:
            return applied(_ToDense, self)
        return self.packed_weight.to_dense()

    def with_values_of(self, dense: torch.Tensor):
        """The 2:4 matrix that keeps of ``dense`` what this one keeps."""
        tiles = self._kept_tiles()
        return type(self)._of(pack_by_mask(dense, tiles, self.packed_weight.transposed is not None), tiles)

    def _kept_tiles(self) -> torch.Tensor:
        if self.tiles is not None:
            return self.tiles
        weight = self.packed_weight
        packed = weight.forward if weight.forward is not None else weight.transposed
        rows, cols = (weight.rows, weight.cols) if weight.forward is not None else (weight.cols, weight.rows)
        values, meta = operators.canonical(packed, rows, cols)
        ones = torch.ones_like(values)
        if cols % 4:
            # The last group keeps places past the last column, too.
            group = cols // 4
            code = meta[:, group // 8] >> (4 * (group % 8)) & 15
            ones[:, 2 * group : 2 * group + 2] = (torch.stack((code & 3, code >> 2), 1) < cols % 4).to(ones.dtype)
        kept = operators.unpack(operators.from_canonical(ones, meta, cols), rows, cols).to(torch.float32).bool()
        return masks.tiles_of(kept if weight.forward is not None else kept.t())

    def _mm(self, B: torch.Tensor, *, bias: torch.Tensor | None = None, **kwargs) -> torch.Tensor:
        return _mm(self, B) if bias is None else _mm(self, B) + bias[:, None]

    # Operators.

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            if len(types) > 1 and not all(issubclass(kind, torch.Tensor) for kind in types):
                # A symbol of torch.fx, which records the call.
                return NotImplemented
            return handler(*args, **kwargs) if kwargs else handler(*args)
        return _PLAIN(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        table = cls.__dict__.get("SPARSE_DISPATCH") or DISPATCH
        handler = table.get(func._overloadpacket)
        if handler is None:
            raise NotImplementedError(
                f"{cls.__name__} only supports a specific set of operations, can't perform requested op "
                f"({func.__name__}); {memory.advice()}"
            )
        return handler(func, types, args, kwargs or {})

    @classmethod
    def _load_dispatch_table(cls, custom_dispatch_table=None) -> None:
        """Sets this class's table of operators, with those of ``custom_dispatch_table`` added."""
        cls.SPARSE_DISPATCH = {**DISPATCH, **(custom_dispatch_table or {})}


#: The names of the tensors inside, by which of the three there are.
_INNER = {
    there: [name for name, is_there in zip(("_forward", "_transposed", "tiles"), there, strict=True) if is_there]
    for there in itertools.product((False, True), repeat=3)
}

_CUTLASS_SHAPES = torch.sparse.SparseSemiStructuredTensorCUTLASS._DTYPE_SHAPE_CONSTRAINTS
_CUSPARSELT_SHAPES = torch.sparse.SparseSemiStructuredTensorCUSPARSELT._DTYPE_SHAPE_CONSTRAINTS
#: torch has 8-bit floats of one type only; both have one shape.
_OTHERS_SHAPES = {dtype: _CUSPARSELT_SHAPES[torch.int8] for dtype in FLOAT8}

#: The types that autocast converts.
_AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}

#: The types that GEMMs take.
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, *FLOAT8)


class SparseSemiStructuredTensorCUTLASS(SparseSemiStructuredTensor):
    """The name that torch has for tensors whose metadata is a tensor of its own."""

    BACKEND = "cutlass"
    _DTYPE_SHAPE_CONSTRAINTS = {**_OTHERS_SHAPES, **_CUSPARSELT_SHAPES, **_CUTLASS_SHAPES}


class SparseSemiStructuredTensorCUSPARSELT(SparseSemiStructuredTensor):
    """The name that torch has for tensors of its default backend."""

    BACKEND = "cusparselt"
    _DTYPE_SHAPE_CONSTRAINTS = {**_OTHERS_SHAPES, **_CUTLASS_SHAPES, **_CUSPARSELT_SHAPES}


def _reduce_shared(tensor):
    """A tensor for a process of this machine: the packed parts themselves, which shared memory holds once."""
    weight = tensor.packed_weight
    flags = tensor.tiles, tensor.requires_grad, getattr(tensor, "_is_param", False)
    return _rebuild_packed, (type(tensor).BACKEND, weight.rows, weight.cols, weight.forward, weight.transposed, *flags)


for _class in (SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS, SparseSemiStructuredTensorCUSPARSELT):
    SparseSemiStructuredTensor._CLASSES[_class.BACKEND] = _class
    # The names of torch's slots are properties here. What ``torch.utils.swap_tensors``, and so ``Module.to``, must swap
    # is in ``__dict__``.
    _class.__slotnames__ = []
    ForkingPickler.register(_class, _reduce_shared)


def _rebuild(backend, rows, cols, forward, transposed, tiles, requires_grad, is_parameter=False):
    """A tensor from its saved form."""
    forward = None if forward is None else operators.from_canonical(*forward, cols)
    transposed = None if transposed is None else operators.from_canonical(*transposed, rows)
    return _rebuild_packed(backend, rows, cols, forward, transposed, tiles, requires_grad, is_parameter)


def _rebuild_packed(backend, rows, cols, forward, transposed, tiles, requires_grad, is_parameter):
    tensor = SparseSemiStructuredTensor._CLASSES[backend]._of(
        Packed(rows, cols, forward, transposed), tiles, requires_grad
    )
    if is_parameter:
        tensor._is_param = True
    return tensor


@derivable
class _ToDense(torch.autograd.Function):
    """Decompresses; the gradient passes as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(sparse):
        return sparse.packed_weight.to_dense()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# GEMMs. `A` and `B` are what the caller multiplies; either may be sparse.


def _same_dtype(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype != b.dtype:
        raise NotImplementedError(
            f"`{name}` matmul: trying to do `A={tuple(a.shape)} @ B={tuple(b.shape)}`, with A.dtype={a.dtype} and "
            f"B.dtype={b.dtype}. "
            "This operation is only supported when A and B have the same data type."
        )


def _linear(input, weight, bias=None):
    # Eager mode. Here every attribute costs a share of the call, so one expression decides.
    try:
        packed = weight.packed_weight
        if (
            packed.direct is not None
            and input.dtype is packed.dtype
            and input.shape[-1] == packed.cols
            and not is_any_autocast_enabled()
            and forward_ad._current_level < 0
            and not _is_transforming()
            and not is_dynamo_compiling()
        ):
            if is_grad_enabled():
                # The weight is asked last, and only where it must be: reading an attribute of a tensor subclass costs
                # as much as the rest.
                if input.requires_grad or (bias is not None and bias.requires_grad) or weight.requires_grad:
                    return eager_packed_linear(input, weight, bias, packed, -1)
            if bias is None:
                return _EAGER_LINEAR(input, packed.direct, packed.rows)
            return _EAGER_LINEAR_BIAS(input, packed.direct, bias, packed.rows, 0)
    except (RuntimeError, IndexError, AttributeError):
        # What is wrong is said below.
        pass
    return _checked_linear(input, weight, bias)


def _checked_linear(input, weight, bias):
    """``F.linear`` where a gradient may be needed, types differ, or an argument is wrong."""
    if not isinstance(weight, SparseSemiStructuredTensor):
        # A sparse input, as SemiSparseActivationLinear's.
        y = _matmul(input, weight.t())
        return y if bias is None else y + bias
    # Attributes of the packed weight, since those of a tensor subclass go through __torch_function__.
    packed = weight.packed_weight
    if isinstance(input, SparseSemiStructuredTensor):
        _refuse_two_sparse()
    autocast = _autocast_dtype(input, packed.dtype)
    if autocast is not None:
        # In the weight's type, since packing it anew as another one takes as long as a GEMM of few tokens.
        input = input.to(packed.dtype)
        bias = None if bias is None else bias.to(packed.dtype)
    elif input.dtype != packed.dtype:
        _same_dtype(type(weight).__name__, input, weight)
    if not input.shape or input.shape[-1] != packed.cols:
        raise wrong_features(input, packed.rows, packed.cols)
    y = linear_of_tensor(input, weight, bias)
    return y if autocast is None else y.to(autocast)


def _packed_in_graph(x, packed, packed_t, bias, rows, cols):
    if not x.dim() or x.shape[-1] != cols:
        raise RuntimeError(f"the input has shape {list(x.shape)}; its last dimension must be {cols}")
    dtype, packed = packed.dtype, Packed(rows, cols, packed, packed_t)
    autocast = _autocast_dtype(x, dtype)
    if autocast is None:
        return packed_linear(x, None, bias, packed)
    return packed_linear(x.to(dtype), None, None if bias is None else bias.to(dtype), packed).to(autocast)


operators.define_composite(
    "sparse_linear(Tensor x, Tensor packed, Tensor? packed_t, Tensor? bias, int rows, int cols) -> Tensor",
    _packed_in_graph,
)


def linear_in_graph(x, weight, bias=None):
    """``F.linear`` for torch.compile: the inputs of its graph are the tensors inside of a frozen sparse weight, not that
    weight."""
    if isinstance(weight, SparseSemiStructuredTensor) and not weight.requires_grad and x.is_floating_point():
        forward, dtype = weight._forward, weight.dtype
        if forward is not None and dtype.itemsize > 1 and x.ndim and x.shape[-1] == weight.shape[1]:
            if x.dtype == dtype or torch.is_autocast_enabled(x.device.type):
                linear = torch.ops.twofour.sparse_linear.default if is_in_graph() else _packed_in_graph
                return linear(x, forward, weight._transposed, bias, *weight.shape)
    # Also for what is an error.
    return F.linear(x, weight, bias)


def _autocast_dtype(dense: torch.Tensor, dtype: torch.dtype) -> torch.dtype | None:
    """The type of a GEMM's result under autocast; ``None`` where autocast is off, or leaves the types of the operands
    alone, as in torch."""
    if not is_any_autocast_enabled():
        return None
    device = dense.device.type
    if not torch.is_autocast_enabled(device) or not {dense.dtype, dtype} <= _AUTOCAST:
        return None
    return torch.get_autocast_dtype(device)


def _refuse_two_sparse():
    raise ValueError("`SparseSemiStructuredTensor @ SparseSemiStructuredTensor` is not supported by the hardware")


def _matmul(A, B, *, out=None):
    if out is not None:
        raise NotImplementedError("`SparseSemiStructuredTensor` matmul: out= is not supported")
    a_sparse, b_sparse = (isinstance(t, SparseSemiStructuredTensor) for t in (A, B))
    if a_sparse and b_sparse:
        _refuse_two_sparse()
    dense, dtype = (B, A.dtype) if a_sparse else (A, B.dtype)
    if _autocast_dtype(dense, dtype) is not None:
        A, B = (A, B.to(dtype)) if a_sparse else (A.to(dtype), B)
    _same_dtype(type(A if a_sparse else B).__name__, A, B)
    if A.dtype is torch.int8:
        # Before the shapes are compared, as torch does.
        (A.packed_weight if a_sparse else B.packed_weight.t()).check_integers()
    if a_sparse:
        if B.dim() == 1:
            return _linear(B, A)
        if B.shape[-2] != A.shape[1]:
            raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(A.shape)} and {tuple(B.shape)})")
        return _linear(B.mT, A).mT.contiguous()
    if A.shape[-1] != B.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({tuple(A.shape)} and {tuple(B.shape)})")
    return _linear(A, B.t())


def _mm(A, B, *, out=None, out_dtype=None):
    if A.dim() != 2 or B.dim() != 2:
        raise RuntimeError(
            f"mm: both operands must be matrices; their shapes are {tuple(A.shape)} and {tuple(B.shape)}"
        )
    y = _matmul(A, B, out=out)
    return y if out_dtype is None else y.to(out_dtype)


def _mv(A, x, *, out=None):
    if not x.is_cpu:
        return _matmul(A, x, out=out)
    # torch's autocast leaves this one alone on a CPU.
    with torch.autocast("cpu", enabled=False):
        return _matmul(A, x, out=out)


def _addmm(input, mat1, mat2, *, beta=1, alpha=1, out=None):
    y = _mm(mat1, mat2, out=out)
    y = y if alpha == 1 else y * alpha
    if input.dtype != y.dtype and torch.is_autocast_enabled(y.device.type):
        input = input.to(y.dtype)
    return y if beta == 0 else y + (input if beta == 1 else input * beta)


def _scaled_mm(A, B, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    a_sparse, b_sparse = (isinstance(t, SparseSemiStructuredTensor) for t in (A, B))
    if a_sparse and b_sparse:
        _refuse_two_sparse()
    if A.dim() != 2 or B.dim() != 2:
        raise RuntimeError(
            f"_scaled_mm: both operands must be matrices; their shapes are {tuple(A.shape)} and {tuple(B.shape)}"
        )
    out_dtype = A.dtype if out_dtype is None else out_dtype
    computed = torch.float32 if scale_result is not None else out_dtype
    if a_sparse:
        y = (
            scaled_product(B.t(), A.packed_weight, scale_b, scale_a, None, computed if bias is None else torch.float32)
            .t()
            .contiguous()
        )
        y = y if bias is None else y + bias.to(y.dtype)
    else:
        y = scaled_product(A, B.packed_weight.t(), scale_a, scale_b, bias, computed)
    y = y if scale_result is None else y * scale_result
    if y.dtype is out_dtype:
        return y
    return saturated(y, out_dtype) if out_dtype in FLOAT8 else y.to(out_dtype)


@torch.compiler.allow_in_graph
def _pruned_in_graph(backend: str, original_tensor: torch.Tensor, algorithm: str) -> SparseSemiStructuredTensor:
    """:meth:`SparseSemiStructuredTensor.prune_dense_static_sort` as one call of a graph, since no graph makes a tensor
    subclass by itself."""
    return SparseSemiStructuredTensor._CLASSES[backend].prune_dense_static_sort(original_tensor, algorithm)


@torch.compiler.allow_in_graph
def _transposed_in_graph(self):
    return _t(self)


def _t(self):
    if is_dynamo_compiling():
        return _transposed_in_graph(self)
    if torch.is_grad_enabled() and self.requires_grad:
        return applied(_Transpose, self)
    return _transposed(self)


def _transposed(self):
    tiles = None
    if self.tiles is not None:
        rows, cols = self.packed_weight.rows, self.packed_weight.cols
        tiles = masks.tiles_of(masks.mask_of(self.tiles, rows, cols).t())
    return type(self)._of(self.packed_weight.t(), tiles)


@derivable
class _Transpose(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(sparse):
        return _transposed(sparse)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient.t()


def _transpose(self, dim0, dim1):
    return _t(self) if dim0 % 2 != dim1 % 2 else self


_FUNCTIONS = {
    F.linear: _linear,
    torch.mm: _mm,
    torch.Tensor.mm: _mm,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: lambda b, a: _matmul(a, b),
    torch.mv: _mv,
    torch.Tensor.mv: _mv,
    torch.bmm: _matmul,
    torch.Tensor.bmm: _matmul,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch._scaled_mm: _scaled_mm,
    torch.t: _t,
    torch.Tensor.t: _t,
    torch.Tensor.T.__get__: _t,
    torch.Tensor.mT.__get__: _t,
    torch.transpose: _transpose,
    torch.Tensor.transpose: _transpose,
}


def _set_data(self, value):
    """``self.data = value``, for a sparse value, or a dense one that is 2:4. The weight of a :class:`twofour.Linear` is
    the layer's."""
    weight, tiles = _like(self, value)
    layer = self.__dict__.get("_layer")
    if layer is not None:
        layer.replace_weight(weight)
    memory.replace_contents(self, type(self)._of(weight, tiles))
    if layer is not None:
        self._layer = layer


def _like(self, source, **to) -> tuple[Packed, torch.Tensor | None]:
    """A matrix packed the ways that a tensor is, moved ``to`` a device and a dtype; and its mask where the tensor has
    one."""
    both = self.packed_weight.transposed is not None
    if isinstance(source, SparseSemiStructuredTensor):
        weight, tiles = source.packed_weight.to(**to) if to else source.packed_weight, source._kept_tiles()
        if both and weight.transposed is None:
            weight = pack_by_mask(weight.to_dense(), tiles, True)
    else:
        dense = source.detach().to(**to)
        tiles = masks.tiles_of((dense.half() if dense.dtype in FLOAT8 else dense) != 0)
        weight = pack_by_mask(dense, tiles, True) if both else pack_sparse(dense)
    return weight, None if self.tiles is None else tiles


_FUNCTIONS |= memory.functions(SparseSemiStructuredTensor, _set_data)


# The table for what reaches torch's dispatcher.


def _dispatched(function):
    """A function of tensors as a handler of the table."""
    return lambda func, types, args, kwargs: function(*args, **kwargs)


def _detach(self):
    return type(self)._of(self.packed_weight, self.tiles)


def _clone(self, memory_format=None):
    return type(self)._of(
        self.packed_weight.map(torch.Tensor.clone), None if self.tiles is None else self.tiles.clone()
    )


def _empty_like(self, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    """A matrix of zeros, packed the same ways."""
    weight, kind = self.packed_weight, {"dtype": dtype or self.dtype, "device": device or self.device}
    forward = None if weight.forward is None else packed_zeros(weight.rows, weight.cols, **kind)
    transposed = None if weight.transposed is None else packed_zeros(weight.cols, weight.rows, **kind)
    tiles = None if self.tiles is None else torch.zeros_like(self.tiles, device=device)
    return type(self)._of(Packed(weight.rows, weight.cols, forward, transposed), tiles)


def _view(self, shape):
    if tuple(shape) not in (tuple(self.shape), (-1, self.shape[1]), (self.shape[0], -1)):
        raise NotImplementedError(
            f"`{type(self).__name__}` view: only views of identical shape are supported, not {tuple(shape)}; "
            f"{memory.advice()}"
        )
    return _detach(self)


def _to_copy(self, *, dtype=None, layout=None, device=None, pin_memory=None, non_blocking=False, memory_format=None):
    if dtype is not None and dtype not in SUPPORTED_DTYPES:
        raise NotImplementedError(f"`{type(self).__name__}` to: dtype {dtype} is not supported; call to_dense() first")
    tiles = None if self.tiles is None else self.tiles.to(device=device)
    return type(self)._of(self.packed_weight.to(device=device, dtype=dtype), tiles)


def _copy_(self, source, non_blocking=False):
    """Overwrites the values in place: from a sparse tensor of the same shape, or from a dense one that is 2:4. A dense
    tensor is overwritten with a sparse one's dense form."""
    if not isinstance(self, SparseSemiStructuredTensor):
        return self.copy_(source.to_dense(), non_blocking)
    if tuple(source.shape) != tuple(self.shape):
        raise RuntimeError(f"copy_: the shapes differ: {tuple(self.shape)} and {tuple(source.shape)}")
    weight, tiles = _like(self, source, device=self.device, dtype=self.dtype)
    for name in ("forward", "transposed"):
        into, new = getattr(self.packed_weight, name), getattr(weight, name)
        if into is not None:
            if new is None:
                raise RuntimeError(
                    "copy_: the source is not packed along the rows that the destination is packed along"
                )
            _overwrite(into, new)
    if self.tiles is not None:
        _overwrite(self.tiles, tiles)
    return self


def _overwrite(into: torch.Tensor, new: torch.Tensor) -> None:
    """Copies in place, and says so to the graphs that have saved the tensor, as no operator does below autograd."""
    into.copy_(new)
    if not into.is_inference():
        torch.autograd.graph.increment_version(into)


def _values(self):
    return self.packed


def _indices(self):
    return self.meta


def _is_same_size(self, other):
    return tuple(self.shape) == tuple(other.shape)


DISPATCH = {
    torch.ops.aten.values: _dispatched(_values),
    torch.ops.aten.indices: _dispatched(_indices),
    torch.ops.aten.is_same_size: _dispatched(_is_same_size),
    torch.ops.aten.detach: _dispatched(_detach),
    torch.ops.aten.detach_: _dispatched(lambda self: self),
    torch.ops.aten.alias: _dispatched(_detach),
    torch.ops.aten.t: _dispatched(_transposed),
    torch.ops.aten.transpose: _dispatched(_transpose),
    torch.ops.aten.view: _dispatched(_view),
    torch.ops.aten.mm: _dispatched(_mm),
    torch.ops.aten.matmul: _dispatched(_matmul),
    torch.ops.aten.addmm: _dispatched(_addmm),
    torch.ops.aten.linear: _dispatched(_linear),
    torch.ops.aten._scaled_mm: _dispatched(_scaled_mm),
    torch.ops.aten._to_copy: _dispatched(_to_copy),
    torch.ops.aten.clone: _dispatched(_clone),
    torch.ops.aten.empty_like: _dispatched(_empty_like),
    torch.ops.aten.copy_: _dispatched(_copy_),
}
