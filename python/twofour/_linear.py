"""A linear layer with a 2:4 weight, for inference and for training what surrounds it."""

from __future__ import annotations

import contextlib
import contextvars
import sys

import torch
from torch import nn

from . import _ops, _registration
from ._arrays import dtype_name
from ._autograd import packed_linear
from ._compression import Compressed, parts_shapes
from ._conversion import SparseLayer, dense_layer, expect_convertible, take_over, weight_of
from ._memory import share_between_processes
from ._packed import Packed, metadata_of_zeros, pack_by_rule, pack_sparse
from ._packed_buffer import PackedBuffer, plain
from ._parallel import FrozenBuffers
from ._readers import multiplies_nested
from ._tracing import traceable

_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

#: The dtypes that kernels multiply.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: Whether state dicts hold the layer itself under ``weight``, in the place of its canonical parts.
_DEFERRED = contextvars.ContextVar("twofour_deferred", default=False)


@contextlib.contextmanager
def deferred_weights():
    """Inside, ``state_dict`` puts each layer with a packed weight itself under the name of its weight, so that no canonical copies are made."""
    token = _DEFERRED.set(True)
    try:
        yield
    finally:
        _DEFERRED.reset(token)


def weights_are_deferred() -> bool:
    """Whether :func:`deferred_weights` is in force."""
    return _DEFERRED.get()


@share_between_processes
class Linear(FrozenBuffers, SparseLayer, nn.Linear):
    """``y = x @ W.T + bias`` with a 2:4 weight ``W`` of shape ``[out_features, in_features]``. The weight is frozen.

    The layer holds its weight once: packed, in the layout of the device's kernels. State dicts and pickles hold the canonical form, which is
    made when it is asked for:

    ==================  ========================================  =====================================================
    ``weight_values``   ``[out_features, 2 * ceil(in / 4)]``      the kept values, in the weight's dtype
    ``weight_meta``     ``[out_features, ceil(in / 32)]``         the 4-bit codes of their positions, of int32
    ``bias``            ``[out_features]``                        a parameter, where there is a bias
    ==================  ========================================  =====================================================

    ``load_state_dict`` also takes ``weight``, a dense tensor that is 2:4 or a sparse one. A layer on the device ``meta``, and one after
    ``to_empty``, holds empty canonical parts until it is loaded.

    Args:
        in_features: columns of the weight; any number.
        out_features: rows of the weight; any number.
        bias: whether there is a bias.
        device: where the layer lives.
        dtype: float32, bfloat16 or float16.

    Raises:
        NotImplementedError: for another dtype.
    """

    FROZEN_BUFFERS = ("weight_packed",)

    #: transformers initializes every ``nn.Linear`` whose weight no checkpoint has; this one is loaded by its quantizer, or packed.
    _is_hf_initialized = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device=None, dtype=None):
        # Not nn.Linear's, which makes a dense weight.
        nn.Module.__init__(self)
        _registration.with_transformers()
        self.in_features = in_features
        self.out_features = out_features
        values, meta = parts_shapes(out_features, in_features)
        dtype = torch.get_default_dtype() if dtype is None else dtype
        _require_supported(dtype)
        # Properties of the same names read them.
        self._buffers["weight_values"] = torch.zeros(values, device=device, dtype=dtype)
        self._buffers["weight_meta"] = metadata_of_zeros(meta, -(-in_features // 4), device)
        self.register_buffer("weight_packed", None, persistent=False)
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None)
        if self._buffers["weight_values"].device.type != "meta":
            self.pack()

    @classmethod
    def from_dense(cls, linear: nn.Linear, prune: bool = False, *, name: str = "weight") -> Linear:
        """The layer of a dense one, whose bias it shares.

        Args:
            linear: the layer; its weight has any shape, and is float32, bfloat16 or float16. A layer that prunes its weight itself, such as
                :class:`twofour.sparsity.training.SemiSparseLinear`, is taken as it computes in evaluation, and one whose weight is a sparse tensor
                with that weight.
            prune: keeps the two largest magnitudes of each group of four, of a weight that is not sparse; by default it must be 2:4 already.
            name: the weight's name, for errors.

        Returns:
            the layer, with the hooks, attributes and training flag of the given one.

        Raises:
            ValueError: where the weight is not 2:4, with row and group; for a NaN where it is pruned; for a layer with parametrizations.
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
        """A dense layer with the same weight, as a parameter that needs a gradient, a copy of the bias, and the same hooks, attributes and training
        flag."""
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
        """The weight as a sparse tensor that shares this layer's memory; assigning to its ``data`` replaces the layer's weight. torch's attention and
        encoder layers read a dense copy where their input is nested."""
        from .sparse import SparseSemiStructuredTensorCUSPARSELT

        if not torch.compiler.is_compiling() and multiplies_nested(sys._getframe(1)):
            return self.dense_weight()
        weight = SparseSemiStructuredTensorCUSPARSELT._of(self.packed_weight)
        weight._layer = self
        return weight

    @property
    def weight_values(self) -> torch.Tensor:
        """The kept values in canonical form; a copy where the weight is packed."""
        return self.canonical()[0]

    @property
    def weight_meta(self) -> torch.Tensor:
        """The metadata in canonical form; a copy where the weight is packed."""
        return self.canonical()[1]

    def canonical(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and metadata in canonical form."""
        packed = plain(self._buffers["weight_packed"])
        if packed is None:
            return self._buffers["weight_values"], self._buffers["weight_meta"]
        return _ops.canonical(packed, self.out_features, self.in_features)

    @property
    def stored_dtype(self) -> str:
        """The name of the dtype that the weight has in files."""
        packed = self._buffers["weight_packed"]
        return dtype_name((self._buffers["weight_values"] if packed is None else packed).dtype)

    def compressed(self) -> Compressed:
        """The weight as files hold it."""
        values, meta = self.canonical()
        return Compressed(values, meta, (self.out_features, self.in_features), dtype_name(values.dtype))

    def pack(self) -> torch.Tensor:
        """Packs canonical parts that were loaded, and lets go of them. A second call does nothing.

        Raises:
            RuntimeError: where the parts are not those of a 2:4 weight of this shape, or lie on the device ``meta``.
        """
        packed = plain(self._buffers["weight_packed"])
        if packed is None:
            values, meta = self._buffers["weight_values"], self._buffers["weight_meta"]
            if values.device.type == "meta":
                raise RuntimeError("the weight is on the device meta: load it first")
            packed = self._packed_of(values, meta)
            self._set_packed(packed)
        return packed

    def _packed_of(self, values: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
        for what, part, shape in zip(
            ("weight_values", "weight_meta"), (values, meta), parts_shapes(self.out_features, self.in_features), strict=True
        ):
            if tuple(part.shape) != shape:
                raise RuntimeError(
                    f"{what} of a weight [{self.out_features}, {self.in_features}] has shape {list(shape)}, not {list(part.shape)}"
                )
        if meta.dtype == torch.uint32:
            meta = meta.view(torch.int32)
        return _ops.from_canonical(values.contiguous(), meta.contiguous(), self.in_features)

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
            raise RuntimeError(f"the weight has shape {[weight.rows, weight.cols]}, the layer's has [{self.out_features}, {self.in_features}]")
        _require_supported(weight.dtype)
        self._set_packed(weight.forward)

    def _set_packed(self, packed: torch.Tensor) -> None:
        self._buffers["weight_packed"] = PackedBuffer.of(packed)
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
        # The first question takes least, and is of all devices.
        if _is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x.to(packed.dtype)).to(torch.get_autocast_dtype(x.device.type))
        shape = x.shape
        if not shape or shape[-1] != self.in_features:
            raise RuntimeError(f"the input has shape {list(shape)}; its last dimension must be in_features = {self.in_features}")
        return packed_linear(x, None, bias, Packed(self.out_features, self.in_features, packed))

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, pattern=2:4"

    # Moving, saving, loading.

    def _apply(self, fn, recurse=True):
        packed = plain(self._buffers["weight_packed"])
        if packed is not None:
            # What fn does to a tensor of the weight's dtype and device.
            probe = fn(packed.new_zeros(1))
            _require_supported(probe.dtype)
            if (probe.dtype, probe.device) == (packed.dtype, packed.device):
                moved = fn(packed)
                if moved is not packed:
                    self._set_packed(moved)
            else:
                values, meta = self.canonical()
                values, meta = fn(values), meta.to(probe.device)
                if probe.device.type == "meta":
                    self._buffers.update(weight_packed=None, weight_values=values, weight_meta=meta)
                else:
                    self._set_packed(self._packed_of(values, meta))
            # The base class leaves it alone.
            packed, self._buffers["weight_packed"] = self._buffers["weight_packed"], None
            try:
                return super()._apply(fn, recurse)
            finally:
                self._buffers["weight_packed"] = packed
        return super()._apply(fn, recurse)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if weights_are_deferred():
            for part in ("weight_values", "weight_meta"):
                destination.pop(prefix + part, None)
            destination[prefix + "weight"] = self
        elif self._buffers["weight_packed"] is not None:
            destination[prefix + "weight_values"], destination[prefix + "weight_meta"] = self.canonical()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs):
        names = ("weight_values", "weight_meta", "weight")
        given = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        parts = self._buffers["weight_values"], self._buffers["weight_meta"]
        self._buffers["weight_values"] = self._buffers["weight_meta"] = None
        try:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        finally:
            self._buffers["weight_values"], self._buffers["weight_meta"] = parts
        unexpected_keys[:] = [key for key in unexpected_keys if key not in {prefix + name for name in given}]
        if "weight" not in given and len(given) < 2:
            missing_keys.extend(prefix + name for name in names[:2] if name not in given)
            return
        try:
            self._load(prefix, **given)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            error_msgs.append(f"{prefix}weight: {error}")

    def _load(self, prefix, weight=None, weight_values=None, weight_meta=None):
        like = self._buffers["weight_packed"]
        like = self._buffers["weight_values"] if like is None else like
        # A layer on the device meta takes what it is given, where it is.
        target = {} if like.device.type == "meta" else {"device": like.device}
        target["dtype"] = like.dtype
        if weight is None:
            values = weight_values.to(**target)
            self._set_packed(self._packed_of(values, weight_meta.to(device=values.device)))
            return
        if tuple(weight.shape) != (self.out_features, self.in_features):
            raise RuntimeError(f"its shape is {list(weight.shape)}, not [{self.out_features}, {self.in_features}]")
        if isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
            weight = weight.to_dense()
        self._set_packed(pack_sparse(weight.detach().to(**target)).forward)

    def __getstate__(self):
        state = self.__dict__.copy()
        buffers = dict(self._buffers)
        buffers["weight_values"], buffers["weight_meta"] = self.canonical()
        buffers["weight_packed"] = None
        state["_buffers"] = buffers
        return state

    def __setstate__(self, state):
        super().__setstate__(state)
        if self._buffers["weight_values"].device.type != "meta":
            self.pack()


def _require_supported(dtype: torch.dtype, name: str = "weight") -> None:
    if dtype not in DTYPES:
        raise NotImplementedError(f"tensor `{name}`: no kernel multiplies {dtype}; use one of {', '.join(map(str, DTYPES))}")
