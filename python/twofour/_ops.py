"""The native operators ``torch.ops.twofour``, registered with the torch of this process.

Importing this module registers them once. The functions here are what the rest of the package calls: they take and return tensors, and
raise the exceptions that the operators name.
"""

import functools
import pathlib

import torch

from . import _native
from ._errors import translated

_OLDEST = (2, 11)


def _register() -> None:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
        raise ImportError(f"twofour requires torch 2.11 or newer; this is torch {torch.__version__}: pip install -U torch")
    library = pathlib.Path(torch._C.__file__).parent / "lib"
    names = ["libtorch_cpu.so", "libtorch_cpu.dylib"]
    cpu = next((library / name for name in names if (library / name).exists()), None)
    if cpu is None:
        raise ImportError(f"no libtorch_cpu in {library}: reinstall torch")
    # Where pip has put NVRTC: beside torch, or beside this package.
    for package in (torch, _native):
        _native.add_site_packages(str(pathlib.Path(package.__file__).parent.parent))
    # A torch built for CUDA has loaded it, with or without a GPU.
    cuda = library / "libtorch_cuda.so"
    for schema in _native.register_torch(str(cpu), str(cuda) if cuda.exists() else None):
        _LIBRARY.define(schema, tags=_TAGS)


#: The definitions last as long as this object.
_LIBRARY = torch.library.Library("twofour", "FRAGMENT")
#: Strides may be any. torch.compile then hands over the tensor itself where it would make a copy in the strides that it traced: of an activation
#: that is also kept for the backward pass, it computed a second one.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_register()
_OPS = torch.ops.twofour

#: Mask rules, by the names that the package's functions take.
RULES = _native.MASK_RULES

#: Activations of the GEMM's epilogue.
ACTIVATIONS = {None if name == "identity" else name: number for name, number in _native.ACTIVATIONS.items()}

#: torch's numbers of the types that a weight may be packed as.
TYPES = {getattr(torch, name): number for name, number in _native.PACKED_DTYPES.items()}

#: torch's numbers of the types of 8-bit floats.
FLOAT8 = {torch.float8_e5m2: 23, torch.float8_e4m3fn: 24}

#: Stand-ins of a dense tensor.
ESTIMATORS = _native.ESTIMATORS


def _raising(op):
    """The operator, raising the exception that it names."""

    @functools.wraps(op)
    def call(*args):
        try:
            return op(*args)
        except RuntimeError as error:
            failure = translated(error)
            if failure is error:
                raise
            raise failure from None

    return call


linear = _raising(_OPS.linear.default)
linear_bias = _raising(_OPS.linear_bias.default)
# Both in eager mode, without torch's wrapper and without translated errors, which cost a third of a microsecond a call.
eager_linear = _OPS.linear.default._op
eager_linear_bias = _OPS.linear_bias.default._op
input_gradient = _raising(_OPS.input_gradient.default)
pack = _raising(_OPS.pack.default)
pack_masked = _raising(_OPS.pack_masked.default)
pack_sparse = _raising(_OPS.pack_sparse.default)
unpack = _raising(_OPS.unpack.default)
canonical = _raising(_OPS.canonical.default)
from_canonical = _raising(_OPS.from_canonical.default)
select = _raising(_OPS.select.default)
soft_threshold_scale = _raising(_OPS.soft_threshold_scale.default)
_estimate = _raising(_OPS.estimate.default)
sampled_weight_gradient = _raising(_OPS.sampled_weight_gradient.default)
bias_gradient = _raising(_OPS.bias_gradient.default)
linear_float8 = _raising(_OPS.linear_float8.default)
quantize_rows = _raising(_OPS.quantize_rows.default)
linear_i8 = _raising(_OPS.linear_i8.default)
linear_quantized = _raising(_OPS.linear_quantized.default)
linear_quantized_bias = _raising(_OPS.linear_quantized_bias.default)
quantize_int4 = _raising(_OPS.quantize_int4.default)
pack_int4 = _raising(_OPS.pack_int4.default)
canonical_int4 = _raising(_OPS.canonical_int4.default)
linear_int4 = _raising(_OPS.linear_int4.default)
linear_int4_bias = _raising(_OPS.linear_int4_bias.default)
gated_gelu = _raising(_OPS.gated_gelu.default)
gated_gelu_gradient = _raising(_OPS.gated_gelu_gradient.default)
adamw_step_ = _raising(_OPS.adamw_step_.default)


def rule_number(rule: str) -> int:
    """The number of a mask rule.

    Raises:
        ValueError: for a rule that does not exist; the message lists those that do.
    """
    try:
        return RULES[rule]
    except KeyError:
        raise ValueError(f"unknown mask rule {rule!r}; known are {', '.join(RULES)}") from None


def estimate(dense: torch.Tensor, estimator: int, seed: int | torch.Tensor = 0) -> torch.Tensor:
    """The 2:4 stand-in of a matrix along its rows, dense with zeros. A seed in a tensor is read when the kernel runs, and is no constant of a
    compiled graph."""
    return _estimate(dense, estimator, 1.0, as_seed(seed))


def as_seed(seed: int | torch.Tensor) -> torch.Tensor:
    """A seed as a tensor of one int64."""
    return seed if isinstance(seed, torch.Tensor) else torch.full((), seed, dtype=torch.int64)


def new_seed(device: torch.device) -> torch.Tensor:
    """A seed from torch's default generator of a device, which it stays on."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)


# Shapes and types of the results, for torch.compile.


def _packed(like: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """A packed weight of the layout that each device has."""
    size = like.dtype.itemsize
    if like.device.type == "cuda":
        if size == 4:
            # Dense, with zeros.
            return like.new_empty((rows * cols,))
        # Padded to tiles: values, then a bit of metadata for each element.
        tile = 64 if size == 2 else 128
        elements = (-(-rows // 64) * 64) * (-(-cols // tile) * tile)
        return like.new_empty((elements // 2 + elements // 8 // size,))
    groups, strips = -(-cols // 4), -(-rows // 16)
    if like.dtype == torch.int8:
        # Lines of two groups, four lines to a block of positions; then the sum of each row.
        lines = -(-groups // 2)
        return like.new_empty((strips * (-(-lines // 4) * 64 + lines * 64) + 4 * rows,))
    if like.dtype in FLOAT8:
        # The bytes of values that were widened to float32.
        return like.new_empty((strips * (-(-groups // 8) * 64 + groups * 128),))
    # Lines of one group, eight lines to a block of positions.
    return like.new_empty((strips, (-(-groups // 8) * 64 + groups * 32 * size) // size))


def _tiles(like: torch.Tensor) -> torch.Tensor:
    rows, cols = like.shape
    return like.new_empty((-(-rows // 4), -(-cols // 4)), dtype=torch.int16)


@torch.library.register_fake("twofour::linear")
def _(x, packed, out_features):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("twofour::linear_bias")
def _(x, packed, bias, out_features, activation):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("twofour::input_gradient")
def _(dy, packed, in_features):
    return dy.new_empty((*dy.shape[:-1], in_features))


def _type(number: int) -> torch.dtype:
    return next(dtype for dtype, found in (TYPES | FLOAT8).items() if found == number)


@torch.library.register_fake("twofour::linear_float8")
def _(x, packed, scales, token_scales, bias, out_features, dtype):
    return x.new_empty((*x.shape[:-1], out_features), dtype=_type(dtype))


@torch.library.register_fake("twofour::pack")
def _(weight, rule, scale, transpose, check, dtype=-1):
    rows, cols = weight.shape
    like = weight if dtype == -1 else weight.new_empty((0,), dtype=_type(dtype))
    packed_t = _packed(like, cols, rows) if transpose else like.new_empty((0,))
    return _packed(like, rows, cols), packed_t, _tiles(weight)


@torch.library.register_fake("twofour::pack_masked")
def _(weight, mask, transpose):
    rows, cols = weight.shape
    return _packed(weight, rows, cols), _packed(weight, cols, rows) if transpose else weight.new_empty((0,))


@torch.library.register_fake("twofour::pack_sparse")
def _(weight):
    return _packed(weight, *weight.shape)


@torch.library.register_fake("twofour::unpack")
def _(packed, rows, cols):
    return packed.new_empty((rows, cols))


@torch.library.register_fake("twofour::canonical")
def _(packed, rows, cols):
    groups = -(-cols // 4)
    return packed.new_empty((rows, 2 * groups)), packed.new_empty((rows, -(-groups // 8)), dtype=torch.int32)


@torch.library.register_fake("twofour::from_canonical")
def _(values, meta, cols):
    return _packed(values, values.shape[0], cols)


@torch.library.register_fake("twofour::select")
def _(dense, rule):
    return _tiles(dense)


@torch.library.register_fake("twofour::soft_threshold_scale")
def _(dense):
    return dense.new_empty((), dtype=torch.float32)


@torch.library.register_fake("twofour::estimate")
def _(dense, estimator, scale, seed):
    return torch.empty_like(dense)


@torch.library.register_fake("twofour::sampled_weight_gradient")
def _(dy, x, estimator, seed):
    return dy.new_empty((dy.shape[1], x.shape[1]))


@torch.library.register_fake("twofour::bias_gradient")
def _(dy):
    return dy.new_empty((dy.shape[-1],))


@torch.library.register_fake("twofour::quantize_rows")
def _(dense):
    return dense.new_empty(dense.shape, dtype=torch.int8), dense.new_empty((dense.shape[0],), dtype=torch.float32)


@torch.library.register_fake("twofour::linear_i8")
def _(x, packed, out_features):
    return x.new_empty((*x.shape[:-1], out_features), dtype=torch.int32)


@torch.library.register_fake("twofour::linear_quantized")
def _(x, packed, scales, out_features):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("twofour::linear_quantized_bias")
def _(x, packed, scales, bias, out_features, activation):
    return x.new_empty((*x.shape[:-1], out_features))


def _scales_per_row(cols: int, group_size: int) -> int:
    return 1 if group_size < 0 else -(-cols // group_size)


def _parts_int4(like: torch.Tensor, rows: int, cols: int, group_size: int) -> tuple[torch.Tensor, ...]:
    """Values, metadata and scales in canonical form."""
    groups = -(-cols // 4)
    return (
        like.new_empty((rows, groups), dtype=torch.uint8),
        like.new_empty((rows, -(-groups // 8)), dtype=torch.int32),
        like.new_empty((rows, _scales_per_row(cols, group_size)), dtype=torch.float16),
    )


@torch.library.register_fake("twofour::quantize_int4")
def _(weight, group_size):
    return _parts_int4(weight, *weight.shape, group_size)


@torch.library.register_fake("twofour::pack_int4")
def _(values, meta, scales, cols, group_size):
    rows, per_row = values.shape[0], _scales_per_row(cols, group_size)
    if values.device.type == "cuda":
        # Padded to 16 rows and 128 columns.
        tall, wide = -(-rows // 16) * 16, -(-cols // 128) * 128
        return values.new_empty((tall * wide // 4 + tall * wide // 8 + 2 * tall * per_row,), dtype=torch.int8)
    blocks, strips = -(-cols // 32), -(-rows // 16)
    # A header of 64 bytes for each scale of a row, or for 256 columns of a row with one scale. A block of 32 columns has
    # 64 bytes of positions and 128 of integers.
    headers = per_row if group_size > 0 else max(1, -(-blocks // 8))
    return values.new_empty((strips * (headers * 64 + blocks * 192),), dtype=torch.int8)


@torch.library.register_fake("twofour::canonical_int4")
def _(packed, rows, cols, group_size):
    return _parts_int4(packed, rows, cols, group_size)


@torch.library.register_fake("twofour::linear_int4")
def _(x, packed, out_features, group_size):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("twofour::linear_int4_bias")
def _(x, packed, bias, out_features, group_size, activation):
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("twofour::gated_gelu")
def _(input):
    return input.new_empty((*input.shape[:-1], input.shape[-1] // 2))


@torch.library.register_fake("twofour::gated_gelu_gradient")
def _(input, dy):
    return input.new_empty(input.shape)


# Counted by torch.utils.flop_counter.
from . import _flops  # noqa: E402, F401

# Rules of torch.vmap, for operators of the last dimension of their first argument.


def _by_rows(op):
    """The rule of an operator that takes any leading dimensions: a batch of inputs is one more. A batch of weights is computed one by one."""

    def rule(info, in_dims, x, *others):
        if all(dim is None for dim in in_dims[1:]):
            return op(x.movedim(in_dims[0], 0), *others), 0
        args = list(zip(in_dims, (x, *others), strict=True))
        results = [op(*(a if dim is None else a.select(dim, i) for dim, a in args)) for i in range(info.batch_size)]
        return torch.stack(results), 0

    return rule


for _name in (
    "linear",
    "linear_bias",
    "input_gradient",
    "linear_quantized",
    "linear_quantized_bias",
    "linear_int4",
    "linear_int4_bias",
    "gated_gelu",
    "gated_gelu_gradient",
):
    torch.library.register_vmap(f"twofour::{_name}", _by_rows(getattr(_OPS, _name).default))
