"""Linear layers whose dense master weight is pruned in every forward pass, with gradients."""

from __future__ import annotations

import torch

from .. import operators
from . import masks
from .autograd import Straight, packed_linear
from .derivatives import applied, is_differentiated
from .errors import wrong_features
from .packed import Packed

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

#: Rules whose masks are 2:4 along columns too, so that the transpose can be packed.
TRANSPOSABLE = frozenset(operators.RULES[name] for name in ("greedy", "greedy-signed", "causal1122", "optimal"))

_HALF = (torch.float16, torch.bfloat16)

#: Multiplications of a product, tokens times elements of the weight, below which a compiled model on a GPU multiplies
#: the dense weight with zeros: packing takes longer there than the sparse GEMMs gain.
DENSE_BELOW = 2.5e10

#: Weight gradients by name; the numbers of the estimators that replace the output gradient, -1 for none.
WEIGHT_GRADIENTS = {
    "dense": -1,
    "mvue": operators.ESTIMATORS["mvue"],
    "mvue-approximate": operators.ESTIMATORS["mvue-approximate"],
}


def weight_gradient_number(name: str) -> int:
    """The number of a weight gradient.

    Raises:
        ValueError: for a name that does not exist; the message lists those that do.
    """
    try:
        return WEIGHT_GRADIENTS[name]
    except KeyError:
        raise ValueError(f"unknown weight gradient {name!r}; known are {', '.join(WEIGHT_GRADIENTS)}") from None


def cast_activations(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    """An input and a bias in autocast's type where autocast is on; the master weight stays, and is packed as that type.

    Raises:
        NotImplementedError: where autocast is off and the types differ.
    """
    if torch.is_autocast_enabled(x.device.type):
        return cast_for_autocast(x, bias)
    if x.dtype is not weight.dtype:
        raise NotImplementedError(
            f"the input has dtype {x.dtype}, the weight {weight.dtype}: convert one, or use torch.autocast"
        )
    return x, bias


def autocast_type(tensor: torch.Tensor) -> torch.dtype:
    """Autocast's type where autocast is on, and otherwise that of the tensor."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def cast_for_autocast(x: torch.Tensor, *others: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors in autocast's type where autocast is on, and as they are otherwise."""
    # The first question takes least, and is of all devices.
    if not _is_any_autocast_enabled() or not torch.is_autocast_enabled(x.device.type):
        return x, *others
    dtype = autocast_type(x)
    return x.to(dtype), *(None if other is None else other.to(dtype) for other in others)


def pack_master(
    weight: torch.Tensor, rule: int, transpose: bool, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Chooses the mask of a master weight and packs what it keeps; the transpose, too, where asked and where the rule's
    masks allow it.

    Args:
        weight: ``[rows, cols]``.
        rule: the number of the rule.
        transpose: whether to pack the transpose.
        dtype: the type of the packed values; by default that of the weight. A float32 weight is packed as a 16-bit type
            in the same pass.
    """
    transpose = transpose and rule in TRANSPOSABLE
    # A NaN is found on a CPU only: on a GPU the search waits for the device.
    number = -1 if dtype is None or dtype is weight.dtype else operators.TYPES.get(dtype, -1)
    forward, transposed, _ = operators.pack(weight, rule, 1.0, transpose, False, number)
    return forward, transposed if transpose else None


def pack_masters(
    weights: list[torch.Tensor], rules: list[int], dtypes: list[torch.dtype]
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """What :func:`pack_master` returns for each weight, with its transpose, from few launches on a GPU.

    Args:
        weights: master weights, each ``[rows, cols]``.
        rules: the number of each one's rule.
        dtypes: the type of each one's packed values.
    """
    alike: dict[tuple, list[int]] = {}
    for index, (weight, rule, dtype) in enumerate(zip(weights, rules, dtypes, strict=True)):
        alike.setdefault((rule, dtype, weight.dtype, weight.device), []).append(index)
    found = {}
    for (rule, dtype, of, _), indices in alike.items():
        transpose = rule in TRANSPOSABLE
        number = -1 if dtype is of else operators.TYPES.get(dtype, -1)
        packed = operators.pack_together([weights[index] for index in indices], rule, transpose, number)
        for index, forward, transposed in zip(indices, *packed, strict=True):
            found[index] = forward, transposed if transpose else None
    return [found[index] for index in range(len(weights))]


def runs_dense(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the products of a compiled model with a weight whose mask is chosen for them alone run dense."""
    return x.is_cuda and x.dtype in _HALF and x.numel() * weight.shape[0] < DENSE_BELOW


def masked_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rule: int) -> torch.Tensor:
    """What :func:`master_linear` returns, by dense GEMMs of a weight with zeros where the rule prunes. torch.compile
    makes one kernel of the weight's conversion and the zeros."""
    dense = weight.detach()
    mask = masks.mask_of(operators.select_together([dense], rule)[0], *weight.shape)
    masked = torch.where(mask, dense.to(x.dtype), 0)
    if is_differentiated(weight):
        masked = applied(Straight, weight, masked)
    return torch.nn.functional.linear(x, masked, bias)


def master_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: int,
    estimator: int = -1,
    packed: Packed | None = None,
) -> torch.Tensor:
    """``x @ W.T + bias`` for ``x`` of shape ``[..., cols]``, where ``W`` is what the rule keeps of the master weight
    ``[rows, cols]``.

    With ``packed`` the mask and the values are those that it holds; the master weight, of any type, then only receives
    the gradient.
    """
    if not x.shape or x.shape[-1] != weight.shape[1]:
        raise wrong_features(x, *weight.shape)
    if packed is None:
        # Where gradients are needed, the transpose serves that of the input.
        transpose = torch.is_grad_enabled() and x.requires_grad
        packed = Packed(*weight.shape, *pack_master(weight.detach(), rule, transpose, x.dtype))
    return packed_linear(x, weight if is_differentiated(weight) else None, bias, packed, estimator)


def _compiled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rule: int) -> torch.Tensor:
    if weight.dim() != 2:
        raise RuntimeError(f"the weight must have 2 dimensions; its shape is {list(weight.shape)}")
    x, bias = cast_activations(x, weight, bias)
    linear = masked_linear if x.dim() and runs_dense(x, weight) else master_linear
    return linear(x, weight, bias, rule)


operators.define_composite("master_linear(Tensor x, Tensor weight, Tensor? bias, int rule) -> Tensor", _compiled)

#: :func:`cast_activations` and :func:`master_linear` in one, for torch.compile.
compiled_master_linear = torch.ops.twofour.master_linear.default
