"""The native operators ``torch.ops.twofour``, registered with the torch of this process.

Importing this module registers them once. Its functions have the operators' names: they take and return tensors, and
raise the exceptions that the operators name. What there is of an operator (``python/src/ops``) is read here: its
schema, the shapes of its results for torch.compile, whether ``torch.vmap`` may give it more rows, and whether it is a
GEMM that ``torch.utils.flop_counter`` counts.
"""

from __future__ import annotations

import functools
import math
import pathlib
import sys

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import _native
from .errors import translated

_OLDEST = (2, 11)

#: The definitions last as long as this object.
_LIBRARY = torch.library.Library("twofour", "FRAGMENT")
#: Strides may be any. torch.compile then hands over the tensor itself where it would make a copy in the strides that it
#: traced: of an activation that is also kept for the backward pass, it computed a second one.
_TAGS = (torch.Tag.flexible_layout, torch.Tag.pt2_compliant_tag)

_OPS = torch.ops.twofour

#: Mask rules, by the names that the package's functions take.
RULES = _native.MASK_RULES

#: Activations of the GEMM's epilogue.
ACTIVATIONS = {None if name == "identity" else name: number for name, number in _native.ACTIVATIONS.items()}

#: Stand-ins of a dense tensor.
ESTIMATORS = _native.ESTIMATORS

#: torch's numbers of the types that a weight may be packed as.
TYPES = {
    dtype: _native.TORCH_DTYPES[str(dtype).removeprefix("torch.")]
    for dtype in (torch.float16, torch.float32, torch.bfloat16)
}

#: torch's numbers of the types of 8-bit floats.
FLOAT8 = {
    dtype: _native.TORCH_DTYPES[str(dtype).removeprefix("torch.")] for dtype in (torch.float8_e5m2, torch.float8_e4m3fn)
}


def _libraries() -> tuple[str, str | None]:
    """The paths of libtorch_cpu and, of a torch built for CUDA, libtorch_cuda, which it has loaded with or without a
    GPU.

    Raises:
        ImportError: for a torch that is too old or incomplete.
    """
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < _OLDEST:
        raise ImportError(
            f"twofour requires torch 2.11 or newer; this is torch {torch.__version__}: pip install -U torch"
        )
    folder = pathlib.Path(torch._C.__file__).parent / "lib"
    cpu = next((path for name in ("libtorch_cpu.so", "libtorch_cpu.dylib") if (path := folder / name).exists()), None)
    if cpu is None:
        raise ImportError(f"no libtorch_cpu in {folder}: reinstall torch")
    cuda = folder / "libtorch_cuda.so"
    return str(cpu), str(cuda) if cuda.exists() else None


def _define(schema: str, by_rows: bool, is_product: bool, has_shapes: bool) -> None:
    """Tells torch of an operator, and gives this module a function of its name."""
    _LIBRARY.define(schema, tags=_TAGS)
    name = schema.partition("(")[0]
    packet = getattr(_OPS, name)
    globals()[name] = _raising(packet.default)
    if has_shapes:
        torch.library.register_fake(f"twofour::{name}", _fake(name, packet.default))
    if by_rows:
        torch.library.register_vmap(f"twofour::{name}", _by_rows(packet.default))
    if is_product:
        # That of the dense GEMM, so that a model counts the same before and after it is made sparse. Tensors are given
        # as their shapes.
        register_flop_formula(packet)(lambda x, *others, out_shape=None, **_: 2 * math.prod(x) * out_shape[-1])


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


def _fake(name: str, op):
    """What makes tensors without elements of the shapes of the operator's results. Lists among these have a tensor for
    each of the list that is the first argument."""
    arguments, returns = op._schema.arguments, op._schema.returns
    in_lists = isinstance(returns[0].type, torch.ListType)

    def fake(*args, **named):
        # Shapes are asked for while a graph is made, before Inductor compiles it. Its import takes seconds, so that it
        # is left to torch.compile.
        if "torch._inductor.config" in sys.modules:
            from . import graphs

            graphs.install()
        args = (*args, *(named.get(argument.name, argument.default_value) for argument in arguments[len(args) :]))
        first = args[0][0] if in_lists else args[0]
        results = _native.result_shapes(name, args)
        made = tuple(first.new_empty(sizes, dtype=dtype and getattr(torch, dtype)) for sizes, dtype in results)
        if in_lists:
            length = len(args[0])
            made = tuple(list(made[begin : begin + length]) for begin in range(0, len(made), length))
        return made if len(made) > 1 else made[0]

    return fake


def _by_rows(op):
    """The rule of torch.vmap for an operator that takes any leading dimensions: a batch of inputs is one more. A batch
    of weights is computed one by one."""

    def rule(info, in_dims, x, *others):
        if all(dim is None for dim in in_dims[1:]):
            return op(x.movedim(in_dims[0], 0), *others), 0
        args = list(zip(in_dims, (x, *others), strict=True))
        results = [op(*(a if dim is None else a.select(dim, i) for dim, a in args)) for i in range(info.batch_size)]
        return torch.stack(results), 0

    return rule


# Where pip has put NVRTC: beside torch, or beside this package.
for _package in (torch, _native):
    _native.add_site_packages(str(pathlib.Path(_package.__file__).parent.parent))
for _operator in _native.register_torch(*_libraries()):
    _define(*_operator)

# Both in eager mode, without torch's wrapper and without translated errors, which cost a third of a microsecond a call.
eager_linear = _OPS.linear.default._op
eager_linear_bias = _OPS.linear_bias.default._op


def define_composite(schema: str, function) -> None:
    """Tells torch of an operator that is made of other operators, with their derivatives.

    Dynamo sees one call, where it would guard the values of all names in ``function`` in every call of a compiled
    model; AOTAutograd sees what it is made of."""
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")


def rule_number(rule: str) -> int:
    """The number of a mask rule.

    Raises:
        ValueError: for a rule that does not exist; the message lists those that do.
    """
    try:
        return RULES[rule]
    except KeyError:
        raise ValueError(f"unknown mask rule {rule!r}; known are {', '.join(RULES)}") from None


def estimated(dense: torch.Tensor, estimator: int, seed: int | torch.Tensor = 0) -> torch.Tensor:
    """The 2:4 stand-in of a matrix along its rows, dense with zeros. A seed in a tensor is read when the kernel runs,
    and is no constant of a compiled graph."""
    return estimate(dense, estimator, 1.0, as_seed(seed))  # noqa: F821


def as_seed(seed: int | torch.Tensor) -> torch.Tensor:
    """A seed as a tensor of one int64."""
    return seed if isinstance(seed, torch.Tensor) else torch.full((), seed, dtype=torch.int64)


def new_seed(device: torch.device) -> torch.Tensor:
    """A seed from torch's default generator of a device, which it stays on."""
    return torch.randint(2**62, (1,), dtype=torch.int64, device=device)
