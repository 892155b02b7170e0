"""A linear layer with a 2:4 weight, for inference and for training what surrounds it."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from .. import operators
from ..arrays.bytes import dtype_name
from ..canonical import parts_shapes
from ..operators.autograd import packed_linear
from ..operators.derivatives import is_differentiated, is_in_graph
from ..operators.packed import Packed, metadata_of_zeros, pack_by_rule, pack_sparse
from ..tensor.memory import share_between_processes
from ..tensor.semi_structured import SparseSemiStructuredTensorCUSPARSELT
from . import registration
from .conversion import SparseLayer, dense_layer, expect_convertible, take_over, weight_of
from .packed_buffer import PackedBuffer
from .packed_layer import PackedLayer
from .readers import multiplies_nested
from .tracing import traceable

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

#: The dtypes that kernels multiply.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int, in_features: int
) -> torch.Tensor:
    """:meth:`Linear.forward` of a packed weight."""
    device = x.device.type
    if _is_any_autocast_enabled() and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            y = _linear(x.to(packed.dtype), packed, bias, out_features, in_features)
        return y.to(torch.get_autocast_dtype(device))
    shape = x.shape
    if not shape or shape[-1] != in_features:
        raise RuntimeError(
            f"the input has shape {list(shape)}; its last dimension must be in_features = {in_features}"
        )
    return packed_linear(x, None, bias, Packed(out_features, in_features, packed))


operators.define_composite(
    "layer_linear(Tensor x, Tensor packed, Tensor? bias, int out_features, int in_features) -> Tensor", _linear
)
_compiled_linear = torch.ops.twofour.layer_linear.default


@share_between_processes
class Linear(PackedLayer, SparseLayer, nn.Linear):
    """``y = x @ W.T + bias`` with a 2:4 weight ``W`` of shape ``[out_features, in_features]``. The weight is frozen.

    The layer holds its weight once: packed, in the layout of the device's kernels. State dicts and pickles hold the
    canonical form, which is made when it is asked for:

    ==================  ========================================  =====================================================
    ``weight_values``   ``[out_features, 2 * ceil(in / 4)]``      the kept values, in the weight's dtype
    ``weight_meta``     ``[out_features, ceil(in / 32)]``         the 4-bit codes of their positions, of int32
    ``bias``            ``[out_features]``                        a parameter, where there is a bias
    ==================  ========================================  =====================================================

    ``load_state_dict`` also takes ``weight``, a dense tensor that is 2:4 or a sparse one. A layer on the device
    ``meta``, and one after ``to_empty``, holds empty canonical parts until it is loaded.

    Args:
        in_features: columns of the weight; any number.
        out_features: rows of the weight; any number.
        bias: whether there is a bias.
        device: where the layer lives.
        dtype: float32, bfloat16 or float16.

    Raises:
        NotImplementedError: for another dtype.
    """

    PACKED = "weight_packed"
    TAKES_DENSE = True
    FROZEN_BUFFERS = (PACKED,)

    #: transformers initializes every ``nn.Linear`` whose weight no checkpoint has; this one is loaded by its quantizer,
    #: or packed.
    _is_hf_initialized = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None):
        # Not nn.Linear's, which makes a dense weight.
        nn.Module.__init__(self)
        registration.with_transformers()
        self.in_features = in_features
        self.out_features = out_features
        values, meta = parts_shapes(out_features, in_features)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _require_supported(dtype)
        # First: torch.export counts the buffers before one, those that are None, too.
        self.register_buffer("weight_packed", None, persistent=False)
        # Properties of the same names read them where the layer is on the device meta.
        self._buffers["weight_values"] = self._buffers["weight_meta"] = None
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )
        self._take(
            torch.zeros(values, device=device, dtype=dtype), metadata_of_zeros(meta, -(-in_features // 4), device)
        )

    @classmethod
    def from_dense(cls, linear: nn.Linear, prune: bool = False, *, name: str = "weight") -> Linear:
        """The layer of a dense one, whose bias it shares.

        Args:
            linear: the layer; its weight has any shape, and is float32, bfloat16 or float16. A layer that prunes its
                weight itself, such as :class:`twofour.sparsity.training.SemiSparseLinear`, is taken as it computes in
                evaluation, and one whose weight is a sparse tensor with that weight.
            prune: keeps the two largest magnitudes of each group of four, of a weight that is not sparse; by default it
                must be 2:4 already.
            name: the weight's name, for errors.

        Returns:
            the layer, with the hooks, attributes and training flag of the given one.

        Raises:
            ValueError: where the weight is not 2:4, with row and group; for a NaN where it is pruned; for a layer with
                parametrizations.
            TypeError: for a subclass of ``nn.Linear`` whose own methods, such as ``forward``, would be lost.
            NotImplementedError: for another dtype.
        """
        expect_convertible(linear)
        _require_supported(linear.weight.dtype, name)
        self = cls(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
        self.bias = linear.bias
        dense, is_pruned = weight_of(linear)
        self._pack_dense(dense, prune and not is_pruned, name)
        return take_over(self, linear)

    def dense_weight(self) -> torch.Tensor:
        """The weight, dense with zeros."""
        return self.packed_weight.to_dense()

    def to_dense(self) -> nn.Linear:
        """A dense layer with the same weight, as a parameter that needs a gradient, a copy of the bias, and the same
        hooks, attributes and training flag."""
        linear = dense_layer(self, nn.Parameter(self.dense_weight()))
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), requires_grad=self.bias.requires_grad)
        return linear

    # The weight.

    @property
    def packed_weight(self) -> Packed:
        """The packed weight."""
        return Packed(self.out_features, self.in_features, self.pack())

    @property
    def weight(self):
        """The weight as a sparse tensor that shares this layer's memory; assigning to its ``data`` replaces the layer's
        weight. torch's attention and encoder layers read a dense copy where their input is nested."""
        if not torch.compiler.is_compiling() and multiplies_nested(sys._getframe(1)):
            return self.dense_weight()
        weight = SparseSemiStructuredTensorCUSPARSELT._of(self.packed_weight)
        weight._layer = self
        return weight

    def canonical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and metadata in canonical form."""
        packed = self._packed
        if packed is None:
            return self._buffers["weight_values"], self._buffers["weight_meta"]
        return operators.canonical(packed, self.out_features, self.in_features)

    @property
    def stored_dtype(self) -> str:
        """The name of the dtype that the weight has in files."""
        packed = self._buffers["weight_packed"]
        return dtype_name((self._buffers["weight_values"] if packed is None else packed).dtype)

    def pack(self) -> torch.Tensor:
        """The packed weight; parts that a layer was given on the device ``meta`` and that were filled since are packed,
        and let go of.

        Raises:
            RuntimeError: where the parts are not those of a 2:4 weight of this shape, or lie on the device ``meta``.
        """
        if self._packed is None:
            parts = self._buffers["weight_values"], self._buffers["weight_meta"]
            if parts[0].device.type == "meta":
                raise RuntimeError("the weight is on the device meta: load it first")
            self._take(*parts)
        return self._packed

    def _pack(self, values: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
        for what, part, shape in zip(
            self.PARTS, (values, meta), parts_shapes(self.out_features, self.in_features), strict=True
        ):
            if tuple(part.shape) != shape:
                raise RuntimeError(
                    f"{what} of a weight [{self.out_features}, {self.in_features}] has shape {list(shape)}, not "
                    f"{list(part.shape)}"
                )
        if meta.dtype == torch.uint32:
            meta = meta.view(torch.int32)
        return operators.from_canonical(values.contiguous(), meta.contiguous(), self.in_features)

    def _take(self, values, meta):
        if values.device.type == "meta":
            self._buffers.update(weight_packed=None, weight_values=values, weight_meta=meta)
        else:
            super()._take(values, meta)

    def _pack_dense(self, dense: torch.Tensor, prune: bool, name: str) -> None:
        try:
            weight = pack_by_rule(dense, "magnitude", transpose=False)[0] if prune else pack_sparse(dense)
        except ValueError as error:
            raise ValueError(f"tensor `{name}`: {error}") from None
        self._set_packed(weight.forward)

    def replace_weight(self, weight: Packed) -> None:
        """Replaces the weight by another one of the layer's shape, packed along its rows.

        Raises:
            RuntimeError: for another shape.
            NotImplementedError: for a dtype that no kernel multiplies.
        """
        if (weight.rows, weight.cols) != (self.out_features, self.in_features):
            raise RuntimeError(
                f"the weight has shape {[weight.rows, weight.cols]}, the layer's has [{self.out_features}, "
                f"{self.in_features}]"
            )
        _require_supported(weight.dtype)
        self._set_packed(weight.forward)

    def _set_packed(self, packed: torch.Tensor) -> None:
        super()._set_packed(packed)
        self._buffers["weight_values"] = self._buffers["weight_meta"] = None

    # Computing.

    @traceable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x @ W.T + bias``.

        Args:
            x: ``[..., in_features]``, of the weight's dtype; under autocast it is converted to that.

        Returns:
            ``[..., out_features]``, under autocast of autocast's dtype. Gradients reach ``x`` and the bias.

        Raises:
            RuntimeError: for another number of features.
            NotImplementedError: for another dtype.
        """
        # Not as attributes: nn.Module's lookup would take a tenth of a small call.
        packed, parameters = self._buffers["weight_packed"], self._parameters
        # FSDP puts a view where the parameter was.
        bias = parameters["bias"] if "bias" in parameters else self.bias
        packed = packed.plain if type(packed) is PackedBuffer else self.pack() if packed is None else packed
        if is_in_graph():
            return _compiled_linear(x, packed, bias, self.out_features, self.in_features)
        # The first question takes least, and is of all devices.
        if (
            x.dtype is packed.dtype
            and not _is_any_autocast_enabled()
            and not is_dynamo_compiling()
            and not is_differentiated(x, bias)
        ):
            try:
                if bias is None:
                    return operators.eager_linear(x, packed, self.out_features)
                return operators.eager_linear_bias(x, packed, bias, self.out_features, 0)
            except RuntimeError:
                # What is wrong is said below.
                pass
        return _linear(x, packed, bias, self.out_features, self.in_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, pattern=2:4"

    # Moving and loading.

    def _moved(self, fn):
        packed = self._packed
        if packed is None:
            return None
        # What fn does to a tensor of the weight's dtype and device.
        probe = fn(packed.new_zeros(1))
        _require_supported(probe.dtype)
        if (probe.dtype, probe.device) == (packed.dtype, packed.device):
            return fn(packed)
        values, meta = self.canonical()
        values, meta = fn(values), meta.to(probe.device)
        if probe.device.type != "meta":
            return self._pack(values, meta)
        self._take(values, meta)
        return None

    def _target(self) -> dict[str, object]:
        """The dtype of the layer, and its device; a layer on the device meta takes what it is given, where it is."""
        like = self._buffers["weight_values"] if self._packed is None else self._packed
        return {"dtype": like.dtype} if like.device.type == "meta" else {"dtype": like.dtype, "device": like.device}

    def _checked(self, values, meta):
        values = values.to(**self._target())
        return values, meta.to(device=values.device)

    def _load_dense(self, weight: torch.Tensor) -> None:
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise RuntimeError(f"its shape is {list(weight.shape)}, not [{self.out_features}, {self.in_features}]")
        if isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
            weight = weight.to_dense()
        self._set_packed(pack_sparse(weight.detach().to(**self._target())).forward)


def _require_supported(dtype: torch.dtype, name: str = "weight") -> None:
    if dtype not in DTYPES:
        raise NotImplementedError(
            f"tensor `{name}`: no kernel multiplies {dtype}; use one of {', '.join(map(str, DTYPES))}"
        )
