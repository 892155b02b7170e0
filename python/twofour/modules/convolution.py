"""Convolutions with a 2:4 weight: a product of patches of the input with the weight as a matrix.

Columns of that matrix are in the order kernel position, input channel, so the groups of four run along the input
channels wherever their number is a multiple of 4: the axis along which TensorRT and apex have 2:4 convolutions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .. import operators
from ..operators import masks
from ..operators.master import cast_activations, master_linear
from ..tensor.semi_structured import rule_of_algorithm
from .linear import Linear


def patches(x: torch.Tensor, convolution) -> torch.Tensor:
    """The patches that a convolution multiplies its weight with.

    Args:
        x: ``[batch, channels, *size]``.
        convolution: what has the settings of an ``nn.Conv1d`` or ``nn.Conv2d``.

    Returns:
        ``[batch, *out, positions * channels]``. A kernel of one position and stride 1 copies nothing.
    """
    kernel, dilation, padding = convolution.kernel_size, convolution.dilation, convolution.padding
    spans = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    if padding == "same":
        sides = [(span // 2, span - span // 2) for span in spans]
    elif padding == "valid":
        sides = [(0, 0)] * len(spans)
    else:
        sides = [(size, size) for size in padding]
    if any(map(any, sides)):
        flat = [size for pair in reversed(sides) for size in pair]
        x = F.pad(x, flat, mode="constant" if convolution.padding_mode == "zeros" else convolution.padding_mode)
    for dim, (span, size) in enumerate(zip(spans, x.shape[2:], strict=True)):
        if size <= span:
            raise RuntimeError(
                f"the kernel spans {span + 1} elements of dimension {dim + 2}, and the padded input has {size}"
            )
    x = x.movedim(1, -1)
    for dim, (span, stride, step) in enumerate(zip(spans, convolution.stride, dilation, strict=True), 1):
        x = x.unfold(dim, span + 1, stride)[..., ::step]
    out = len(kernel) + 1
    # From [batch, *out, channels, *kernel].
    return x.movedim(out, -1).flatten(out)


def as_matrix(weight: torch.Tensor) -> torch.Tensor:
    """The weight ``[out, channels, *kernel]`` of a convolution as ``[out, positions * channels]``."""
    return weight.movedim(1, -1).flatten(1)


def as_kernel(matrix: torch.Tensor, channels: int, kernel: tuple[int, ...]) -> torch.Tensor:
    """The weight of a convolution that :func:`as_matrix` made a matrix of."""
    return matrix.unflatten(1, (*kernel, channels)).movedim(-1, 1).contiguous()


def _expect_plain(convolution: nn.Module, plain: type) -> None:
    if type(convolution) is not plain:
        raise TypeError(f"a torch.nn.{plain.__name__} is required, not a {type(convolution).__name__}")
    if convolution.groups != 1:
        raise NotImplementedError(
            f"the convolution has {convolution.groups} groups of channels, each a small matrix of its own: leave it dense"
        )
    if any(hooks for name, hooks in vars(convolution).items() if "hooks" in name and isinstance(hooks, dict)):
        raise ValueError("the convolution has hooks, which the new layer would lose: remove them first")


def _batched(x: torch.Tensor, convolution, multiply) -> torch.Tensor:
    """The convolution of an input with or without a batch dimension."""
    rank = len(convolution.kernel_size)
    if x.dim() not in (rank + 1, rank + 2) or x.shape[-rank - 1] != convolution.in_channels:
        raise RuntimeError(
            f"the input has shape {list(x.shape)}; it must be [batch, {convolution.in_channels}, "
            f"{', '.join(['size'] * rank)}], or the same without batch"
        )
    if x.dim() == rank + 1:
        return _batched(x.unsqueeze(0), convolution, multiply).squeeze(0)
    return multiply(patches(x, convolution)).movedim(-1, 1)


class _Convolution(nn.Module):
    """A convolution with a frozen 2:4 weight, for inference and for training what surrounds it.

    The weight is that of a :class:`twofour.Linear`, ``linear``, whose parts state dicts have. Results have their
    channels last in memory; so should inputs, ``memory_format=torch.channels_last``, for kernels of one position to
    copy nothing.
    """

    DENSE: type

    def __init__(self, convolution: nn.Module, linear: Linear):
        super().__init__()
        self.in_channels, self.out_channels = convolution.in_channels, convolution.out_channels
        self.kernel_size, self.stride = convolution.kernel_size, convolution.stride
        self.padding, self.dilation = convolution.padding, convolution.dilation
        self.padding_mode = convolution.padding_mode
        self.linear = linear

    @classmethod
    def from_dense(cls, convolution: nn.Module, prune: bool = False, *, name: str = "weight"):
        """The layer of a dense one, whose bias it shares.

        Args:
            convolution: an ``nn.Conv1d`` or ``nn.Conv2d``, of any stride, padding and dilation, and one group.
            prune: keeps the two largest magnitudes of each group of four along the input channels; by default the
                weight must be 2:4 so already.
            name: the weight's name, for errors.

        Raises:
            TypeError: for another layer.
            NotImplementedError: for groups of channels, or another dtype than float32, bfloat16 and float16.
            ValueError: where the weight is not 2:4, with row and group of its matrix; for hooks and parametrizations.
        """
        _expect_plain(convolution, cls.DENSE)
        dense = nn.Linear(1, 1, bias=False, device="meta")
        dense.weight = nn.Parameter(as_matrix(convolution.weight.detach()), requires_grad=False)
        dense.out_features, dense.in_features = dense.weight.shape
        linear = Linear.from_dense(dense, prune, name=name)
        linear.bias = convolution.bias
        return cls(convolution, linear).train(convolution.training)

    @property
    def weight(self) -> torch.Tensor:
        """The weight ``[out, in, *kernel]``, dense with zeros: a copy."""
        return as_kernel(self.linear.dense_weight(), self.in_channels, self.kernel_size)

    @property
    def bias(self) -> nn.Parameter | None:
        """The bias."""
        return self.linear.bias

    def to_dense(self) -> nn.Module:
        """A dense convolution with the same weight, as a parameter that needs a gradient, and a copy of the bias."""
        weight = self.weight
        dense = self.DENSE(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation,
            bias=self.bias is not None, padding_mode=self.padding_mode, device="meta", dtype=weight.dtype,
        )  # fmt: skip
        dense.weight = nn.Parameter(weight)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return dense.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The convolution.

        Args:
            x: ``[batch, in_channels, *size]``, or without batch, of the weight's dtype or under autocast.

        Returns:
            ``[batch, out_channels, *out]``. Gradients reach ``x`` and the bias.

        Raises:
            RuntimeError: for another shape.
        """
        return _batched(x, self, self.linear)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}"
        )


class Conv1d(_Convolution):
    __doc__ = _Convolution.__doc__
    DENSE = nn.Conv1d


class Conv2d(_Convolution):
    __doc__ = _Convolution.__doc__
    DENSE = nn.Conv2d


class _SemiSparse:
    """A convolution whose weight is pruned in every forward pass, 2:4 along rows and columns of its matrix; the
    gradient reaches pruned elements, too. As :class:`twofour.sparsity.training.SemiSparseLinear` does."""

    DENSE: type
    algo: str = ""

    @classmethod
    def from_dense(cls, convolution: nn.Module, algo: str = ""):
        """A layer with the parameters of a convolution, as the same objects.

        Args:
            convolution: an ``nn.Conv1d`` or ``nn.Conv2d`` of one group.
            algo: how the mask is chosen, as of ``SemiSparseLinear``.

        Raises:
            TypeError: for another layer.
            NotImplementedError: for groups of channels.
            RuntimeError: for an unknown ``algo``.
        """
        _expect_plain(convolution, cls.DENSE)
        new = cls(
            convolution.in_channels, convolution.out_channels, convolution.kernel_size, convolution.stride,
            convolution.padding, convolution.dilation, bias=False, padding_mode=convolution.padding_mode,
            device="meta",
        )  # fmt: skip
        new._rule = operators.rule_number(rule_of_algorithm(algo))
        new.algo = algo
        new._parameters.update(weight=convolution._parameters["weight"], bias=convolution._parameters["bias"])
        return new.train(convolution.training)

    @property
    def _rule_now(self) -> int:
        return self.__dict__.get("_rule", operators.rule_number(rule_of_algorithm(self.algo)))

    @property
    def mask(self) -> torch.Tensor:
        """What the forward pass keeps of the present weight, of its shape and bool."""
        matrix = as_matrix(self.weight.detach()).contiguous()
        kept = masks.mask_of(operators.select(matrix, self._rule_now), *matrix.shape)
        return as_kernel(kept, self.in_channels, self.kernel_size)

    def dense_weight(self) -> torch.Tensor:
        """What the mask keeps of the present weight, dense with zeros, without a gradient."""
        return self.weight.detach().masked_fill(~self.mask, 0)

    def to_dense(self) -> nn.Module:
        """A dense convolution with what the mask keeps, a copy, and the same bias: what ``from_dense`` of the layers
        for inference takes."""
        dense = self.DENSE(
            self.in_channels, self.out_channels, self.kernel_size, self.stride, self.padding, self.dilation,
            bias=False, padding_mode=self.padding_mode, device="meta",
        )  # fmt: skip
        dense._parameters.update(weight=nn.Parameter(self.dense_weight()), bias=self._parameters["bias"])
        return dense.train(self.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = cast_activations(x, self.weight, self.bias)
        matrix = as_matrix(self.weight).contiguous()
        return _batched(x, self, lambda rows: master_linear(rows, matrix, bias, self._rule_now))


class SemiSparseConv1d(_SemiSparse, nn.Conv1d):
    __doc__ = _SemiSparse.__doc__
    DENSE = nn.Conv1d


class SemiSparseConv2d(_SemiSparse, nn.Conv2d):
    __doc__ = _SemiSparse.__doc__
    DENSE = nn.Conv2d
